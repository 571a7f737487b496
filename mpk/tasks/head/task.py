"""Task kind `head`: the product that makes the logits, and what sampling needs to know of them; a tile is 16 output columns.

Operator: a `linear` with epilogue `store` (see there) whose attrs are joined by {parts, slice}: the logits are cut into `parts` slices of
`slice` columns, and tasks are whole slices. Outputs (logits [logit rows, vocab]; tops [logit rows, parts * 4]; parts [logit rows, parts * 8];
values [logit rows, vocab]). Of every row of logits a slice leaves in `tops` its largest value, the lowest token that has it, and the sum of
e^((value - largest) / temperature) where the token is drawn. Rows that want more (penalties, filters, log-probabilities) get the same after
penalties in `parts`, and the logits after penalties in `values`. Sequences that want all logits get them copied.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpk.graph.sm_task_graph import Region
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.head.sharing import MESSAGE_COLUMNS, PART_COLUMNS
from mpk.tasks.linear.task import Linear
from mpk.tasks.packing import PANEL


class Head(Linear):
    name = "head"
    operands = ("input", "output", "tops", "parts", "values")
    halves = False  # slices are counted in tiles

    def body(self, op: Operator, graph: TensorGraph) -> tuple[Scalar, ...] | None:
        return None

    def unit(self, op: Operator, graph: TensorGraph) -> int:
        return int(op.attrs["slice"]) // PANEL

    def unit_a_task(self, op: Operator, graph: TensorGraph) -> bool:
        return True

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        return {**({} if self.gathered(op) else {"input": op.inputs[0]}), **dict(zip(self.operands[1:], op.outputs, strict=True))}

    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        (logits,) = super().writes(op, graph, begin, end)
        first, last = begin // self.unit(op, graph), -(-end // self.unit(op, graph))
        tops, parts, values = op.outputs[1:]
        return (logits, Region(tops, first * MESSAGE_COLUMNS, last * MESSAGE_COLUMNS), Region(parts, first * PART_COLUMNS, last * PART_COLUMNS),
                Region(values, logits.begin, logits.end))

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        return {**super().variant(op, graph, dtype), "vocab": int(op.attrs["n"]), "parts": int(op.attrs["parts"]), "slice": int(op.attrs["slice"])}


KIND = Head()
