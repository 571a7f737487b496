"""Cut every operator into tasks: contiguous, equal ranges of tiles, one task a worker where there are tiles enough.

Runs after fusion and attention splitting, before anything that speaks of order. Guarantees that the tasks of an operator
cover its tiles once, that they touch disjoint written regions, and that task ids follow the program order (the sequential
order that defines the meaning of the graph). Ranges that cannot be equal are rotated from operator to operator, so that no
worker gets the larger share every time.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpk.graph.sm_task_graph import Buffer, MachineLimits, SMTaskGraph
from mpk.graph.tensor_graph import TensorGraph
from mpk.targets.hardware import Target
from mpk.tasks.base import kind_of

ELEMENT_BYTES = {"f32": 4, "bf16": 2}


@dataclass(frozen=True)
class Options:
    """What a graph is lowered for besides the model: rows a step may hold, sequences in a batch, weight type."""

    max_rows: int = 256
    max_batch: int = 16
    dtype: str = "bf16"


def run(graph: TensorGraph, target: Target, options: Options) -> SMTaskGraph:
    """TensorGraph of task kinds -> SMTaskGraph with tasks and buffers, without order."""
    out = SMTaskGraph(graph, target.name, target.workers, options.max_rows, options.dtype)
    # Threads have scratch memory per task kind; on a GPU the kernel's own plan of shared memory takes that place.
    scratch = target.scratch_bytes if target.backend == "cpp" else 1 << 60
    out.limits = MachineLimits(target.workers, target.max_events, 1 << 40, scratch)
    declare_buffers(out, options, target)
    rotation = 0
    for index, op in enumerate(graph.operators):
        kind = kind_of(op)
        tiles = kind.tiles(op, graph)
        count = max(1, min(tiles, target.workers, kind.max_splits(op, graph)))
        for begin, end in ranges(tiles, count, rotation):
            out.add_task(op.kind, index, (begin, end), kind.reads(op, graph, begin, end), kind.writes(op, graph, begin, end),
                         kind.cost(op, graph, begin, end, options.dtype))
        rotation = (rotation + tiles % count) % count if count > 1 else rotation
    out.notes.append(f"partition: {len(out.tasks)} tasks of {len(graph.operators)} operators for {target.workers} workers")
    return out


def ranges(tiles: int, count: int, rotation: int) -> list[tuple[int, int]]:
    """`count` contiguous ranges over `tiles`; the ranges that are one larger start at place `rotation`."""
    base, extra = divmod(tiles, count)
    out, begin = [], 0
    for j in range(count):
        end = begin + base + ((j - rotation) % count < extra)
        out.append((begin, end))
        begin = end
    return out


def declare_buffers(out: SMTaskGraph, options: Options, target: Target) -> None:
    """A buffer for every value and for what task kinds need beyond it."""
    graph = out.tensor_graph
    for value in graph.values.values():
        size = ELEMENT_BYTES[options.dtype] if value.kind == "cache" else value.element_bytes or target.activation_bytes
        out.buffers[value.name] = Buffer(value.name, value.columns, value.rows, value.kind, size, value.flagged)
    for op in graph.operators:
        for buffer in kind_of(op).extra_buffers(op, graph):
            out.buffers.setdefault(buffer.name, buffer)
