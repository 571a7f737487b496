"""Task kind `sample`: penalties, temperature, top-k, top-p, min-p and the draw, one slot of the batch a tile.

Operator: inputs (logits [logit rows, vocab], step), output choice int32 [1, max_batch], attrs {vocab, max_batch}. Slots without
a row of logits in the step get -1. Options of a slot stand in its `Sequence`, so one program serves them all. Behind a `head` there are
two more inputs, its parts and its penalised logits, and its attrs {parts, slice}; a slot of `choice` is then a message of 4 columns, and only
slots that want more than a draw from all tokens get one (the others are left to `advance`).
"""

from __future__ import annotations

from collections.abc import Mapping

from mpk.graph.sm_task_graph import Cost, Region
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import TaskKind
from mpk.tasks.head.sharing import MESSAGE_COLUMNS


class Sample(TaskKind):
    name = "sample"
    operands = ("logits", "choice", "parts", "values")

    def tiles(self, op: Operator, graph: TensorGraph) -> int:
        return int(op.attrs["max_batch"])

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        return {"logits": op.inputs[0], "choice": op.outputs[0], **dict(zip(("parts", "values"), op.inputs[2:], strict=False))}

    def reads(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return tuple(Region(name, 0, graph.values[name].columns) for name in (op.inputs[0], *op.inputs[2:]))

    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return (Region(op.outputs[0], choice_column(op, begin), choice_column(op, end)),)

    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        # One row of logits is read whatever the number of slots: a step of one row has one row of logits. Behind a head mostly none is.
        vocab = int(op.attrs.get("slice", op.attrs["vocab"]))
        return Cost(0, 4 * vocab, 2 * vocab)

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        return {name: int(op.attrs[name]) for name in ("vocab", "parts", "slice") if name in op.attrs}

    def scratch_bytes(self, op: Operator, graph: TensorGraph, max_rows: int) -> int:
        """Weights, counts and candidates of one row (`SamplingScratch` in sampling.hpp); none behind a head."""
        return 0 if "parts" in op.attrs else 16 * int(op.attrs["vocab"]) + 192


def choice_column(op: Operator, slot: int) -> int:
    """First column of a slot in the output of a `sample` operator."""
    return slot * (MESSAGE_COLUMNS if "parts" in op.attrs else 1)


KIND = Sample()
