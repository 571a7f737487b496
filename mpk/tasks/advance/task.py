"""Task kind `advance`: appends tokens, ends sequences, manages key-value pages, plans the next step. One tile.

Operator: inputs (choice int32 [1, max_batch], step), output step. Where ranks share the model there is a third input, agreed
int32 [1, 1]: whether the host has cancelled, on which all ranks have to agree.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpk.graph.sm_task_graph import Cost, Region
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import TaskKind


class Advance(TaskKind):
    name = "advance"
    operands = ("choice", "agreed")

    def tiles(self, op: Operator, graph: TensorGraph) -> int:
        return 1

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        return {"choice": op.inputs[0], **dict(zip(("agreed",), op.inputs[2:], strict=False))}

    def reads(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return tuple(Region(name, 0, graph.values[name].columns) for name in (op.inputs[0], *op.inputs[2:]))

    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return (Region(op.outputs[0], 0, graph.values[op.outputs[0]].columns),)

    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        return Cost(0, 64, 64)

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        return {}


KIND = Advance()
