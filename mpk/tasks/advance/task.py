"""Task kind `advance`: appends tokens, ends sequences, manages key-value pages, plans the next step. One tile.

Operator: inputs (choice int32 [1, max_batch], step), output step. Behind a `head` or `logit_slices` (GPU targets) there are two more inputs,
their tops and the logits, and attrs {vocab, parts, slice}: `advance` then chooses the tokens of most sequences itself, see `cuda.cuh`. Where
ranks share the model there is one more input, the last, agreed int32 [1, 1]: whether the host has cancelled, on which all ranks have to agree.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpk.graph.sm_task_graph import Cost, Region
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import TaskKind


class Advance(TaskKind):
    name = "advance"
    operands = ("choice", "tops", "logits", "agreed")

    def tiles(self, op: Operator, graph: TensorGraph) -> int:
        return 1

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        names = ("tops", "logits", "agreed") if "parts" in op.attrs else ("agreed",)
        return {"choice": op.inputs[0], **dict(zip(names, op.inputs[2:], strict=False))}

    def reads(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return tuple(Region(name, 0, graph.values[name].columns) for name in (op.inputs[0], *op.inputs[2:]))

    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return (Region(op.outputs[0], 0, graph.values[op.outputs[0]].columns),)

    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        return Cost(0, 64, 64)

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        return {name: int(op.attrs[name]) for name in ("vocab", "parts", "slice") if name in op.attrs}


KIND = Advance()
