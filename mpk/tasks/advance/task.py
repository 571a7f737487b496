"""Task kind `advance`: appends tokens, ends sequences, manages key-value pages, plans the next step. One tile.

Operator: inputs (choice int32 [1, max_batch], step), output step.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpk.graph.sm_task_graph import Cost, Region
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import TaskKind


class Advance(TaskKind):
    name = "advance"
    operands = ("choice",)

    def tiles(self, op: Operator, graph: TensorGraph) -> int:
        return 1

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        return {"choice": op.inputs[0]}

    def reads(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return (Region(op.inputs[0], 0, graph.values[op.inputs[0]].columns),)

    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return (Region(op.outputs[0], 0, graph.values[op.outputs[0]].columns),)

    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        return Cost(0, 64, 64)

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        return {}


KIND = Advance()
