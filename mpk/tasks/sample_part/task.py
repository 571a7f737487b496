"""Task kind `sample_part`: what sampling needs of one slice of the vocabulary, so that `sample` reads no more than it must.

Operator: inputs (logits [logit rows, vocab], step), outputs (parts [logit rows, parts * 8]; values [logit rows, vocab], the logits after
penalties, written for sequences that have some), attrs {vocab, parts, slice, max_batch}. A tile is a slice. For every row of logits a
part leaves the largest value, its lowest token, and the sum of e^((value - largest) / temperature); the same of the logits as they came
in where log-probabilities are wanted. Sequences that want all logits get them copied.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpk.graph.sm_task_graph import Cost, Region
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import TaskKind
from mpk.tasks.sample_part.sharing import PART_COLUMNS


class SamplePart(TaskKind):
    name = "sample_part"
    operands = ("logits", "parts", "values")

    def tiles(self, op: Operator, graph: TensorGraph) -> int:
        return int(op.attrs["parts"])

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        return {"logits": op.inputs[0], "parts": op.outputs[0], "values": op.outputs[1]}

    def reads(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return (Region(op.inputs[0], *self._slice(op, begin, end)),)

    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return (Region(op.outputs[0], begin * PART_COLUMNS, end * PART_COLUMNS), Region(op.outputs[1], *self._slice(op, begin, end)))

    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        first, last = self._slice(op, begin, end)
        return Cost(0, 4 * (last - first) + 4 * PART_COLUMNS * (end - begin), 8 * (last - first))

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        return {name: int(op.attrs[name]) for name in ("vocab", "parts", "slice")}

    @staticmethod
    def _slice(op: Operator, begin: int, end: int) -> tuple[int, int]:
        size = int(op.attrs["slice"])
        return begin * size, min(end * size, int(op.attrs["vocab"]))


KIND = SamplePart()
