"""Turn dependencies into as few event counters, waits and signals as the schedule allows.

Runs after `schedule`. For every task, producers that are known to be done by queue order or through events waited for
earlier are left out (vector clocks over queues); what remains of one task becomes one event, and tasks with the same
remaining producers share it. Where a producer would have to signal more events of one operator than the target finds cheap,
the events of that operator are merged into one that needs all its producers: waiting a little longer costs less than many
signals. Event 0 is the step event: `advance` raises it, the first task of every queue waits for it.
"""

from __future__ import annotations

import numpy as np

from mpk.graph.sm_task_graph import Event, SMTaskGraph
from mpk.targets.hardware import Target


def run(graph: SMTaskGraph, target: Target) -> SMTaskGraph:
    """Fill `graph.events` and every task's waits and signals; empties `graph.dependencies`."""
    before = len(frozenset().union(*{s for sets in graph.dependencies.values() for s in sets}))
    graph.events_before_fusion = before
    needs = _minimal_needs(graph)
    needs = _merge_crowded(graph, needs, target.max_signals_per_task)
    _make_events(graph, needs)
    graph.dependencies = {}
    graph.notes.append(
        f"event_fusion: {before} producers (one event each) -> {len(graph.events)} events, "
        f"{sum(len(t.signals) for t in graph.tasks)} signals, {sum(len(t.waits) for t in graph.tasks)} waits")
    return graph


def _minimal_needs(graph: SMTaskGraph) -> dict[int, frozenset[int]]:
    """Task -> producers it must wait for explicitly."""
    count, workers = len(graph.tasks), graph.num_workers
    place = np.zeros(count, dtype=np.int32)
    worker = np.fromiter((t.worker for t in graph.tasks), dtype=np.int32, count=count)
    for queue in graph.queues:
        place[queue] = np.arange(len(queue), dtype=np.int32)
    # clock[t][w]: how many tasks at the head of queue w are known to be done when t is done
    clock = np.zeros((count, workers), dtype=np.int32)
    set_clock: dict[frozenset[int], np.ndarray] = {}
    members: dict[frozenset[int], np.ndarray] = {}
    last_in_queue = [-1] * workers
    newest: dict[frozenset[int], int] = {}
    unions: dict[tuple[frozenset[int], ...], frozenset[int]] = {}
    needs: dict[int, frozenset[int]] = {}
    for task in graph.tasks:
        mine = clock[task.id]
        if last_in_queue[task.worker] >= 0:
            np.maximum(mine, clock[last_in_queue[task.worker]], out=mine)
        # Later producers first: waiting for them often makes the earlier sets superfluous.
        left: list[frozenset[int]] = []
        sets = graph.dependencies.get(task.id, [])
        for s in sets:
            if s not in newest:
                newest[s] = max(s)
        for s in sorted(sets, key=newest.__getitem__, reverse=True):
            if s not in members:
                members[s] = np.fromiter(s, dtype=np.int32, count=len(s))
                set_clock[s] = clock[members[s]].max(axis=0)
            ids = members[s]
            known = mine[worker[ids]] > place[ids]
            if known.all():
                continue
            left.append(s)  # whole, though some members may be known: tasks with equal needs then share one event
            np.maximum(mine, set_clock[s], out=mine)
        if left:
            key = tuple(left)
            needs[task.id] = unions.setdefault(key, frozenset().union(*left) if len(left) > 1 else left[0])
        mine[task.worker] = place[task.id] + 1
        last_in_queue[task.worker] = task.id
    return needs


def _merge_crowded(graph: SMTaskGraph, needs: dict[int, frozenset[int]], limit: int) -> dict[int, frozenset[int]]:
    """Merge the events of a consumer operator when a producer would signal more than `limit` of them."""
    by_op: dict[int, set[frozenset[int]]] = {}
    for task, s in needs.items():
        by_op.setdefault(graph.tasks[task].op, set()).add(s)
    merged: dict[int, frozenset[int]] = {}
    for op, sets in by_op.items():
        signals: dict[int, int] = {}
        for s in sets:
            for p in s:
                signals[p] = signals.get(p, 0) + 1
        if max(signals.values()) > limit:
            merged[op] = frozenset().union(*sets)
    return {t: merged.get(graph.tasks[t].op, s) for t, s in needs.items()}


def _make_events(graph: SMTaskGraph, needs: dict[int, frozenset[int]]) -> None:
    advance = graph.tasks[-1].id
    for t in graph.tasks:
        t.waits, t.signals = (), ()
    graph.events = []
    graph.add_event((advance,), sorted(queue[0] for queue in graph.queues if queue))
    consumers: dict[frozenset[int], list[int]] = {}
    for task in sorted(needs):
        consumers.setdefault(needs[task], []).append(task)
    signals: dict[int, list[int]] = {}
    for producers, waiting in consumers.items():
        event = Event(len(graph.events), tuple(sorted(producers)), len(producers))
        graph.events.append(event)
        for p in event.producers:
            signals.setdefault(p, []).append(event.id)
        for c in waiting:
            graph.tasks[c].waits += (event.id,)
    for p, ids in signals.items():
        graph.tasks[p].signals += tuple(ids)

