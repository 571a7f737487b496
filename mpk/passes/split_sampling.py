"""Make sampling a matter of all workers: the head's tasks leave what is needed of their slices of the logits.

Runs before `partition`, on targets whose workers read too slowly for one of them to go through a vocabulary alone (an SM reads some
80 bytes a nanosecond, so 600 KB of logits would take 7 us, on the path of every token). The product that makes the logits becomes a `head`;
`advance` chooses tokens itself from what that leaves, and `sample` only for sequences that want more (its tasks are `optional`: without such
a sequence they do not even wait). Nothing that the two write outlives the step (they are `ephemeral`), so the step is closed without waiting for
their fences. Where ranks share the model, no product makes all logits: they are put together by an `all_gather`, and a `logit_slices` behind it
leaves what a `head` would (the step is closed behind it, since it reads what the next step's messages overwrite). Guarantees that `sample` and
`advance` have what they read as inputs.
"""

from __future__ import annotations

from dataclasses import replace

from mpk.errors import InternalError
from mpk.graph.tensor_graph import Operator, TensorGraph, Value
from mpk.tasks.head.sharing import MESSAGE_COLUMNS, PART_COLUMNS, slices


def run(graph: TensorGraph, workers: int) -> TensorGraph:
    """Replace the product before `sample` by a `head` (or add a `logit_slices`), and give `sample` and `advance` its outputs."""
    sample = next(op for op in graph.operators if op.kind == "sample")
    logits, step = sample.inputs
    producer = graph.producer(logits)
    if producer is None:
        raise InternalError(f"operator {sample.name} samples from {logits}, which nothing makes")
    vocab, batch, (choice,) = int(sample.attrs["vocab"]), int(sample.attrs["max_batch"]), sample.outputs
    parts, size = slices(vocab, workers)
    sliced = {"parts": parts, "slice": size}
    tops, summaries, penalised = (f"{sample.name}.{name}" for name in ("tops", "parts", "values"))
    flagged = any(v.flagged for v in graph.values.values())  # messages tell by the number of the step that they have been written
    values = {tops: Value(tops, parts * MESSAGE_COLUMNS, "logits", element_bytes=4, flagged=flagged),
              summaries: Value(summaries, parts * PART_COLUMNS, "logits", element_bytes=4),
              penalised: Value(penalised, vocab, "logits", element_bytes=4),
              choice: replace(graph.values[choice], columns=batch * MESSAGE_COLUMNS, flagged=flagged)}

    def changed(op: Operator) -> list[Operator]:
        if op is producer and op.kind == "linear":
            return [replace(op, kind="head", outputs=(logits, tops, summaries, penalised), attrs={**op.attrs, **sliced, "ephemeral": True})]
        if op is producer:
            return [op, Operator(f"{sample.name}.slices", "logit_slices", (logits,), (tops, summaries, penalised), {}, {**sliced, "vocab": vocab}, op.layer)]
        if op is sample:
            return [replace(op, inputs=(logits, step, summaries, penalised), attrs={**op.attrs, **sliced, "optional": True, "ephemeral": True})]
        if op.kind == "advance":
            return [replace(op, inputs=(*op.inputs[:2], tops, logits, *op.inputs[2:]), attrs={**op.attrs, **sliced, "vocab": vocab})]
        return [op]

    return graph.with_operators([new for op in graph.operators for new in changed(op)], values).check()
