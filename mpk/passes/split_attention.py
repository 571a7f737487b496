"""Choose into how many parts the context of a step is split in attention, and add the merging operator.

Runs before `partition`, because it decides how many tasks attention can be cut into. With fewer key-value heads than
workers, or a number that leaves workers idle, the context of each head is split so that every worker has work. One split
needs no merge; more splits write partial results that `attention_combine` merges in a fixed order.
"""

from __future__ import annotations

from dataclasses import replace

from mpk.errors import InternalError
from mpk.graph.tensor_graph import Operator, TensorGraph, Value
from mpk.tasks.rotary_attention.sharing import STATISTICS

WANTED_EFFICIENCY = 0.95
ATTENTION_KINDS = ("attention", "rotary_attention")


def choose_splits(kv_heads: int, workers: int) -> int:
    """Smallest number of splits that keeps at least 95 % of the workers busy, or else the best there is."""
    best, best_efficiency = 1, 0.0
    for splits in range(1, 2 * workers + 1):
        tasks = kv_heads * splits
        efficiency = tasks / (-(-tasks // workers) * workers)
        if efficiency > best_efficiency + 1e-9:
            best, best_efficiency = splits, efficiency
        if best_efficiency >= WANTED_EFFICIENCY:
            break
    return best


def run(graph: TensorGraph, workers: int, wanted: int = 0) -> TensorGraph:
    """Set `splits` (`wanted`, 0: as `choose_splits` says) on every attention operator and insert `attention_combine` where splits > 1."""
    kv_heads = {int(op.attrs["kv_heads"]) for op in graph.operators if op.kind in ATTENTION_KINDS}  # of this rank
    if len(kv_heads) != 1:
        raise InternalError(f"attention with {sorted(kv_heads)} key-value heads, expected one number")
    splits = wanted or choose_splits(kv_heads.pop(), workers)
    if splits == 1:
        return graph
    values: dict[str, Value] = {}
    operators: list[Operator] = []
    for op in graph.operators:
        if op.kind not in ATTENTION_KINDS:
            operators.append(op)
            continue
        heads, head_dim = int(op.attrs["heads"]), int(op.attrs["head_dim"])
        partial = f"l{op.layer}.partial"
        # one partial result a (query head, split): head_dim sums, the running maximum, the running denominator, and perhaps padding
        statistics = STATISTICS if op.kind == "rotary_attention" else 2
        values[partial] = Value(partial, heads * splits * (head_dim + statistics), element_bytes=4, flagged=graph.values[op.outputs[0]].flagged)
        attrs = {**op.attrs, "splits": splits, "statistics": statistics}
        operators.append(replace(op, outputs=(partial, *op.outputs[1:]), attrs=attrs))
        operators.append(Operator(f"l{op.layer}.combine", "attention_combine", (partial,), op.outputs[:1], {}, attrs, op.layer))
    return graph.with_operators(operators, values).check()
