"""Cut every operator into tasks: contiguous, equal ranges of tiles, one task a worker where there are tiles enough.

Runs after fusion and attention splitting, before anything that speaks of order. Guarantees that the tasks of an operator
cover its tiles once, that they touch disjoint written regions, and that task ids follow the program order (the sequential
order that defines the meaning of the graph). Ranges that cannot be equal are rotated from operator to operator, so that no
worker gets the larger share every time.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpk.errors import InternalError
from mpk.graph.sm_task_graph import Buffer, MachineLimits, SMTaskGraph
from mpk.graph.tensor_graph import Operator, TensorGraph
from mpk.targets.hardware import Target
from mpk.tasks.base import kind_of, load_kinds
from mpk.tasks.stages import HALF_ROWS, stages_of

ELEMENT_BYTES = {"f32": 4, "bf16": 2}


@dataclass(frozen=True)
class Options:
    """What a graph is lowered for besides the model: rows a step may hold, sequences in a batch, weight type, devices that share it; and
    choices of the passes.

    The choices are what `mpk tune` varies; a default means that the pass decides. `attention_splits`: parts of the context in attention.
    `tasks`: (operator without its layer, most tasks it is cut into). `rotate`: whether the larger shares go round. `placement`: how
    `schedule` picks a worker. `signals`: most events of one operator that a task signals. `flight`: bytes of weights on their way to an
    SM, while a product runs and while its input is awaited. `half_tiles`: whether tiles may have 8 rows of weights (`cut_tiles`).
    """

    max_rows: int = 256
    max_batch: int = 16
    dtype: str = "bf16"
    tensor_parallel: int = 1
    attention_splits: int = 0
    tasks: tuple[tuple[str, int], ...] = ()
    rotate: bool = True
    placement: str = "spread"
    signals: int = 0
    flight: tuple[int, int] | None = None
    half_tiles: bool = True


def run(graph: TensorGraph, target: Target, options: Options) -> SMTaskGraph:
    """TensorGraph of task kinds -> SMTaskGraph with tasks and buffers, without order."""
    out = SMTaskGraph(graph, target.name, target.workers, options.max_rows, options.dtype, options.tensor_parallel)
    # Threads have scratch memory per task kind; on a GPU the kernel's own plan of shared memory takes that place.
    scratch = target.scratch_bytes if target.backend == "cpp" else 1 << 60
    out.limits = MachineLimits(target.workers, target.max_events, 1 << 40, scratch)
    declare_buffers(out, options, target)
    out.flight = options.flight
    rotation = 0
    cuts: list[list[tuple[int, int]]] = []
    for index, op in enumerate(graph.operators):
        kind = kind_of(op)
        tiles, unit = kind.tiles(op, graph), kind.unit(op, graph)
        units, count = -(-tiles // unit), most_tasks(op, graph, target, options)
        leader = leader_of(graph, index)
        made = ranges(units, count, rotation) if leader is None else cuts[leader]
        cuts.append(made)
        for first, last in made:
            begin, end = first * unit, min(last * unit, tiles)
            out.add_task(op.kind, index, (begin, end), kind.reads(op, graph, begin, end), kind.writes(op, graph, begin, end),
                         kind.cost(op, graph, begin, end, options.dtype))
        if leader is None and options.rotate and count > 1:
            rotation = (rotation + units % count) % count
    out.notes.append(f"partition: {len(out.tasks)} tasks of {len(graph.operators)} operators for {target.workers} workers")
    halved = dict.fromkeys(short_name(op) for op in graph.operators if kind_of(op).halves and stages_of(op).rows == HALF_ROWS)
    if halved:
        out.notes.append(f"cut_tiles: tiles of {HALF_ROWS} rows in {', '.join(halved)}")
    return out


def short_name(op: Operator) -> str:
    """Name without the layer."""
    return op.name.split(".", 1)[-1]


def most_tasks(op: Operator, graph: TensorGraph, target: Target, options: Options) -> int:
    """Tasks that an operator is cut into, where it does not go with another."""
    kind = kind_of(op)
    units = -(-kind.tiles(op, graph) // kind.unit(op, graph))
    if kind.unit_a_task(op, graph):
        return units
    return max(1, min(units, target.workers, kind.max_splits(op, graph), dict(options.tasks).get(short_name(op), units)))


def leader_of(graph: TensorGraph, index: int) -> int | None:
    """The operator with whose tasks those of operator `index` go, range by range (see `TaskKind.follows`), or None."""
    op = graph.operators[index]
    kind = load_kinds().get(op.kind)  # none: tiles that a user of the simulator made up
    if kind is None or not kind.follows:
        return None
    buffer = kind.buffers(op, graph)[kind.follows]
    leader = next(i for i in range(index - 1, -1, -1) if buffer in graph.operators[i].outputs)
    if kind_of(graph.operators[leader]).tiles(graph.operators[leader], graph) != kind.tiles(op, graph):
        raise InternalError(f"operator {op.name} goes with {graph.operators[leader].name}, but has another number of tiles")
    return leader


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
