"""Task kind `all_gather`: puts the logits that the ranks computed, each for its share of the vocabulary, side by side in every rank.

Operator: inputs (part [logit rows, columns] of kind "peer",), outputs (logits [logit rows, n],), attrs {n, columns (of a rank's share),
ranks, message, messages, tile_columns (default 16)}. A tile is so many columns of every rank's share; columns beyond n are nobody's.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpk.graph.sm_task_graph import Cost, Region
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import TaskKind
from mpk.tasks.linear.task import tile_columns
from mpk.tasks.messages import WORD_BYTES, message_of


class AllGather(TaskKind):
    name = "all_gather"
    operands = ("part", "out")
    follows = "part"

    def tiles(self, op: Operator, graph: TensorGraph) -> int:
        return -(-int(op.attrs["columns"]) // tile_columns(op))

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        return {"part": op.inputs[0], "out": op.outputs[0]}

    def reads(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return (Region(op.inputs[0], *own_columns(op, begin, end)),)

    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        n, columns = int(op.attrs["n"]), int(op.attrs["columns"])
        first, last = own_columns(op, begin, end)
        shares = [rank * columns for rank in range(int(op.attrs["ranks"]))]
        return tuple(Region(op.outputs[0], share + first, min(share + last, n)) for share in shares if share + first < n)

    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        first, last = own_columns(op, begin, end)
        words = (last - first) * int(op.attrs["ranks"])
        return Cost(0, words * (WORD_BYTES + 4), words)

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        return {**{name: int(op.attrs[name]) for name in ("n", "columns", "ranks")}, "tile_columns": tile_columns(op)}

    def arguments(self, op: Operator) -> tuple[int, int]:
        return message_of(op.attrs)


def own_columns(op: Operator, begin: int, end: int) -> tuple[int, int]:
    """First and last column of tiles [begin, end), in every rank's share."""
    return begin * tile_columns(op), min(end * tile_columns(op), int(op.attrs["columns"]))


KIND = AllGather()
