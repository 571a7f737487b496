"""Random valid graphs of a made-up task kind, built without the passes and without `mpk.graph.order`.

Operators are cut by columns; each reads whole buffers or its own share of the columns, writes its share of one buffer, and
may update a buffer in place. Needs are found pair by pair, order by closing a relation of small sets, memory by trying offsets.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from mpk.graph.sm_task_graph import Allocation, Buffer, Cost, MachineLimits, Region, SMTaskGraph, Task
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph, Value, Weight
from mpk.models.config import DecoderConfig
from mpk.tasks.base import TaskKind

CONFIG = DecoderConfig("synthetic", 32, 16, 16, 1, 2, 1, 8, 1e-5, 64)
MAX_ROWS = 2


class ColumnsKind(TaskKind):
    """Reads `op.inputs` (attributes "whole0", ...: all columns, else the tile's share) and writes the tile's share of `op.outputs`.

    Shares are of all columns, or of those from attribute "first" to "last".
    """

    operands = ("input", "output")

    def __init__(self, name: str) -> None:
        self.name = name

    def tiles(self, op: Operator, graph: TensorGraph) -> int:
        return int(op.attrs["tiles"])

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        return {**({"input": op.inputs[0]} if op.inputs else {}), "output": op.outputs[0]}

    def _share(self, op: Operator, graph: TensorGraph, buffer: str, begin: int, end: int) -> Region:
        first, last = int(op.attrs.get("first", 0)), int(op.attrs.get("last", graph.values[buffer].columns))
        tiles = self.tiles(op, graph)
        return Region(buffer, first + begin * (last - first) // tiles, first + end * (last - first) // tiles)

    def reads(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return tuple(Region(b, 0, graph.values[b].columns) if op.attrs[f"whole{i}"] else self._share(op, graph, b, begin, end)
                     for i, b in enumerate(op.inputs) if b != "step")

    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return tuple(self._share(op, graph, b, begin, end) for b in op.outputs)

    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        return Cost(64 * (end - begin), 8 * (end - begin), 128 * (end - begin))

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        return {}

    def scratch_bytes(self, op: Operator, graph: TensorGraph, max_rows: int) -> int:
        return 128 * max_rows

    def packed_bytes(self, op: Operator, graph: TensorGraph, dtype: str) -> int:
        return 64 * self.tiles(op, graph) if op.weights else 0


KINDS: Mapping[str, TaskKind] = {name: ColumnsKind(name) for name in ("columns", "advance")}


@dataclass
class Shape:
    """Bounds of a random graph."""

    operators: tuple[int, int] = (3, 5)
    workers: tuple[int, int] = (2, 3)
    tiles: tuple[int, int] = (1, 3)
    buffers: int = 8  # at most
    reuse_name: float = 0.3  # probability that an operator writes a buffer that exists already
    cache: float = 0.4  # probability that an operator's output is a cache, which lives across steps
    partial: float = 0.5  # probability that an operator that writes an existing buffer writes some of its columns only
    whole: float = 0.6  # probability that an operator reads all columns of an input


def random_graph(seed: int, shape: Shape | None = None) -> SMTaskGraph:
    """A valid graph; the same seed gives the same graph."""
    shape = shape or Shape()
    rng = random.Random(seed)
    tensors = _operators(rng, shape)
    workers = rng.randint(*shape.workers)
    graph = SMTaskGraph(tensors, "synthetic", workers, rng.randint(1, MAX_ROWS), "f32")
    for v in tensors.values.values():
        graph.buffers[v.name] = Buffer(v.name, v.columns, v.rows, v.kind, 4)
    for index, op in enumerate(tensors.operators):
        for begin, end in _cut(rng, int(op.attrs["tiles"])):
            kind = KINDS[op.kind]
            graph.add_task(op.kind, index, (begin, end), kind.reads(op, tensors, begin, end), kind.writes(op, tensors, begin, end),
                           kind.cost(op, tensors, begin, end, "f32"))
    needs = conflicts(graph)
    _schedule(rng, graph, needs)
    _make_events(rng, graph, needs)
    _place(rng, graph)
    return graph


def _operators(rng: random.Random, shape: Shape) -> TensorGraph:
    tensors = TensorGraph(CONFIG)
    tensors.values["step"] = Value("step", 1, "step", "state")
    readable: list[str] = []
    count = rng.randint(*shape.operators)
    for n in range(count):
        tiles = rng.randint(*shape.tiles)
        inputs = rng.sample(readable, min(len(readable), rng.randint(1, 2))) if readable else []
        if readable and (len(readable) >= shape.buffers or rng.random() < shape.reuse_name):
            output = rng.choice(readable)
        else:
            output = f"b{n}"
            kind = "cache" if rng.random() < shape.cache and n else "activation"
            tensors.values[output] = Value(output, 12, "positions" if kind == "cache" else "tokens", kind)
            readable.append(output)
        attrs: dict[str, Scalar] = {"tiles": tiles}
        if output != f"b{n}" and rng.random() < shape.partial:
            first, last = rng.choice(((0, 6), (6, 12), (3, 9)))
            attrs |= {"first": first, "last": last}
        for i, b in enumerate(inputs):
            # tasks of one operator are independent: what it updates in place it reads by shares only
            attrs[f"whole{i}"] = b != output and rng.random() < shape.whole
        weights = {}
        if rng.random() < 0.5:
            tensors.weights[f"w{n}"] = Weight(f"w{n}", (tiles, 16))
            weights = {"weight": (f"w{n}",)}
        tensors.operators.append(Operator(f"op{n}", "columns", tuple(inputs), (output,), weights, attrs, n // 3))
    last = tensors.operators[-1].outputs[0]
    tensors.operators.append(Operator("advance", "advance", (last, "step"), ("step",), {}, {"tiles": 1, "whole0": True}))
    return tensors


def _cut(rng: random.Random, tiles: int) -> list[tuple[int, int]]:
    cuts = [0, *sorted(rng.sample(range(1, tiles), rng.randint(0, tiles - 1))), tiles]
    return list(pairwise(cuts))


def in_conflict(a: Task, b: Task) -> bool:
    """Whether two tasks touch the same columns of a buffer and one of them writes."""
    pairs = [(x, y) for x in a.writes for y in (*b.reads, *b.writes)] + [(x, y) for x in a.reads for y in b.writes]
    return any(x.overlaps(y) for x, y in pairs)


def conflicts(graph: SMTaskGraph) -> dict[int, set[int]]:
    """Task -> earlier tasks in conflict with it; the last task (`advance`) needs all others."""
    last = len(graph.tasks) - 1
    return {b.id: {a.id for a in graph.tasks[: b.id] if b.id == last or in_conflict(a, b)} for b in graph.tasks}


def _schedule(rng: random.Random, graph: SMTaskGraph, needs: dict[int, set[int]]) -> None:
    """Random workers, and queues in a random order that respects the needs."""
    graph.queues = [[] for _ in range(graph.num_workers)]
    left = list(range(len(graph.tasks)))
    while left:
        t = rng.choice([t for t in left if not needs[t] & set(left)])
        left.remove(t)
        graph.tasks[t].worker = rng.randrange(graph.num_workers)
        graph.queues[graph.tasks[t].worker].append(t)


def _make_events(rng: random.Random, graph: SMTaskGraph, needs: dict[int, set[int]]) -> None:
    for task in graph.tasks:
        task.waits, task.signals = (), ()
    graph.events = []
    last = len(graph.tasks) - 1
    graph.add_event([last], [])
    known: dict[frozenset[int], int] = {}
    for t in _topological(graph, needs):
        wanted = set(needs[t])
        if rng.random() < 0.7:  # leave out what the queue and earlier waits imply
            wanted -= before(graph)[t]
        for group in _groups(rng, wanted):
            if group not in known:
                known[group] = graph.add_event(group, []).id
            graph.tasks[t].waits += (known[group],)
    for queue in graph.queues:
        if queue and (rng.random() < 0.7 or not _starts_late(graph, queue[0])):
            graph.tasks[queue[0]].waits += (0,)


def _starts_late(graph: SMTaskGraph, task: int) -> bool:
    return any(0 in graph.tasks[t].waits for t in before(graph)[task])


def _topological(graph: SMTaskGraph, needs: dict[int, set[int]]) -> list[int]:
    done: list[int] = []
    place = [0] * len(graph.queues)
    while len(done) < len(graph.tasks):
        for w, queue in enumerate(graph.queues):
            while place[w] < len(queue) and needs[queue[place[w]]] <= set(done):
                done.append(queue[place[w]])
                place[w] += 1
    return done


def _groups(rng: random.Random, wanted: set[int]) -> list[frozenset[int]]:
    if not wanted:
        return []
    if rng.random() < 0.6:
        return [frozenset(wanted)]
    parts: dict[int, set[int]] = {}
    for t in wanted:
        parts.setdefault(rng.randrange(2), set()).add(t)
    return [frozenset(p) for p in parts.values()]


def before(graph: SMTaskGraph) -> dict[int, set[int]]:
    """Task -> tasks that happen before it through queues and full events, by closing the relation."""
    direct: dict[int, set[int]] = {t.id: set() for t in graph.tasks}
    for queue in graph.queues:
        for a, b in pairwise(queue):
            direct[b].add(a)
    for task in graph.tasks:
        for e in task.waits:
            if e and graph.events[e].threshold == len(graph.events[e].producers):
                direct[task.id].update(graph.events[e].producers)
    closed: dict[int, set[int]] = {}

    def close(t: int) -> set[int]:
        if t not in closed:
            closed[t] = set(direct[t]).union(*(close(p) for p in direct[t]))
        return closed[t]

    return {t.id: close(t.id) for t in graph.tasks}


def _place(rng: random.Random, graph: SMTaskGraph) -> None:
    """Memory: at random the lowest free offset, or the lowest that shares bytes with buffers whose accesses are all over."""
    earlier = before(graph)
    touching: dict[str, set[int]] = {}
    for task in graph.tasks:
        for r in (*task.reads, *task.writes):
            if graph.buffers[r.buffer].kind == "activation":
                touching.setdefault(r.buffer, set()).add(task.id)
    for name, tasks in touching.items():
        size = -(-graph.buffers[name].row_bytes * graph.max_rows // 64) * 64
        share = rng.random() < 0.8
        blocked = sorted((p.offset, p.offset + p.size) for other, p in graph.arena.items()
                         if not share or not all(touching[other] <= earlier[t] for t in tasks))
        offset = 0
        for begin, end in blocked:
            if offset + size <= begin:
                break
            offset = max(offset, end)
        graph.arena[name] = Allocation(offset, size)
    graph.arena_bytes = max((p.offset + p.size for p in graph.arena.values()), default=0)
    offset = 0
    for op in graph.tensor_graph.operators:
        kind = KINDS[op.kind]
        size = kind.packed_bytes(op, graph.tensor_graph, graph.dtype)
        if size:
            graph.weight_offsets[kind.packed_key(op)] = offset
            offset += size
    graph.weight_bytes = offset
    graph.limits = MachineLimits(graph.num_workers, len(graph.events) + 2, graph.arena_bytes, 128 * MAX_ROWS)


def small_graph() -> SMTaskGraph:
    """Ten tasks on two workers with one event between neighbouring operators; buffer c lies where b was.

    fill -> a; mix: whole a -> b; update: b and a in place -> a; use: whole a -> c; last: c -> d; advance.
    """
    tensors = TensorGraph(CONFIG)
    tensors.values["step"] = Value("step", 1, "step", "state")
    for name in "abcd":
        tensors.values[name] = Value(name, 12)
    tensors.weights = {w: Weight(w, (2, 16)) for w in ("w0", "w1")}
    two = {"tiles": 2}
    tensors.operators = [
        Operator("fill", "columns", (), ("a",), {"weight": ("w0",)}, two),
        Operator("mix", "columns", ("a",), ("b",), {"weight": ("w1",)}, {**two, "whole0": True}),
        Operator("update", "columns", ("b", "a"), ("a",), {}, {**two, "whole0": False, "whole1": False}),
        Operator("use", "columns", ("a",), ("c",), {}, {**two, "whole0": True}),
        Operator("last", "columns", ("c",), ("d",), {}, {"tiles": 1, "whole0": True}),
        Operator("advance", "advance", ("d", "step"), ("step",), {}, {"tiles": 1, "whole0": True}),
    ]
    graph = SMTaskGraph(tensors, "synthetic", 2, 1, "f32")
    graph.buffers = {v.name: Buffer(v.name, v.columns, v.rows, v.kind, 4) for v in tensors.values.values()}
    for index, op in enumerate(tensors.operators):
        for begin in range(int(op.attrs["tiles"])):
            kind, tiles = KINDS[op.kind], (begin, begin + 1)
            graph.add_task(op.kind, index, tiles, kind.reads(op, tensors, *tiles), kind.writes(op, tensors, *tiles), Cost(64, 8, 128), begin)
    graph.tasks[9].worker = 1
    graph.queues = [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    graph.add_event([9], [0, 1])
    for producers, consumers in (([0, 1], [2, 3]), ([2, 3], [4, 5]), ([4, 5], [6, 7]), ([6, 7], [8]), ([8], [9])):
        graph.add_event(producers, consumers)
    graph.arena = {"a": Allocation(0, 64), "b": Allocation(64, 64), "c": Allocation(64, 64), "d": Allocation(128, 64)}
    graph.arena_bytes = 192
    graph.weight_offsets, graph.weight_bytes = {"w0": 0, "w1": 128}, 256
    graph.limits = MachineLimits(2, 8, 192, 128)
    return graph
