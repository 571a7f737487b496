"""Task kind `logit_slices`: what `head` leaves for sampling besides the logits, from logits that stand in memory; a tile is a slice.

Where ranks share the model each makes the logits of its own part of the vocabulary only, so slices can be looked at when all parts have come.
Operator: inputs (logits [logit rows, vocab],), outputs (tops [logit rows, parts * 4]; parts [logit rows, parts * 8]; values [logit rows,
vocab]), attrs {vocab, parts, slice}. See `head` for what the outputs hold.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpk.graph.sm_task_graph import Cost, Region
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import TaskKind
from mpk.tasks.head.sharing import MESSAGE_COLUMNS, PART_COLUMNS


class LogitSlices(TaskKind):
    name = "logit_slices"
    operands = ("", "logits", "tops", "parts", "values")  # places as in head/slices.cuh, whose first operand is the input of its product

    def tiles(self, op: Operator, graph: TensorGraph) -> int:
        return int(op.attrs["parts"])

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        return {"logits": op.inputs[0], **dict(zip(("tops", "parts", "values"), op.outputs, strict=True))}

    def reads(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return (Region(op.inputs[0], *self._slices(op, begin, end)),)

    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        tops, parts, values = op.outputs
        return (Region(tops, begin * MESSAGE_COLUMNS, end * MESSAGE_COLUMNS), Region(parts, begin * PART_COLUMNS, end * PART_COLUMNS),
                Region(values, *self._slices(op, begin, end)))

    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        first, last = self._slices(op, begin, end)
        return Cost(0, 4 * (last - first + MESSAGE_COLUMNS * (end - begin)), 2 * (last - first))

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        return {name: int(op.attrs[name]) for name in ("vocab", "parts", "slice")}

    @staticmethod
    def _slices(op: Operator, begin: int, end: int) -> tuple[int, int]:
        """Columns of the logits."""
        size = int(op.attrs["slice"])
        return begin * size, min(end * size, int(op.attrs["vocab"]))


KIND = LogitSlices()
