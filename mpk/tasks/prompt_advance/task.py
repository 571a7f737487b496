"""Task kind `prompt_advance`: closes a prompt step and plans the next one. One tile.

Operator: inputs (step,), output step.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpk.graph.sm_task_graph import Cost, Region
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import TaskKind


class PromptAdvance(TaskKind):
    name = "prompt_advance"
    operands = ()

    def tiles(self, op: Operator, graph: TensorGraph) -> int:
        return 1

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        return {}

    def reads(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return ()

    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return (Region(op.outputs[0], 0, graph.values[op.outputs[0]].columns),)

    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        return Cost(0, 64, 64)

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        return {}


KIND = PromptAdvance()
