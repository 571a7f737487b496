"""Order among ranks: proof that no rank overwrites, in another's memory, a part of a message that is still to be read there.

All ranks run the same graph. What a task writes to a buffer of kind "peer" goes to the memory of all ranks; what a task reads of one
are the parts of all ranks in its own memory, each with a flag by which it waits for it. So a task that has read a part knows that its
sender has got so far, and has done all that happens before the sender. Two ranks, A and B, stand for any number: they are ordered by
nothing but their own queues and events and by messages between the two, and more ranks only add order.

`other[t]` is the highest index in each queue of B that is known to be done when task t of A starts: joined along A's queues and events,
and after a read of a part with B's clock at the sender (`mpk.graph.order`) and the sender itself. Only messages of all rows of a step
count here: a step may have no row of logits, and then nobody waits for them. Then, in sequential order:

- what is read was sent in the same step, with the reader's own number of message, and no other operator sends that number;
- a task of A that sends into a region starts only when the readers of what stood there before, in B, are done. For readers of the
  step before it is enough that B is known to have begun this step, since its steps do not overlap (the proof of one rank says so), or
  that they were known to be done when A's step before ended.

No ranks wait for each other in a circle: a reader comes after its sender in the order of one rank, so a circle through several ranks
would be one of a single rank's order, which has none. (In two shots a reduction also waits for that of the owner of its tile, which by
construction first does what it owns.) The sums that a second shot sends go where the same rank's part would have gone in one shot, and
later, so what holds for that holds for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpk.graph.hazards import Fault, describe, show
from mpk.graph.order import STEP_EVENT, Order
from mpk.graph.sm_task_graph import Region, SMTaskGraph, Task

Clock = NDArray[np.int32]


def find_peer_fault(graph: SMTaskGraph, order: Order) -> Fault | None:
    """The first access that ranks do not order, or None. Expects a graph whose order on one rank is proven."""
    messages = _Messages(graph)
    fault = messages.find_wrong_number()
    if fault is not None or not messages.sends:
        return fault
    return _Scan(graph, order, messages).run()


def sent(graph: SMTaskGraph, task: Task) -> list[Region]:
    """What a task sends to all ranks."""
    return [r for r in task.writes if graph.buffers[r.buffer].kind == "peer"]


def received(graph: SMTaskGraph, task: Task) -> list[Region]:
    """What a task reads of the parts of all ranks."""
    return [r for r in task.reads if graph.buffers[r.buffer].kind == "peer"]


class _Messages:
    """Which tasks send and which receive, and the numbers of their messages."""

    def __init__(self, graph: SMTaskGraph) -> None:
        self.graph = graph
        self.sends = {t.id: regions for t in graph.tasks if (regions := sent(graph, t))}
        self.receives = {t.id: regions for t in graph.tasks if (regions := received(graph, t))}

    def number(self, task: int) -> tuple[object, object]:
        attrs = self.graph.operator(task).attrs
        return attrs.get("message"), attrs.get("messages")

    def find_wrong_number(self) -> Fault | None:
        """Numbers of messages are distinct and below their count, which all share: then a flag says which message of which step it is."""
        senders: dict[object, int] = {}
        count = None
        for t in sorted(self.sends):
            message, messages = self.number(t)
            count = messages if count is None else count
            if not isinstance(message, int) or not isinstance(messages, int) or messages != count or not 0 <= message < messages:
                return Fault("message", f"{describe(self.graph, t)} sends message {message} of {messages}, expected one below {count}", (t,))
            first = senders.setdefault(message, t)
            if self.graph.tasks[first].op != self.graph.tasks[t].op:
                return Fault("message", f"{describe(self.graph, t)} sends message {message}, which {describe(self.graph, first)} sends too", (first, t))
        return None


class _Access(NamedTuple):
    """What a task sends or reads. `step`: 0 or 1."""

    region: Region
    task: int
    step: int = 0


class _Parts:
    """Columns of one buffer, cut where accesses begin and end, with the accesses of each part since it was last sent over."""

    def __init__(self) -> None:
        self.begins: list[int] = []
        self.ends: list[int] = []
        self.accesses: list[tuple[_Access, ...]] = []

    def within(self, region: Region) -> list[tuple[_Access, ...]]:
        """Accesses of every part that the region touches."""
        first, last = self._range(region)
        return self.accesses[first:last]

    def replace(self, region: Region, accesses: tuple[_Access, ...]) -> None:
        """Forget what was known of the region; nothing but `accesses` is known of it now."""
        first, last = self._range(region)
        self._put(first, last, [(region.begin, region.end, accesses)])

    def add(self, region: Region, access: _Access) -> None:
        """Add an access to every part of the region."""
        first, last = self._range(region)
        parts: list[tuple[int, int, tuple[_Access, ...]]] = []
        at = region.begin
        for begin, end, accesses in zip(self.begins[first:last], self.ends[first:last], self.accesses[first:last], strict=True):
            if at < begin:
                parts.append((at, begin, (access,)))
            parts.append((begin, end, (*accesses, access)))
            at = end
        if at < region.end:
            parts.append((at, region.end, (access,)))
        self._put(first, last, parts)

    def _range(self, region: Region) -> tuple[int, int]:
        """Places of the parts inside the region, after cutting at its borders."""
        for border in (region.begin, region.end):
            place = bisect_left(self.begins, border) - 1
            if place >= 0 and self.begins[place] < border < self.ends[place]:
                begin, end, accesses = self.begins[place], self.ends[place], self.accesses[place]
                self._put(place, place + 1, [(begin, border, accesses), (border, end, accesses)])
        return bisect_left(self.begins, region.begin), bisect_left(self.begins, region.end)

    def _put(self, first: int, last: int, parts: Sequence[tuple[int, int, tuple[_Access, ...]]]) -> None:
        self.begins[first:last] = [p[0] for p in parts]
        self.ends[first:last] = [p[1] for p in parts]
        self.accesses[first:last] = [p[2] for p in parts]


class _Scan:
    def __init__(self, graph: SMTaskGraph, order: Order, messages: _Messages) -> None:
        self.graph, self.order, self.messages = graph, order, messages
        self.writers = self._latest_writers()
        self.other, self.at_end = self._knowledge()

    # ---- who sent what is read
    def _latest_writers(self) -> dict[int, list[_Access]]:
        """Reader -> the last sends, in sequential order, that its regions overlap."""
        latest: dict[str, _Parts] = {}
        found: dict[int, list[_Access]] = {}
        for task in self.graph.tasks:
            for region in self.messages.receives.get(task.id, ()):
                found.setdefault(task.id, []).extend(a for a, in latest.setdefault(region.buffer, _Parts()).within(region))
            for region in self.messages.sends.get(task.id, ()):
                latest.setdefault(region.buffer, _Parts()).replace(region, (_Access(region, task.id),))
        return found

    # ---- what a rank knows of another
    def _knowledge(self) -> tuple[Clock, Clock]:
        """(other [tasks, queues] at the start of each task, and at the end of the step)."""
        graph, order = self.graph, self.order
        start = np.full(order.clock.shape, -1, np.int32)
        end = np.full(order.clock.shape, -1, np.int32)
        producers: list[list[int]] = [[] for _ in graph.events]
        for task in graph.tasks:
            for e in task.signals:
                producers[e].append(task.id)
        joined: dict[int, Clock] = {}
        for t in order.topological.tolist():
            row = start[t]
            if order.index[t] > 0:
                row[:] = end[graph.queues[order.worker[t]][order.index[t] - 1]]
            for e in graph.tasks[t].waits:
                if e == STEP_EVENT or graph.events[e].threshold != len(producers[e]):
                    continue
                if e not in joined:
                    joined[e] = end[producers[e]].max(axis=0)
                np.maximum(row, joined[e], out=row)
            end[t] = row
            for access in self.writers.get(t, ()):
                if graph.buffers[access.region.buffer].rows != "tokens":
                    continue
                np.maximum(end[t], order.clock[access.task], out=end[t])
                worker = order.worker[access.task]
                end[t][worker] = max(end[t][worker], order.index[access.task])
        return start, end.max(axis=0)

    # ---- what is overwritten
    def run(self) -> Fault | None:
        return self._find_stale() or self._find_overwritten()

    def _find_stale(self) -> Fault | None:
        """Reads of parts that the same step did not send, or that bear another number."""
        for t, regions in self.messages.receives.items():
            wanted = self.messages.number(t)
            for region in regions:
                if not _covered(region, (a.region for a in self.writers.get(t, ()))):
                    return Fault("unsent", f"unsent: {describe(self.graph, t)} reads {show(region)}, of which no task before it sends a part in the same "
                                 "step", (t,), (region,))
            for access in self.writers.get(t, ()):
                if self.messages.number(access.task) != wanted:
                    sender, number = describe(self.graph, access.task), self.messages.number(access.task)[0]
                    return Fault("message", f"{describe(self.graph, t)} waits for message {wanted[0]} in {show(access.region)}, but {sender} sends message "
                                 f"{number} there", (access.task, t), (access.region,))
        return None

    def _find_overwritten(self) -> Fault | None:
        """Two steps are enough: readers of earlier ones are done before those of the first, which the second's senders wait for."""
        readers: dict[str, _Parts] = {}
        for step in range(2):
            for task in self.graph.tasks:
                for region in self.messages.receives.get(task.id, ()):
                    readers.setdefault(region.buffer, _Parts()).add(region, _Access(region, task.id, step))
                for region in self.messages.sends.get(task.id, ()):
                    parts = readers.setdefault(region.buffer, _Parts())
                    for access in dict.fromkeys(a for accesses in parts.within(region) for a in accesses):
                        if not self._done(task.id, access.task, access.step < step):
                            return self._overwritten(task.id, region, access, access.step < step)
                    parts.replace(region, ())
        return None

    def _done(self, task: int, reader: int, in_step_before: bool) -> bool:
        """Whether `reader` of another rank is done when `task` starts."""
        worker, index = self.order.worker[reader], self.order.index[reader]
        if in_step_before:
            return bool((self.other[task] >= 0).any()) or bool(self.at_end[worker] >= index)
        return bool(self.other[task][worker] >= index)

    def _overwritten(self, task: int, region: Region, access: _Access, in_step_before: bool) -> Fault:
        when = " in the step before" if in_step_before else ""
        return Fault("peer", f"peer: {describe(self.graph, task)} sends {show(region)} to all ranks, but nothing makes it wait until "
                     f"{describe(self.graph, access.task)} of another rank has read {show(access.region)}{when}", (access.task, task), (access.region, region))


def _covered(region: Region, parts: Iterable[Region]) -> bool:
    """Whether the parts together hold all columns of the region."""
    at = region.begin
    for part in sorted(p for p in parts if p.buffer == region.buffer):
        if part.begin > at:
            return False
        at = max(at, part.end)
    return at >= region.end
