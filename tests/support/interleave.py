"""What a graph can do wrong when it runs, found by running it: every interleaving, or every task held back in turn.

Nothing here knows vector clocks or the verifier. A machine has one place per worker, one counter per event and one version per
cell of memory (column segments of caches and state, byte ranges of the arena). A version is (step, writer). Two steps are run.
The expected version of every read comes from the sequential order, each buffer with memory of its own.

A task is not atomic: whenever two tasks can both be running and touch a cell that one of them writes, that is a harm. Since
counters only grow, a task that may start stays able to; so two tasks can be in flight together exactly if there is a state in
which both may start. States therefore need no "started" mark: each pair of tasks that may start is looked at instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from mpk.graph.sm_task_graph import Region, SMTaskGraph
from tests.support.graphs import KINDS

STEPS = 2
Version = tuple[int, int] | None


@dataclass
class _Work:
    """What one task of one step does."""

    step: int
    task: int
    waits: list[tuple[int, int]]
    signals: tuple[int, ...]
    expected: list[tuple[int, Version]] = field(default_factory=list)  # cell, version that the sequential order reads
    writes: list[int] = field(default_factory=list)
    read_mask: int = 0
    write_mask: int = 0


class HarmError(Exception):
    """The harm that was found, as one line."""


class Machine:
    """The program of `graph`; raises `HarmError` for what is wrong whatever the timing."""

    def __init__(self, graph: SMTaskGraph) -> None:
        self.graph = graph
        self._check_static()
        self.cells: dict[tuple[str, int, int], list[int]] = {}  # buffer, column segment -> cells
        self.cell_count = 1  # cell 0: the description of the step, read by all tasks
        self._cut_memory()
        self.works = [{t.id: self._work(step, t.id) for t in graph.tasks} for step in range(1, STEPS + 1)]
        self._expect()
        self.programs = [[self.works[s][t] for s in range(STEPS) for t in queue] for queue in graph.queues]
        self.total = sum(len(p) for p in self.programs)

    # ---- what needs no execution
    def _check_static(self) -> None:
        graph = self.graph
        placed = sorted(t for queue in graph.queues for t in queue)
        if placed != list(range(len(graph.tasks))):
            raise HarmError("a task is run never, twice, or does not exist")
        if len(graph.queues) != graph.num_workers:
            raise HarmError("not as many queues as workers")
        for task in graph.tasks:
            if any(not 0 <= e < len(graph.events) for e in (*task.waits, *task.signals)):
                raise HarmError(f"task {task.id} uses an event that does not exist")
            for r in (*task.reads, *task.writes):
                if r.buffer not in graph.buffers or not 0 <= r.begin < r.end <= graph.buffers[r.buffer].columns:
                    raise HarmError(f"task {task.id} touches memory outside {r.buffer}")
        limits = graph.limits
        scratch = max((KINDS[o.kind].scratch_bytes(o, graph.tensor_graph, graph.max_rows) for o in graph.tensor_graph.operators if o.kind in KINDS),
                      default=0)
        if limits and (scratch > limits.scratch_bytes or graph.arena_bytes > limits.arena_bytes or len(graph.events) > limits.events or graph.num_workers > limits.workers):
            raise HarmError("the machine is too small")
        for name, place in graph.arena.items():
            if place.offset < 0 or place.offset + self._rows(name) * graph.buffers[name].row_bytes > graph.arena_bytes:
                raise HarmError(f"{name} reaches beyond the arena")

    def _rows(self, name: str) -> int:
        return 1 if self.graph.buffers[name].rows == "step" else self.graph.max_rows

    def _regions(self) -> set[Region]:
        return {r for t in self.graph.tasks for r in (*t.reads, *t.writes)}

    # ---- memory
    def _cut_memory(self) -> None:
        borders: dict[str, set[int]] = {}
        for r in self._regions():
            borders.setdefault(r.buffer, set()).update((r.begin, r.end))
        self.cuts = {name: sorted(b) for name, b in borders.items()}
        spans: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
        points: set[int] = set()
        for name, cuts in self.cuts.items():
            for a, b in pairwise(cuts):
                if name not in self.graph.arena:
                    self.cells[name, a, b] = [self.cell_count]
                    self.cell_count += 1
                    continue
                buffer, offset = self.graph.buffers[name], self.graph.arena[name].offset
                rows = [offset + r * buffer.row_bytes for r in range(self._rows(name))]
                spans[name, a, b] = [(row + a * buffer.element_bytes, row + b * buffer.element_bytes) for row in rows]
                points.update(p for span in spans[name, a, b] for p in span)
        ordered = sorted(points)
        number = {p: i for i, p in enumerate(ordered)}
        for key, parts in spans.items():
            self.cells[key] = [self.cell_count + i for begin, end in parts for i in range(number[begin], number[end])]
        self.cell_count += len(ordered)

    def _segments(self, region: Region) -> list[tuple[str, int, int]]:
        cuts = self.cuts[region.buffer]
        return [(region.buffer, a, b) for a, b in pairwise(cuts) if region.begin <= a and b <= region.end]

    def _work(self, step: int, task: int) -> _Work:
        t = self.graph.tasks[task]
        waits = [(e, self.graph.events[e].threshold * step) for e in t.waits]
        return _Work(step, task, waits, t.signals)

    def _expect(self) -> None:
        """Run the sequential order with separate buffers; note the version of every read, and masks of what is touched."""
        version: dict[tuple[str, int, int], Version] = {}
        step_version: Version = None
        for works in self.works:
            for t in self.graph.tasks:
                work = works[t.id]
                work.expected.append((0, step_version))
                reads = {s for r in t.reads for s in self._segments(r)}
                writes = {s for r in t.writes for s in self._segments(r)}
                for s in sorted(reads):
                    seen = version.get(s)
                    if self.graph.buffers[s[0]].kind == "activation" and (seen is None or seen[0] != work.step):
                        raise HarmError(f"task {t.id} reads {s}, which nothing wrote in its step")
                    work.expected += [(c, seen) for c in self.cells[s]]
                for s in sorted(writes):
                    version[s] = (work.step, t.id)
                    work.writes += self.cells[s]
                if t.kind == "advance":
                    step_version = (work.step, t.id)
                    work.writes.append(0)
                self._check_within(t.id, reads, writes)
                work.read_mask = sum(1 << c for c in {c for c, _ in work.expected})
                work.write_mask = sum(1 << c for c in set(work.writes))

    def _check_within(self, task: int, reads: set[tuple[str, int, int]], writes: set[tuple[str, int, int]]) -> None:
        for w in writes:
            for other in reads | writes:
                if other[0] != w[0] and set(self.cells[w]) & set(self.cells[other]):
                    raise HarmError(f"task {task} overwrites with {w} what it has in {other}")

    # ---- execution
    def may_start(self, work: _Work, counters: list[int]) -> bool:
        return all(counters[e] >= needed for e, needed in work.waits)

    def execute(self, work: _Work, counters: list[int], memory: list[Version]) -> None:
        for cell, seen in work.expected:
            if memory[cell] != seen:
                raise HarmError(f"task {work.task} of step {work.step} reads version {memory[cell]} of cell {cell}, not {seen}")
        for cell in work.writes:
            memory[cell] = (work.step, work.task)
        for e in work.signals:
            counters[e] += 1

    def start(self) -> tuple[list[int], list[Version]]:
        counters = [0] * len(self.graph.events)
        if counters:
            counters[0] = 1  # the host starts the first step
        return counters, [None] * self.cell_count


def in_conflict(a: _Work, b: _Work) -> bool:
    return bool((a.read_mask & b.write_mask) | (a.write_mask & b.read_mask) | (a.write_mask & b.write_mask))


def harm_by_interleaving(graph: SMTaskGraph, max_states: int = 200_000) -> str | None:
    """Go through all interleavings of two steps; returns the first harm or None. For small graphs.

    Raises `RuntimeError` beyond `max_states` states.
    """
    try:
        machine = Machine(graph)
        counters, memory = machine.start()
        seen: set[tuple[object, ...]] = set()
        stack = [([0] * len(machine.programs), counters, memory)]
        while stack:
            places, counters, memory = stack.pop()
            key = (*places, *memory)
            if key in seen:
                continue
            seen.add(key)
            if len(seen) > max_states:
                raise RuntimeError(f"more than {max_states} states")
            ready = [(w, p[places[w]]) for w, p in enumerate(machine.programs)
                     if places[w] < len(p) and machine.may_start(p[places[w]], counters)]
            _check_state(machine, places, [work for _, work in ready])
            for w, work in ready:
                then = (list(places), list(counters), list(memory))
                machine.execute(work, then[1], then[2])
                then[0][w] += 1
                stack.append(then)
    except HarmError as harm:
        return str(harm)
    return None


def _check_state(machine: Machine, places: list[int], ready: list[_Work]) -> None:
    left = [p[i] for p, i in zip(machine.programs, places, strict=True) if i < len(p)]
    if left and not ready:
        raise HarmError(f"deadlock: {', '.join(f'task {w.task} of step {w.step}' for w in left)} wait for ever")
    for i, a in enumerate(ready):
        if any(a.step > b.step for b in left):
            raise HarmError(f"task {a.task} of step {a.step} may start before the step before is over")
        for b in ready[i + 1:]:
            if in_conflict(a, b):
                raise HarmError(f"tasks {a.task} and {b.task} may run at the same time and touch the same memory")


def harm_by_holding_back(graph: SMTaskGraph) -> str | None:
    """Hold back each task in turn and let everything else run as far as it can: what has run then may precede the task.

    The same answer as going through all interleavings, in polynomial time: counters only grow, so the union of two sets
    of tasks that can have run can have run too, and what can precede a task is one largest set. Two tasks of which each can
    precede the other can be in flight together. Where no such pair is in conflict, all executions agree, so one is enough.
    """
    try:
        machine = Machine(graph)
        everything = [w for works in machine.works for w in works.values()]
        ran = _run_without(machine, None)
        if len(ran) < machine.total:
            raise HarmError("deadlock")
        may_precede = [_run_without(machine, held) for held in everything]
        number = {(w.step, w.task): i for i, w in enumerate(everything)}
        for i, held in enumerate(everything):
            for key in may_precede[i]:
                other = everything[number[key]]
                if other.step > held.step:
                    raise HarmError(f"task {other.task} of step {other.step} may run before task {held.task} of step {held.step}")
                if in_conflict(held, other) and (held.step, held.task) in may_precede[number[key]]:
                    raise HarmError(f"tasks {held.task} and {other.task} may run at the same time and touch the same memory")
        counters, memory = machine.start()
        for key in ran:
            machine.execute(everything[number[key]], counters, memory)
    except HarmError as harm:
        return str(harm)
    return None


def _run_without(machine: Machine, held: _Work | None) -> dict[tuple[int, int], None]:
    """(step, task) of all that can run while `held` does not, in an order in which it can."""
    counters, _ = machine.start()
    places = [0] * len(machine.programs)
    ran: dict[tuple[int, int], None] = {}
    progress = True
    while progress:
        progress = False
        for w, program in enumerate(machine.programs):
            while places[w] < len(program) and program[places[w]] is not held and machine.may_start(program[places[w]], counters):
                work = program[places[w]]
                for e in work.signals:
                    counters[e] += 1
                ran[work.step, work.task] = None
                places[w] += 1
                progress = True
    return ran
