"""Runs a sharded graph on several ranks in an unfortunate order, and tells whether a part of a message is lost: the oracle for `mpk.graph.peers`.

Nothing of the passes or of the prover is used. Every rank goes through its queues; a task starts when its events have fired (counted), and one that
receives ends when the words it reads bear its message's flag. One task of one rank is held back for as long as anything else can go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mpk.graph.sm_task_graph import Region, SMTaskGraph


@dataclass(frozen=True)
class Held:
    """The task that is held back: which, of which rank, in which step."""

    rank: int
    task: int
    step: int


class _Ranks:
    def __init__(self, graph: SMTaskGraph, steps: int, logits: tuple[bool, ...], held: Held | None) -> None:
        self.graph, self.steps, self.logits, self.held = graph, steps, logits, held
        self.ranks = graph.ranks
        self.place = [[0] * len(graph.queues) for _ in range(self.ranks)]
        self.counts = [[0] * len(graph.events) for _ in range(self.ranks)]
        self.flags: dict[tuple[int, str, int, int], int] = {}  # (memory of, buffer, source, column) -> flag
        self.unread: dict[tuple[int, str, int, int], bool] = {}
        for counts in self.counts:
            counts[0] = 1

    def flag(self, task: int, step: int) -> int:
        attrs = self.graph.operator(task).attrs
        return step * int(attrs["messages"]) + int(attrs["message"])

    def words(self, regions: tuple[Region, ...], step: int) -> Iterator[tuple[str, int]]:
        for r in regions:
            buffer = self.graph.buffers[r.buffer]
            if buffer.kind == "peer" and (buffer.rows != "logits" or self.logits[step - 1]):
                for column in range(r.begin, r.end, 8):
                    yield r.buffer, column

    def step_of(self, rank: int, queue: int) -> int:
        return 1 + self.place[rank][queue] // len(self.graph.queues[queue])

    def next_task(self, rank: int, queue: int) -> int:
        tasks = self.graph.queues[queue]
        return tasks[self.place[rank][queue] % len(tasks)]

    def can_run(self, rank: int, queue: int) -> bool:
        if self.step_of(rank, queue) > self.steps:
            return False
        task, step = self.graph.tasks[self.next_task(rank, queue)], self.step_of(rank, queue)
        waits = [(e, self.graph.events[e].threshold * step) for e in task.waits]
        if self.place[rank][queue] % len(self.graph.queues[queue]) == 0:
            waits.append((0, step))
        if any(self.counts[rank][e] < needed for e, needed in waits):
            return False
        return all(self.flags.get((rank, b, source, c)) == self.flag(task.id, step)
                   for b, c in self.words(task.reads, step) for source in range(self.ranks))

    def run(self, rank: int, queue: int) -> str | None:
        """Run the queue's next task; returns what is lost by it."""
        task, step = self.graph.tasks[self.next_task(rank, queue)], self.step_of(rank, queue)
        for b, c in self.words(task.reads, step):
            for source in range(self.ranks):
                self.unread.pop((rank, b, source, c), None)
        for b, c in self.words(task.writes, step):
            for memory in range(self.ranks):
                key = (memory, b, rank, c)
                if key in self.unread:
                    return f"rank {rank} step {step} task {task.id} overwrites {b}[{c}] in rank {memory}"
                self.flags[key] = self.flag(task.id, step)
                if self.is_read(b, c, task.id):
                    self.unread[key] = True
        for e in task.signals:
            self.counts[rank][e] += 1
        self.place[rank][queue] += 1
        return None

    def is_read(self, buffer: str, column: int, sender: int) -> bool:
        """Whether a task after the sender reads what it sends before it is sent anew."""
        for task in self.graph.tasks[sender + 1 :]:
            if any(r.buffer == buffer and r.begin <= column < r.end for r in task.reads):
                return True
            if any(r.buffer == buffer and r.begin <= column < r.end for r in task.writes):
                return False
        return False

    def is_held(self, rank: int, queue: int) -> bool:
        return self.held == Held(rank, self.next_task(rank, queue), self.step_of(rank, queue))


def harm(graph: SMTaskGraph, held: Held | None, logits: tuple[bool, ...] = (False, True, False)) -> str | None:
    """What goes wrong in len(logits) steps if `held` is held back; `logits`: which steps have rows of logits."""
    ranks = _Ranks(graph, len(logits), logits, held)
    while True:
        ready = [(r, q) for r in range(graph.ranks) for q in range(len(graph.queues)) if graph.queues[q] and ranks.can_run(r, q)]
        if not ready:
            break
        for r, q in [x for x in ready if not ranks.is_held(*x)] or ready:
            if ranks.can_run(r, q):
                lost = ranks.run(r, q)
                if lost is not None:
                    return lost
    done = all(p == len(logits) * len(q) for place in ranks.place for p, q in zip(place, graph.queues, strict=True))
    return None if done else "deadlock"


def harm_by_holding_any(graph: SMTaskGraph) -> str | None:
    """The first harm that holding back one reader of rank 1 does, in the first or second step."""
    readers = [t.id for t in graph.tasks if any(graph.buffers[r.buffer].kind == "peer" for r in t.reads)]
    for step in (1, 2):
        for t in readers:
            found = harm(graph, Held(1, t, step))
            if found is not None:
                return found
    return None
