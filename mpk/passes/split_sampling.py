"""Share the reading of the logits among all workers: one `sample_part` operator before `sample`.

Runs before `partition`, on targets whose workers read too slowly for one of them to go through a vocabulary alone (an SM reads some
80 bytes a nanosecond, so 600 KB of logits would take 7 us, on the path of every token). Guarantees that `sample` has the parts and
the penalised logits as further inputs. Declines nothing.
"""

from __future__ import annotations

from dataclasses import replace

from mpk.graph.tensor_graph import Operator, TensorGraph, Value
from mpk.tasks.sample_part.sharing import PART_COLUMNS, slices


def run(graph: TensorGraph, workers: int) -> TensorGraph:
    """Insert `sample_part` before every `sample`."""
    values: dict[str, Value] = {}
    operators: list[Operator] = []
    for op in graph.operators:
        if op.kind == "sample":
            vocab = int(op.attrs["vocab"])
            parts, size = slices(vocab, workers)
            logits, step = op.inputs
            names = (f"{op.name}.parts", f"{op.name}.values")
            values |= {name: Value(name, columns, "logits", element_bytes=4) for name, columns in zip(names, (parts * PART_COLUMNS, vocab), strict=True)}
            attrs = {**op.attrs, "parts": parts, "slice": size}
            operators.append(Operator(f"{op.name}.part", "sample_part", (logits, step), names, {}, attrs, op.layer))
            operators.append(replace(op, inputs=(logits, step, *names), attrs=attrs))
        else:
            operators.append(op)
    return graph.with_operators(operators, values).check()
