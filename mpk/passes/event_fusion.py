"""Turn dependencies into as few event counters, waits and signals as the schedule allows.

Runs after `schedule`. Of what flagged data carries it makes events that are no counters: they say what waits for what, and cost
nothing. They make nothing visible but the data itself, so they are of no help to the others, which become counters.

For every task, producers that are known to be done by queue order or through events waited for
earlier are left out (vector clocks over queues); what remains of one task becomes one event, and tasks with the same
remaining producers share it. Where a producer would have to signal more events of one operator than the target finds cheap,
the events of that operator are merged into one that needs all its producers: waiting a little longer costs less than many
signals. Event 0 is the step event: `advance` raises it, the first task of every queue waits for it. `advance` itself waits, by counters,
for the last task of every queue, so that whatever a step wrote is visible in the next one. Where operators are `ephemeral` (nothing that
they write is read in a later step) that is an event of its own, the last one of `advance`, which leaves them out: it comes early.
"""

from __future__ import annotations

import numpy as np

from mpk.graph.sm_task_graph import Event, SMTaskGraph
from mpk.targets.hardware import Target


def run(graph: SMTaskGraph, target: Target) -> SMTaskGraph:
    """Fill `graph.events` and every task's waits and signals; empties `graph.dependencies` and `graph.carried`."""
    before = len(frozenset().union(*{s for needs in (graph.dependencies, graph.carried) for sets in needs.values() for s in sets}))
    graph.events_before_fusion = before
    ephemeral = any(op.attrs.get("ephemeral") for op in graph.tensor_graph.operators)
    counted = _minimal_needs(graph, graph.dependencies, {}, closes_step=not ephemeral)
    counted = _merge_crowded(graph, counted, target.max_signals_per_task)
    carried = _minimal_needs(graph, graph.carried, graph.dependencies)
    _make_events(graph, counted, carried)
    if ephemeral:
        graph.add_event(_last_lasting(graph), (graph.tasks[-1].id,))
    graph.dependencies, graph.carried = {}, {}
    counters = {e.id for e in graph.events if not e.carried}
    graph.notes.append(
        f"event_fusion: {before} producers (one event each) -> {len(counters)} counters, "
        f"{sum(e in counters for t in graph.tasks for e in t.signals)} signals, {sum(e in counters for t in graph.tasks for e in t.waits)} waits; "
        f"{len(graph.events) - len(counters)} events that data carries")
    return graph


def _last_lasting(graph: SMTaskGraph) -> list[int]:
    """The last task of every other queue than that of `advance` whose results may be read in a later step; of its own if no other has one."""
    mine: list[int] = []
    found: list[int] = []
    for worker, queue in enumerate(graph.queues):
        lasting = [t for t in queue if t != graph.tasks[-1].id and not graph.operator(t).attrs.get("ephemeral")]
        (mine if worker == graph.tasks[-1].worker else found).extend(lasting[-1:])
    return found or mine


def _minimal_needs(graph: SMTaskGraph, wanted: dict[int, list[frozenset[int]]], given: dict[int, list[frozenset[int]]],
                   closes_step: bool = False) -> dict[int, frozenset[int]]:
    """Task -> producers among those `wanted` that it must wait for explicitly; it waits for those `given` in any case.

    closes_step: the last task, `advance`, must be behind all others.
    """
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

    def joined(s: frozenset[int]) -> np.ndarray:
        if s not in members:
            members[s] = np.fromiter(s, dtype=np.int32, count=len(s))
            set_clock[s] = clock[members[s]].max(axis=0)
        return set_clock[s]

    for task in graph.tasks:
        mine = clock[task.id]
        if last_in_queue[task.worker] >= 0:
            np.maximum(mine, clock[last_in_queue[task.worker]], out=mine)
        unwaited = mine.copy() if graph.operator(task).attrs.get("optional") else None
        # Later producers first: waiting for them often makes the earlier sets superfluous.
        left: list[frozenset[int]] = []
        sets = wanted.get(task.id, [])
        for s in sets:
            if s not in newest:
                newest[s] = max(s)
        for s in given.get(task.id, ()):
            np.maximum(mine, joined(s), out=mine)
        for s in sorted(sets, key=newest.__getitem__, reverse=True):
            joined(s)
            ids = members[s]
            known = mine[worker[ids]] > place[ids]
            if known.all():
                continue
            left.append(s)  # whole, though some members may be known: tasks with equal needs then share one event
            np.maximum(mine, set_clock[s], out=mine)
        if closes_step and task is graph.tasks[-1]:
            open_queues = [w for w, last in enumerate(last_in_queue) if last >= 0 and w != task.worker and mine[w] <= place[last]]
            if open_queues:
                left.append(frozenset(last_in_queue[w] for w in open_queues))
        if left:
            key = tuple(left)
            needs[task.id] = unions.setdefault(key, frozenset().union(*left) if len(left) > 1 else left[0])
        if unwaited is not None:  # nobody can know whether it has waited
            mine[:] = unwaited
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


def _make_events(graph: SMTaskGraph, counted: dict[int, frozenset[int]], carried: dict[int, frozenset[int]]) -> None:
    advance = graph.tasks[-1].id
    for t in graph.tasks:
        t.waits, t.signals = (), ()
    graph.events = []
    graph.add_event((advance,), sorted(queue[0] for queue in graph.queues if queue))
    consumers: dict[tuple[bool, frozenset[int]], list[int]] = {}
    for is_carried, needs in ((False, counted), (True, carried)):
        for task in sorted(needs):
            consumers.setdefault((is_carried, needs[task]), []).append(task)
    signals: dict[int, list[int]] = {}
    for (is_carried, producers), waiting in consumers.items():
        event = Event(len(graph.events), tuple(sorted(producers)), len(producers), is_carried)
        graph.events.append(event)
        for p in event.producers:
            signals.setdefault(p, []).append(event.id)
        for c in waiting:
            graph.tasks[c].waits += (event.id,)
    for p, ids in signals.items():
        graph.tasks[p].signals += tuple(ids)

