"""The happens-before relation of a scheduled graph, as vector clocks over the workers' queues.

There are two of them. The one of *execution*: what has been done when a task goes on, by queues, counters and data that is its own
flag. The one of *visibility*: what a task may rely on in memory. It knows queues and counters only, since a word that is its own flag
says nothing of other words. Without carried events they are the same.

Task a *happens before* task b when a has finished, with its writes visible, whenever b starts, whatever the timing. Two
things order tasks: the place in a queue, and an event whose threshold equals the number of its signals (then all its
producers are done when a waiter starts). A smaller threshold says nothing about any one producer: from the second step on
the counter may have got there by signals of the step before. Waits for the step event order steps, not the tasks of one.
A task of an operator with the attribute `optional` waits only if it has anything to do: what it waits for has happened before its own
accesses, but nothing that comes after it may rely on that.

Vector clocks are due to Fidge and Mattern (1988). The work is one row operation a task and one reduction an event, never
one operation an edge, since an event with p producers and c consumers stands for p * c edges.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpk.errors import GraphError
from mpk.graph.sm_task_graph import SMTaskGraph

STEP_EVENT = 0  # counts steps; signalled by `advance`, once by the host before the first step


class OrderError(GraphError):
    """No execution finishes: `tasks` and `events` are those of the cycle, or of the wait that never ends."""

    def __init__(self, message: str, kind: str, tasks: tuple[int, ...] = (), events: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.kind, self.tasks, self.events = kind, tasks, events


class Order:
    """Happens-before between the tasks of `graph`, whose queues must hold every task once.

    `worker`, `index`: int32 [tasks], queue of a task and its place there. `clock`: int32 [tasks, workers], the highest index
    in each queue known to happen before the task, -1: none. `topological`: int32 [tasks], ids in an order that respects it.

    With `use_dependencies`, dependencies count as edges too (for passes that run before events are made); without, only
    what the program executes. `carried`: with what data carries, the order of execution, else the order of visibility. Raises
    `OrderError` for a task in no queue or in two, for a cycle, for an unreachable threshold.
    """

    def __init__(self, graph: SMTaskGraph, use_dependencies: bool = False, carried: bool = True) -> None:
        self.graph, self.carried = graph, carried
        self.worker, self.index = _places(graph)
        self.clock: NDArray[np.int32] = np.full((len(graph.tasks), max(len(graph.queues), 1)), -1, np.int32)
        self.topological: NDArray[np.int32] = _Propagation(self, use_dependencies).run()

    def happens_before(self, a: int, b: int) -> bool:
        """Whether task a is always done when task b starts."""
        return bool(self.clock[b, self.worker[a]] >= self.index[a])

    def concurrent(self, a: int, b: int) -> bool:
        """Whether the two tasks may run at the same time, or in either order."""
        return a != b and not self.happens_before(a, b) and not self.happens_before(b, a)

    def happens_before_many(self, a: ArrayLike, b: ArrayLike) -> NDArray[np.bool_]:
        """`happens_before` element by element; a and b broadcast against each other."""
        a, b = np.asarray(a, np.intp), np.asarray(b, np.intp)
        return np.asarray(self.clock[b, self.worker[a]] >= self.index[a])

    def frontier(self, tasks: Iterable[int]) -> NDArray[np.int32]:
        """int32 [workers]: the last index in each queue among `tasks`, -1 where there is none.

        `self.clock[b] >= frontier` everywhere if and only if all of `tasks` happen before b.
        """
        last: NDArray[np.int32] = np.full(self.clock.shape[1], -1, np.int32)
        ids = np.fromiter(tasks, np.intp)
        np.maximum.at(last, self.worker[ids], self.index[ids])
        return last

    def all_before(self, before: Iterable[int], after: Iterable[int]) -> bool:
        """Whether every task of `before` happens before every task of `after`."""
        ids = np.fromiter(after, np.intp)
        return not len(ids) or bool((self.clock[ids].min(axis=0) >= self.frontier(before)).all())

    def minimal(self, tasks: Iterable[int]) -> list[int]:
        """The smallest part of `tasks` such that waiting for it is waiting for all of them (ascending ids)."""
        ids = np.unique(np.fromiter(tasks, np.intp))
        ids = ids[self.frontier(ids)[self.worker[ids]] == self.index[ids]]  # only the last of each queue
        implied = (self.clock[ids][:, self.worker[ids]] >= self.index[ids]).any(axis=0)
        return [int(t) for t in ids[~implied]]

    def required(self, task: int, before: Iterable[int]) -> list[int]:
        """Those of `minimal(before)` that do not happen before `task` yet."""
        return [t for t in self.minimal(before) if not self.happens_before(t, task)]

    def before_everything(self, task: int) -> NDArray[np.bool_]:
        """bool [tasks]: which tasks `task` happens before."""
        return np.asarray(self.clock[:, self.worker[task]] >= self.index[task])

    def after_everything(self, task: int) -> NDArray[np.bool_]:
        """bool [tasks]: which tasks happen before `task`."""
        return np.asarray(self.clock[task][self.worker] >= self.index)


def _places(graph: SMTaskGraph) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    worker = np.full(len(graph.tasks), -1, np.int32)
    index = np.full(len(graph.tasks), -1, np.int32)
    for w, queue in enumerate(graph.queues):
        for i, t in enumerate(queue):
            if not 0 <= t < len(graph.tasks):
                raise OrderError(f"queue {w} holds task {t}, but the graph has {len(graph.tasks)} tasks", "queue", (t,))
            if worker[t] >= 0:
                raise OrderError(f"task {t} stands in queues {worker[t]} and {w}", "queue", (t,))
            worker[t], index[t] = w, i
    missing = np.flatnonzero(worker < 0)
    if len(missing):
        raise OrderError(f"task {missing[0]} stands in no queue", "queue", (int(missing[0]),))
    return worker, index


class _Propagation:
    """One symbolic execution: every worker goes through its queue, clocks flow along, until all queues are done."""

    def __init__(self, order: Order, use_dependencies: bool) -> None:
        graph = order.graph
        self.graph, self.clock, self.worker, self.index = graph, order.clock, order.worker, order.index
        self.producers: list[list[int]] = [[] for _ in graph.events]
        for task in graph.tasks:
            for e in task.signals:
                if 0 <= e < len(self.producers):
                    self.producers[e].append(task.id)
        self.missing = [len(p) for p in self.producers]  # signals still to come
        self.event_clock: dict[int, NDArray[np.int32]] = {}
        self.unwaited: dict[int, NDArray[np.int32]] = {}  # clocks of optional tasks as others see them, who cannot know whether they waited
        self.carried = order.carried
        self.dependencies: dict[int, list[frozenset[int]]] = {}
        if use_dependencies:
            self.dependencies = {t.id: graph.needs(t.id) for t in graph.tasks} if order.carried else graph.dependencies
        self.set_clock: dict[frozenset[int], NDArray[np.int32]] = {}  # tasks with the same needs share a set
        self.done = np.zeros(len(graph.tasks), np.bool_)
        self.waiting_for_event: dict[int, list[int]] = {}
        self.waiting_for_task: dict[int, list[int]] = {}

    def run(self) -> NDArray[np.int32]:
        place = [0] * len(self.graph.queues)
        runnable = deque(range(len(place)))
        finished: list[int] = []
        while runnable:
            w = runnable.popleft()
            queue = self.graph.queues[w]
            while place[w] < len(queue) and not self._blocked(queue[place[w]], w):
                t = queue[place[w]]
                self._execute(t, place[w], w)
                finished.append(t)
                runnable.extend(self._finish(t))
                place[w] += 1
        if len(finished) < len(self.graph.tasks):
            heads = {q[i]: w for w, (q, i) in enumerate(zip(self.graph.queues, place, strict=True)) if i < len(q)}
            raise self._cycle(next(iter(heads)))
        return np.array(finished, np.int32)

    def _orders(self, event: int) -> bool:
        """Whether waiting for the event means waiting for all its producers of this step."""
        if event == STEP_EVENT or (self.graph.events[event].carried and not self.carried):
            return False
        signals, threshold = len(self.producers[event]), self.graph.events[event].threshold
        if threshold > signals:
            raise OrderError(f"event {event} needs {threshold} signals a step, but gets {signals}", "threshold",
                             tuple(self.producers[event]), (event,))
        return threshold == signals

    def _blocked(self, task: int, worker: int) -> bool:
        for e in self.graph.tasks[task].waits:
            if self._orders(e) and self.missing[e]:
                self.waiting_for_event.setdefault(e, []).append(worker)
                return True
        for needed in self.dependencies.get(task, ()):
            if needed in self.set_clock:  # all done already
                continue
            for p in needed:
                if not self.done[p]:
                    self.waiting_for_task.setdefault(p, []).append(worker)
                    return True
            self.set_clock[needed] = self._joined(list(needed))
        return False

    def _execute(self, task: int, index: int, worker: int) -> None:
        row = self.clock[task]
        if index:
            before = self.graph.queues[worker][index - 1]
            row[:] = self.unwaited.get(before, self.clock[before])
        if self.graph.operator(task).attrs.get("optional"):
            self.unwaited[task] = row.copy()
            self.unwaited[task][worker] = index - 1
        for e in self.graph.tasks[task].waits:
            if self._orders(e):
                if e not in self.event_clock:
                    self.event_clock[e] = self._joined(self.producers[e])
                np.maximum(row, self.event_clock[e], out=row)
        for needed in self.dependencies.get(task, ()):
            np.maximum(row, self.set_clock[needed], out=row)
        row[worker] = index - 1
        self.done[task] = True

    def _joined(self, tasks: Sequence[int]) -> NDArray[np.int32]:
        """Clock of a moment at which all of `tasks` are done."""
        if not tasks:
            return np.full(self.clock.shape[1], -1, np.int32)
        ids = np.asarray(tasks, np.intp)
        seen = self.clock[ids]
        for place, t in enumerate(tasks) if self.unwaited else ():
            if t in self.unwaited:
                seen[place] = self.unwaited[t]
        joined: NDArray[np.int32] = seen.max(axis=0)
        np.maximum.at(joined, self.worker[ids], self.index[ids])
        return joined

    def _finish(self, task: int) -> list[int]:
        """Count the signals of a finished task; returns the workers that may go on."""
        woken = self.waiting_for_task.pop(task, [])
        for e in self.graph.tasks[task].signals:
            if 0 <= e < len(self.missing):
                self.missing[e] -= 1
                if not self.missing[e]:
                    woken += self.waiting_for_event.pop(e, [])
        return woken

    def _cycle(self, start: int) -> OrderError:
        """Walk backwards through unfinished tasks from `start` until one comes again."""
        seen: dict[int, int] = {}
        path: list[tuple[int, str, int]] = []  # (task, how it waits for the next one in the path, event or -1)
        task = start
        while task not in seen:
            seen[task] = len(path)
            before, how, event = self._unfinished_before(task)
            path.append((task, how, event))
            task = before
        cycle = path[seen[task]:]
        shown = [f"task {t} {how}" for t, how, _ in cycle]
        if len(shown) > 12:
            shown = [*shown[:6], f"... {len(shown) - 12} more ...", *shown[-6:]]
        text = " ".join(shown) + f" task {task}"
        return OrderError(f"cycle: {text}", "cycle", tuple(t for t, _, _ in cycle), tuple(e for _, _, e in cycle if e >= 0))

    def _unfinished_before(self, task: int) -> tuple[int, str, int]:
        for e in self.graph.tasks[task].waits:
            if self._orders(e):
                for p in self.producers[e]:
                    if not self.done[p]:
                        return p, f"waits for event {e} of", e
        for needed in self.dependencies.get(task, ()):
            for p in needed:
                if not self.done[p]:
                    return p, "needs", -1
        return self.graph.queues[self.worker[task]][self.index[task] - 1], f"stands in queue {self.worker[task]} behind", -1
