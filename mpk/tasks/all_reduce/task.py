"""Task kind `all_reduce`: sums a message over all ranks, in the order of ranks, and adds it to the residual stream; a tile is 16 columns,
or as many as the sender's tiles have.

Operator: inputs (part [rows, columns] of kind "peer",), and where `residual` what the sum is added to [rows, n]; outputs (x [rows, n],), which
may be the same buffer, and agreed int32 [1, 1] where `control`; attrs {n, columns (of the part, n or more), ranks, residual, control, two_shot_rows, message, messages,
tile_columns (default 16)}. The operator before it sends the part
(`mpk.tasks.messages`). With `control` the word behind the last column of row 0 of rank 0's part goes to `agreed`: whether the host has
cancelled, as rank 0 saw it when the step began.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpk.graph.sm_task_graph import Cost, Region
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import TaskKind
from mpk.tasks.linear.task import tile_columns
from mpk.tasks.messages import CONTROL_COLUMNS, WORD_BYTES, message_of


class AllReduce(TaskKind):
    name = "all_reduce"
    operands = ("part", "x", "agreed", "residual")
    follows = "part"

    def tiles(self, op: Operator, graph: TensorGraph) -> int:
        return -(-int(op.attrs["n"]) // tile_columns(op))

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        return {"part": op.inputs[0], **dict(zip(("x", "agreed"), op.outputs, strict=False)), **dict(zip(("residual",), op.inputs[1:], strict=False))}

    def reads(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        (first, last), n = own_columns(op, begin, end), int(op.attrs["n"])
        control = bool(op.attrs["control"]) and last == n
        regions = (Region(op.inputs[0], first, last + CONTROL_COLUMNS * control),)
        return (*regions, Region(op.inputs[1], first, last)) if op.attrs["residual"] else regions

    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        (first, last), n = own_columns(op, begin, end), int(op.attrs["n"])
        regions = (Region(op.outputs[0], first, last),)
        return (*regions, Region(op.outputs[1], 0, 1)) if op.attrs["control"] and last == n else regions

    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        (first, last), ranks = own_columns(op, begin, end), int(op.attrs["ranks"])
        columns = last - first
        return Cost(0, columns * (WORD_BYTES * ranks + 8), columns * ranks)

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        numbers: dict[str, Scalar] = {name: int(op.attrs[name]) for name in ("n", "columns", "ranks", "two_shot_rows")}
        return {**numbers, "tile_columns": tile_columns(op), "residual": bool(op.attrs["residual"]), "control": bool(op.attrs["control"])}

    def arguments(self, op: Operator) -> tuple[int, int]:
        return message_of(op.attrs)


def own_columns(op: Operator, begin: int, end: int) -> tuple[int, int]:
    """First and last column of tiles [begin, end)."""
    return begin * tile_columns(op), min(end * tile_columns(op), int(op.attrs["n"]))


KIND = AllReduce()
