"""Choose how many rows of weights make a tile of a product: 16, which one tensor core instruction takes, or 8 where that shares it better.

Runs on GPU targets whose description allows it, behind everything that makes or resizes products, before `partition`. Workers get whole tiles, so a
product of 320 tiles on 132 workers takes as long as one of 396; in tiles of 8 rows, as one of 330. Guarantees that a product
whose tiles change has half as many output columns a tile (attr `tile_columns`), and that what goes with it, range by range (`TaskKind.follows`),
is cut alike; nothing else changes. Declines where the worker with the most would not be done earlier: more tiles make more groups of sums (of
`GROUP` tiles), and each group costs its threads a meeting. Declines where workers that the product leaves idle make its input. Small gains are not worth it: workers that are done leave their bandwidth to the others,
so the estimate, in which they do not, says too much. (On an H200, 70B on two GPUs: qkv estimated 3.7 us better, measured 3.9; 8B on two 1.8 and 1.1; Qwen3-0.6B's down 1.4, and
the whole step 5 % slower.) Declines also where stages of 8 rows would be smaller or would pad more (columns not a
multiple of twice the stage of 16 rows), since what a stage costs does not depend on its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mpk.graph.tensor_graph import Operator, TensorGraph
from mpk.passes.partition import Options, most_tasks
from mpk.targets.hardware import Target
from mpk.tasks.base import kind_of
from mpk.tasks.packing import PANEL
from mpk.tasks.stages import groups, stages_of

WORTH, WORTH_US = 0.05, 1.5  # least gain, as a part and in microseconds


def run(graph: TensorGraph, target: Target, options: Options) -> TensorGraph:
    """The graph with the better of both cuts for every product."""
    halved: set[str] = set()  # values that are made in such tiles
    out: list[Operator] = []
    for op in graph.operators:
        kind = kind_of(op)
        better = kind.halves and not leaves_room(op, out, graph, target) and same_stages(op, halve(op)) and gain(op, graph, target, options) >= WORTH
        if better or (kind.follows and kind.buffers(op, graph)[kind.follows] in halved):
            halved.update(op.outputs)
            out.append(halve(op))
        else:
            out.append(op)
    return graph.with_operators(out, graph.values).check()


def leaves_room(op: Operator, before: Sequence[Operator], graph: TensorGraph, target: Target) -> bool:
    """Whether the workers that whole tiles of a product leave idle suffice for the operator that makes its input.

    They then wait for nothing but that input while others make it. In smaller tiles the product would stand behind it on the same workers: on an H200 the o product of
    Qwen3-0.6B (64 tiles, behind 16 tasks that merge attention) ended 1.9 us later so.
    """
    makers = [o for o in before if op.inputs[0] in o.outputs]
    return bool(makers) and kind_of(makers[-1]).tiles(makers[-1], graph) <= target.workers - kind_of(op).tiles(op, graph)


def halve(op: Operator) -> Operator:
    """The operator with half as many output columns a tile."""
    return replace(op, attrs={**op.attrs, "tile_columns": int(op.attrs.get("tile_columns", PANEL)) // 2})


def same_stages(whole: Operator, half: Operator) -> bool:
    """Whether the matrix has the same bytes, in stages of the same size, either way."""
    a, b = stages_of(whole), stages_of(half)
    return a.bytes == b.bytes and a.padded_columns == b.padded_columns


def gain(op: Operator, graph: TensorGraph, target: Target, options: Options) -> float:
    """Part of the time of a product that smaller tiles save, 0 where it is too little to be worth their cost."""
    whole, half = (longest_us(o, graph, target, options) for o in (op, halve(op)))
    return (whole - half) / whole if whole - half >= WORTH_US else 0.0


def longest_us(op: Operator, graph: TensorGraph, target: Target, options: Options) -> float:
    """Estimated time of the worker with the most tiles of a product, all workers streaming: microseconds."""
    tiles = kind_of(op).tiles(op, graph)
    most, shape = -(-tiles // most_tasks(op, graph, target, options)), stages_of(op)
    bandwidth = min(target.worker_bandwidth.value, target.bandwidth.value / target.workers)
    return most * shape.count * shape.bytes / (bandwidth * 1e3) + len(groups(most)) * target.task_latency.value
