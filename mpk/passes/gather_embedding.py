"""Let products behind the embedding read its rows themselves: a step begins with one hand-off less.

Runs before `partition`, on targets with flagged data, where a hand-off is what a step of few rows waits for. Rows of the embedding depend on
the step alone, so a product can fetch them as soon as it knows the tokens. The `embed` operator stays for the residual stream, behind those
products: its tasks then run while others wait for theirs. Declines for matrices of 2^31 elements and more, whose rows the product's
indices do not reach, and for products that read only rows whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import replace

from mpk.graph.tensor_graph import Operator, TensorGraph


def run(graph: TensorGraph) -> TensorGraph:
    """Give every product whose input is what `embed` writes the matrix instead, and move `embed` behind the last of them."""
    embed = next((op for op in graph.operators if op.kind == "embed"), None)
    if embed is None or int(embed.attrs["vocab"]) * int(embed.attrs["hidden"]) >= 2**31:
        return graph
    operators: list[Operator] = []
    held = True  # whether embed's output is still what its value holds
    place = 0
    for op in graph.operators:
        if op is embed:
            continue
        reads = held and op.kind == "linear" and op.inputs == embed.outputs and not op.attrs["gather_logit_rows"]
        operators.append(replace(op, inputs=embed.inputs, weights={**op.weights, "embedding": embed.weights["weight"]}) if reads else op)
        place = len(operators) if reads else place
        held = held and embed.outputs[0] not in op.outputs
    operators.insert(place, embed)
    return graph.with_operators(operators).check() if place else graph
