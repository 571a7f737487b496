"""Task kind `all_gather`: puts the logits that the ranks computed, each for its share of the vocabulary, side by side in every rank.

Operator: inputs (part [logit rows, columns] of kind "peer",), outputs (logits [logit rows, n],), attrs {n, columns (of a rank's share),
ranks, message, messages}. A tile is 16 columns of every rank's share; columns beyond n are nobody's.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpk.graph.sm_task_graph import Cost, Region
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import TaskKind
from mpk.tasks.messages import WORD_BYTES, message_of
from mpk.tasks.packing import PANEL, panels_of


class AllGather(TaskKind):
    name = "all_gather"
    operands = ("part", "out")
    follows = "part"

    def tiles(self, op: Operator, graph: TensorGraph) -> int:
        return panels_of(int(op.attrs["columns"]))

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        return {"part": op.inputs[0], "out": op.outputs[0]}

    def reads(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return (Region(op.inputs[0], begin * PANEL, min(end * PANEL, int(op.attrs["columns"]))),)

    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        n, columns = int(op.attrs["n"]), int(op.attrs["columns"])
        shares = [(rank * columns + begin * PANEL, rank * columns + min(end * PANEL, columns)) for rank in range(int(op.attrs["ranks"]))]
        return tuple(Region(op.outputs[0], first, min(last, n)) for first, last in shares if first < n)

    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        words = (min(end * PANEL, int(op.attrs["columns"])) - begin * PANEL) * int(op.attrs["ranks"])
        return Cost(0, words * (WORD_BYTES + 4), words)

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        return {name: int(op.attrs[name]) for name in ("n", "columns", "ranks")}

    def arguments(self, op: Operator) -> tuple[int, int]:
        return message_of(op.attrs)


KIND = AllGather()
