"""Make sampling a matter of all workers: the head's tasks leave what is needed of their slices of the logits.

Runs before `partition`, on targets whose workers read too slowly for one of them to go through a vocabulary alone (an SM reads some
80 bytes a nanosecond, so 600 KB of logits would take 7 us, on the path of every token). The product that makes the logits becomes a `head`;
`advance` chooses tokens itself from what that leaves, and `sample` only for sequences that want more (its tasks are `optional`: without such
a sequence they do not even wait). Nothing that the two write outlives the step (they are `ephemeral`), so the step is closed without waiting for
their fences. Guarantees that both have what they read as inputs. Raises `ModelError` where the logits do not come from a product.
"""

from __future__ import annotations

from dataclasses import replace

from mpk.errors import ModelError
from mpk.graph.tensor_graph import Operator, TensorGraph, Value
from mpk.tasks.head.sharing import MESSAGE_COLUMNS, PART_COLUMNS, slices


def run(graph: TensorGraph, workers: int) -> TensorGraph:
    """Replace the product before `sample` by a `head`, and give `sample` and `advance` its outputs."""
    sample = next(op for op in graph.operators if op.kind == "sample")
    logits, step = sample.inputs
    product = graph.producer(logits)
    if product is None or product.kind != "linear":
        raise ModelError(f"operator {sample.name} samples from {logits}", expected="logits that a product makes")
    vocab, batch, (choice,) = int(sample.attrs["vocab"]), int(sample.attrs["max_batch"]), sample.outputs
    parts, size = slices(vocab, workers)
    sliced = {"parts": parts, "slice": size}
    tops, summaries, penalised = (f"{sample.name}.{name}" for name in ("tops", "parts", "values"))
    flagged = graph.values[product.inputs[0]].flagged  # messages tell by the number of the step that they have been written
    values = {tops: Value(tops, parts * MESSAGE_COLUMNS, "logits", element_bytes=4, flagged=flagged),
              summaries: Value(summaries, parts * PART_COLUMNS, "logits", element_bytes=4),
              penalised: Value(penalised, vocab, "logits", element_bytes=4),
              choice: replace(graph.values[choice], columns=batch * MESSAGE_COLUMNS, flagged=flagged)}

    def changed(op: Operator) -> Operator:
        if op is product:
            return replace(op, kind="head", outputs=(logits, tops, summaries, penalised), attrs={**op.attrs, **sliced, "ephemeral": True})
        if op is sample:
            return replace(op, inputs=(logits, step, summaries, penalised), attrs={**op.attrs, **sliced, "optional": True, "ephemeral": True})
        if op.kind == "advance":
            return replace(op, inputs=(*op.inputs, tops, logits), attrs={**op.attrs, **sliced, "vocab": vocab})
        return op

    return graph.with_operators([changed(op) for op in graph.operators], values).check()
