"""Small damages to a graph, as a faulty pass or a damaged file would make them. Each returns False where it does not apply."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from mpk.graph.sm_task_graph import Allocation, Region, SMTaskGraph, Task

Mutation = Callable[[random.Random, SMTaskGraph], bool]


def mutants(graph: SMTaskGraph, rng: random.Random, count: int) -> Iterator[tuple[str, SMTaskGraph]]:
    """`count` damaged copies with the name of their damage; sometimes two damages at once."""
    names = list(MUTATIONS)
    made = 0
    while made < count:
        mutant = copy_graph(graph)
        chosen = rng.sample(names, 2 if rng.random() < 0.1 else 1)
        if all(MUTATIONS[name](rng, mutant) for name in chosen):
            made += 1
            yield "+".join(chosen), mutant


def copy_graph(graph: SMTaskGraph) -> SMTaskGraph:
    """A copy whose tasks, events, queues and memory plan can be changed."""
    return replace(graph, tasks=[copy.copy(t) for t in graph.tasks], events=[copy.copy(e) for e in graph.events],
                   queues=[list(q) for q in graph.queues], arena=dict(graph.arena), weight_offsets=dict(graph.weight_offsets))


def without_producer(graph: SMTaskGraph, event: int, producer: int) -> SMTaskGraph:
    """A copy in which `event` no longer needs `producer`; nobody waits for an event that has no producer left."""
    out = copy_graph(graph)
    changed = out.events[event]
    out.tasks[producer].signals = _without(out.tasks[producer].signals, event)
    changed.producers = _without(changed.producers, producer)
    changed.threshold = len(changed.producers)
    if not changed.producers:
        for task in out.tasks:
            task.waits = tuple(e for e in task.waits if e != event)
    return out


def _waiting(rng: random.Random, graph: SMTaskGraph) -> Task | None:
    tasks = [t for t in graph.tasks if t.waits]
    return rng.choice(tasks) if tasks else None


def _without(items: tuple[int, ...], item: int) -> tuple[int, ...]:
    i = items.index(item)
    return items[:i] + items[i + 1:]


# ---- waits
def drop_wait(rng: random.Random, graph: SMTaskGraph) -> bool:
    task = _waiting(rng, graph)
    if task is None:
        return False
    task.waits = _without(task.waits, rng.choice(task.waits))
    return True


def double_wait(rng: random.Random, graph: SMTaskGraph) -> bool:
    task = _waiting(rng, graph)
    if task is None:
        return False
    task.waits += (rng.choice(task.waits),)
    return True


def add_wait(rng: random.Random, graph: SMTaskGraph) -> bool:
    rng.choice(graph.tasks).waits += (rng.randrange(len(graph.events)),)
    return True


def exchange_waits(rng: random.Random, graph: SMTaskGraph) -> bool:
    a, b = rng.choice(graph.tasks), rng.choice(graph.tasks)
    a.waits, b.waits = b.waits, a.waits
    return a.waits != b.waits


def retarget_wait(rng: random.Random, graph: SMTaskGraph) -> bool:
    task = _waiting(rng, graph)
    if task is None or len(graph.events) < 2:
        return False
    task.waits = (*_without(task.waits, rng.choice(task.waits)), rng.randrange(len(graph.events)))
    return True


# ---- signals
def _signalling(rng: random.Random, graph: SMTaskGraph) -> tuple[Task, int]:
    task = rng.choice([t for t in graph.tasks if t.signals])
    return task, rng.choice(task.signals)


def drop_signal(rng: random.Random, graph: SMTaskGraph) -> bool:
    task, event = _signalling(rng, graph)
    task.signals = _without(task.signals, event)
    return True


def double_signal(rng: random.Random, graph: SMTaskGraph) -> bool:
    task, event = _signalling(rng, graph)
    task.signals += (event,)
    return True


def double_producer(rng: random.Random, graph: SMTaskGraph) -> bool:
    task, event = _signalling(rng, graph)
    task.signals += (event,)
    graph.events[event].producers = tuple(sorted((*graph.events[event].producers, task.id)))
    graph.events[event].threshold += rng.randint(0, 1)
    return True


def drop_producer(rng: random.Random, graph: SMTaskGraph) -> bool:
    """Consistently: the event forgets a producer, and with probability its threshold follows."""
    task, event = _signalling(rng, graph)
    if task.id not in graph.events[event].producers:  # taken out by another damage
        return False
    task.signals = _without(task.signals, event)
    graph.events[event].producers = _without(graph.events[event].producers, task.id)
    graph.events[event].threshold -= rng.random() < 0.8
    return True


def exchange_producer(rng: random.Random, graph: SMTaskGraph) -> bool:
    task, event = _signalling(rng, graph)
    other = rng.choice(graph.tasks)
    if other.id in graph.events[event].producers or task.id not in graph.events[event].producers:
        return False
    task.signals = _without(task.signals, event)
    other.signals += (event,)
    graph.events[event].producers = tuple(sorted((*_without(graph.events[event].producers, task.id), other.id)))
    return True


def unlist_producer(rng: random.Random, graph: SMTaskGraph) -> bool:
    _, event = _signalling(rng, graph)
    graph.events[event].producers = graph.events[event].producers[1:]
    return True


# ---- thresholds
def _threshold(change: Callable[[int], int]) -> Mutation:
    def mutate(rng: random.Random, graph: SMTaskGraph) -> bool:
        event = rng.choice(graph.events)
        before, event.threshold = event.threshold, change(event.threshold)
        return event.threshold != before

    return mutate


# ---- queues
def swap_neighbours(rng: random.Random, graph: SMTaskGraph) -> bool:
    queue = rng.choice(graph.queues)
    if len(queue) < 2:
        return False
    i = rng.randrange(len(queue) - 1)
    queue[i], queue[i + 1] = queue[i + 1], queue[i]
    return True


def swap_entries(rng: random.Random, graph: SMTaskGraph) -> bool:
    a, b = rng.sample(range(len(graph.tasks)), 2)
    for queue in graph.queues:
        queue[:] = [{a: b, b: a}.get(t, t) for t in queue]
    graph.tasks[a].worker, graph.tasks[b].worker = graph.tasks[b].worker, graph.tasks[a].worker
    return True


def _move(rng: random.Random, graph: SMTaskGraph, keep_worker: bool) -> bool:
    source = rng.choice(graph.queues)
    target = rng.randrange(len(graph.queues))
    if not source or graph.queues[target] is source:
        return False
    t = source.pop(rng.randrange(len(source)))
    graph.queues[target].insert(rng.randint(0, len(graph.queues[target])), t)
    if not keep_worker:
        graph.tasks[t].worker = target
    return True


def move_task(rng: random.Random, graph: SMTaskGraph) -> bool:
    return _move(rng, graph, keep_worker=False)


def misplace_task(rng: random.Random, graph: SMTaskGraph) -> bool:
    return _move(rng, graph, keep_worker=True)


def drop_entry(rng: random.Random, graph: SMTaskGraph) -> bool:
    queue = rng.choice([q for q in graph.queues if q])
    queue.pop(rng.randrange(len(queue)))
    return True


def double_entry(rng: random.Random, graph: SMTaskGraph) -> bool:
    queue = rng.choice(graph.queues)
    queue.insert(rng.randint(0, len(queue)), rng.randrange(len(graph.tasks)))
    return True


# ---- memory
def _placed(rng: random.Random, graph: SMTaskGraph, count: int) -> list[str]:
    return rng.sample(sorted(graph.arena), count) if len(graph.arena) >= count else []


def overlap_buffers(rng: random.Random, graph: SMTaskGraph) -> bool:
    names = _placed(rng, graph, 2)
    if not names or graph.arena[names[0]].offset == graph.arena[names[1]].offset:
        return False
    graph.arena[names[0]] = Allocation(graph.arena[names[1]].offset, graph.arena[names[0]].size)
    graph.arena_bytes = max(graph.arena_bytes, *(p.offset + p.size for p in graph.arena.values()))
    if graph.limits:
        graph.limits = replace(graph.limits, arena_bytes=graph.arena_bytes)
    return True


def shift_allocation(rng: random.Random, graph: SMTaskGraph) -> bool:
    names = _placed(rng, graph, 1)
    if not names:
        return False
    place = graph.arena[names[0]]
    graph.arena[names[0]] = Allocation(place.offset + rng.choice((-128, -64, 4, 64, 128)), place.size)
    return True


def shrink_allocation(rng: random.Random, graph: SMTaskGraph) -> bool:
    names = _placed(rng, graph, 1)
    if not names:
        return False
    place = graph.arena[names[0]]
    graph.arena[names[0]] = Allocation(place.offset, place.size // 2)
    return True


def drop_allocation(rng: random.Random, graph: SMTaskGraph) -> bool:
    names = _placed(rng, graph, 1)
    if names:
        del graph.arena[names[0]]
    return bool(names)


def too_much_memory(rng: random.Random, graph: SMTaskGraph) -> bool:
    if graph.limits is None or not graph.arena_bytes:
        return False
    what = rng.choice(("arena_bytes", "events", "workers", "scratch_bytes"))
    most = {"arena_bytes": graph.arena_bytes, "events": len(graph.events), "workers": graph.num_workers, "scratch_bytes": 128}[what]
    graph.limits = replace(graph.limits, **{what: most - 1})
    return True


def small_arena(rng: random.Random, graph: SMTaskGraph) -> bool:
    graph.arena_bytes -= 64
    return graph.arena_bytes >= 0


# ---- regions
def _region(change: Callable[[random.Random, Region], Region | None]) -> Mutation:
    def mutate(rng: random.Random, graph: SMTaskGraph) -> bool:
        task = rng.choice(graph.tasks)
        name = rng.choice(("reads", "writes"))
        regions = list(getattr(task, name))
        if not regions:
            return False
        i = rng.randrange(len(regions))
        changed = change(rng, regions[i])
        if changed == regions[i]:
            return False
        regions[i:i + 1] = [] if changed is None else [changed]
        setattr(task, name, tuple(regions))
        return True

    return mutate


def _enlarge(rng: random.Random, r: Region) -> Region:
    return rng.choice((Region(r.buffer, max(r.begin - 2, 0), r.end), Region(r.buffer, r.begin, r.end + 2), Region(r.buffer, 0, max(r.end, 12))))


def _shrink(rng: random.Random, r: Region) -> Region:
    middle = (r.begin + r.end) // 2
    return rng.choice((Region(r.buffer, r.begin, middle), Region(r.buffer, middle, r.end)))


def _shift(rng: random.Random, r: Region) -> Region:
    by = rng.choice((-4, -2, 2, 4))
    return Region(r.buffer, r.begin + by, r.end + by)


MUTATIONS: dict[str, Mutation] = {
    "drop wait": drop_wait, "double wait": double_wait, "add wait": add_wait, "exchange waits": exchange_waits, "retarget wait": retarget_wait,
    "drop signal": drop_signal, "double signal": double_signal, "double producer": double_producer, "drop producer": drop_producer,
    "exchange producer": exchange_producer, "unlist producer": unlist_producer,
    "threshold + 1": _threshold(lambda n: n + 1), "threshold - 1": _threshold(lambda n: n - 1), "threshold 0": _threshold(lambda n: 0),
    "swap neighbours": swap_neighbours, "swap entries": swap_entries, "move task": move_task, "misplace task": misplace_task,
    "drop entry": drop_entry, "double entry": double_entry,
    "overlap buffers": overlap_buffers, "shift allocation": shift_allocation, "shrink allocation": shrink_allocation,
    "drop allocation": drop_allocation, "too much memory": too_much_memory, "small arena": small_arena,
    "enlarge region": _region(_enlarge), "shrink region": _region(_shrink), "shift region": _region(_shift), "drop region": _region(lambda *_: None),
}
