"""Data hazards of a scheduled graph: accesses in conflict that the happens-before relation does not order.

What is meant is the order of visibility (`mpk.graph.order`), but for messages between ranks and for flagged buffers: these say themselves
that they have come, so there the order of execution is enough. Words of flagged buffers are written once a step, and whoever
reads them waits for them, so there the order of execution is enough.

Two accesses conflict if they touch the same memory and one of them writes. A first scan looks at each buffer by itself and
goes through tasks in the sequential order; for every segment of a buffer it keeps the last writer, and the readers since. A task
needs the last writer of what it reads, and the last writer and all readers since of what it writes. Earlier accesses follow by
transitivity, as in the FastTrack race detector (Flanagan and Freund, 2009).

A second scan looks at bytes of the arena that buffers share and goes through tasks in an order in which they may run. Each cell
of the arena (bytes between two borders of allocations) has an owner. A write to a buffer takes its cells from other owners: it
needs all their accesses, and their contents are lost. Since contents are lost wherever rows may meet and the number of rows
varies, any two buffers that share a byte conflict as a whole.

Both scans only collect what tasks need; all of it is compared with the clocks at the end, in blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpk.graph.order import Order
from mpk.graph.sm_task_graph import Region, SMTaskGraph, Task

NOBODY = -1


@dataclass(frozen=True)
class Fault:
    """Why a graph is refused: `kind` is a short name of the fault, `message` one line for people, the rest what is involved."""

    kind: str
    message: str
    tasks: tuple[int, ...] = ()
    regions: tuple[Region, ...] = ()
    events: tuple[int, ...] = ()


def describe(graph: SMTaskGraph, task: int) -> str:
    """A task for people: id, operator, tiles and worker."""
    t = graph.tasks[task]
    return f"task {t.id} ({graph.operator(t).name} {t.tile_begin}:{t.tile_end}, worker {t.worker})"


def show(region: Region) -> str:
    return f"{region.buffer}[{region.begin}:{region.end}]"


def find_hazard(graph: SMTaskGraph, visible: Order, executed: Order) -> Fault | None:
    """The first unordered conflict, lost value or read of nothing, or None.

    Regions must be inside their buffers and queues valid (`mpk.passes.verify` checks that before).
    """
    columns = _Columns(graph)
    return _BufferScan(graph, visible, executed, columns).run() or _ArenaScan(graph, visible, columns).run()


class _Columns:
    """Where regions lie among the segments of their buffers: columns are cut at every border of a region."""

    def __init__(self, graph: SMTaskGraph) -> None:
        borders: dict[str, set[int]] = {}
        regions = {r for t in graph.tasks for r in (*t.reads, *t.writes)}
        for r in regions:
            borders.setdefault(r.buffer, set()).update((r.begin, r.end))
        self.cuts = {name: sorted(b) for name, b in borders.items()}
        place = {name: {column: i for i, column in enumerate(cuts)} for name, cuts in self.cuts.items()}
        self.segments = {r: (place[r.buffer][r.begin], place[r.buffer][r.end]) for r in regions}


# ---- what tasks need
Access = tuple[str, int, Region]  # why it needs others, task, what it touches (a plain tuple: there are hundreds of thousands)


class _Needs:
    """Accesses and what must have happened before them, in the order in which they are found."""

    BLOCK = 4096  # accesses compared at once

    def __init__(self, order: Order, itself: bool) -> None:
        self.order = order
        self.itself = itself  # whether a task's own accesses count as done
        self.accesses: list[Access] = []
        self.vectors: list[NDArray[np.int32]] = []
        self.number: dict[int, int] = {}  # id of a vector -> place in `vectors`
        self.by_vector: list[tuple[int, int]] = []  # place in `accesses`, place in `vectors`
        self.by_task: list[tuple[int, NDArray[np.int32]]] = []  # place in `accesses`, tasks
        self.by_one_task: list[tuple[int, int]] = []  # the same where it is one task

    def vector(self, access: Access, needed: NDArray[np.int32]) -> None:
        """`access` needs the latest index per queue, int32 [workers]."""
        if id(needed) not in self.number:
            self.number[id(needed)] = len(self.vectors)
            self.vectors.append(needed)
        self.by_vector.append((len(self.accesses), self.number[id(needed)]))
        self.accesses.append(access)

    def tasks(self, access: Access, needed: NDArray[np.int32]) -> None:
        """`access` needs these tasks."""
        self.by_task.append((len(self.accesses), needed))
        self.accesses.append(access)

    def task(self, access: Access, needed: int) -> None:
        """`access` needs this task."""
        self.by_one_task.append((len(self.accesses), needed))
        self.accesses.append(access)

    def first_unmet(self) -> tuple[Access, int] | None:
        """The first access that may come too early, and a task that it needs."""
        of_tasks = np.array([a[1] for a in self.accesses], np.intp)
        found = [f for f in (self._first_by_vector(of_tasks), self._first_by_task(of_tasks)) if f is not None]
        if not found:
            return None
        place, task = min(found)
        return self.accesses[place], task

    def _first_by_vector(self, of_tasks: NDArray[np.intp]) -> tuple[int, int] | None:
        for block in range(0, len(self.by_vector), self.BLOCK):
            places, numbers = np.array(self.by_vector[block : block + self.BLOCK], np.intp).T
            tasks = of_tasks[places]
            known = self.order.clock[tasks]
            if self.itself:
                known[np.arange(len(tasks)), self.order.worker[tasks]] = self.order.index[tasks]
            unmet = np.stack([self.vectors[n] for n in numbers]) > known
            rows = np.flatnonzero(unmet.any(axis=1))
            if len(rows):
                queue = int(np.argmax(unmet[rows[0]]))
                return int(places[rows[0]]), self.order.graph.queues[queue][self.vectors[numbers[rows[0]]][queue]]
        return None

    def _first_by_task(self, of_tasks: NDArray[np.intp]) -> tuple[int, int] | None:
        ones = np.array(self.by_one_task, np.intp).reshape(-1, 2)
        before = np.concatenate([ones[:, 1], *(tasks for _, tasks in self.by_task)])
        places = np.concatenate([ones[:, 0], *(np.full(len(tasks), p, np.intp) for p, tasks in self.by_task)])
        unmet = ~self.order.happens_before_many(before, of_tasks[places])
        if self.itself:
            unmet &= before != of_tasks[places]
        return min(((int(places[i]), int(before[i])) for i in np.flatnonzero(unmet)), default=None)


# ---- one buffer at a time
class _Readers:
    """Tasks that read one region, and which of its segments have been written since the last of them."""

    __slots__ = ("latest", "tasks", "written")

    def __init__(self) -> None:
        self.tasks: list[int] = []
        self.latest: NDArray[np.int32] | None = None  # per queue, made when needed
        self.written: NDArray[np.bool_] | None = None


class _BufferScan:
    """Accesses to the same buffer, in sequential order."""

    def __init__(self, graph: SMTaskGraph, visible: Order, executed: Order, columns: _Columns) -> None:
        self.graph, self.columns = graph, columns
        self.plain, self.flagged = _Needs(visible, itself=True), _Needs(executed, itself=True)
        self.writer = {b: np.full(len(cuts) - 1, NOBODY, np.int32) for b, cuts in columns.cuts.items()}
        self.readers: dict[str, dict[Region, _Readers]] = {b: {} for b in columns.cuts}
        # region -> latest writers per queue, until the buffer is written again
        self.needed_to_read: dict[str, dict[Region, NDArray[np.int32]]] = {b: {} for b in columns.cuts}

    def run(self) -> Fault | None:
        fault = None
        for task in self.graph.tasks:
            fault = next((f for f in (self._read(task, r) for r in task.reads) if f is not None), None)
            if fault is not None:
                break
            fault = next((f for f in (self._write(task, r) for r in task.writes) if f is not None), None)
            if fault is not None:
                break
        for needs in (self.plain, self.flagged):  # of tasks before the one at fault
            unmet = needs.first_unmet()
            if unmet is not None:
                return _unordered(self.graph, needs.order, *unmet)
        return fault

    def _needs(self, buffer: str) -> _Needs:
        return self.flagged if self.graph.buffers[buffer].says_itself else self.plain

    def _read(self, task: Task, region: Region) -> Fault | None:
        begin, end = self.columns.segments[region]
        access, needs = ("read-after-write", task.id, region), self._needs(region.buffer)
        if end - begin == 1:
            writer = int(self.writer[region.buffer][begin])
            if writer != NOBODY:
                needs.task(access, writer)
            elif self._must_be_written(region):
                return self._unwritten(task, region, begin)
        else:
            needed = self.needed_to_read[region.buffer].get(region)
            if needed is None:
                writers = self.writer[region.buffer][begin:end]
                missing = writers == NOBODY
                if missing.any():
                    if self._must_be_written(region):
                        return self._unwritten(task, region, begin + int(np.argmax(missing)))
                    writers = writers[~missing]
                needed = self.needed_to_read[region.buffer][region] = needs.order.frontier(writers)
            needs.vector(access, needed)
        readers = self.readers[region.buffer].get(region)
        if readers is None:
            readers = self.readers[region.buffer][region] = _Readers()
        readers.tasks.append(task.id)
        readers.latest = readers.written = None
        return None

    def _must_be_written(self, region: Region) -> bool:
        return self.graph.buffers[region.buffer].kind in ("activation", "peer")

    def _write(self, task: Task, region: Region) -> Fault | None:
        begin, end = self.columns.segments[region]
        writers = self.writer[region.buffer][begin:end]
        before = writers[writers != NOBODY]
        if len(before) and self.graph.buffers[region.buffer].flagged:
            return Fault("rewritten", f"rewritten: {describe(self.graph, task.id)} writes {show(region)}, which is flagged and which "
                         f"{describe(self.graph, int(before[0]))} has written in the same step", (int(before[0]), task.id), (region,))
        if len(before):
            self._needs(region.buffer).tasks(("write-after-write", task.id, region), before)
        if self.readers[region.buffer]:
            self._write_after_reads(task, region, begin, end)
        writers[:] = task.id
        self.needed_to_read[region.buffer].clear()
        return None

    def _write_after_reads(self, task: Task, region: Region, begin: int, end: int) -> None:
        access = ("write-after-read", task.id, region)
        done = []
        for read, readers in self.readers[region.buffer].items():
            if not read.overlaps(region):
                continue
            if len(readers.tasks) == 1:
                self._needs(region.buffer).task(access, readers.tasks[0])
            else:
                if readers.latest is None:
                    readers.latest = self._needs(region.buffer).order.frontier(readers.tasks)
                self._needs(region.buffer).vector(access, readers.latest)
            if self._all_written(read, readers, begin, end):
                done.append(read)
        for read in done:  # whoever writes there next is ordered behind the tasks that have written since
            del self.readers[region.buffer][read]

    def _all_written(self, read: Region, readers: _Readers, begin: int, end: int) -> bool:
        """Note that segments [begin, end) are written; whether no segment of `read` is left as it was read."""
        first, last = self.columns.segments[read]
        if begin <= first and last <= end:
            return True
        if readers.written is None:
            readers.written = np.zeros(last - first, np.bool_)
        readers.written[max(begin - first, 0) : end - first] = True
        return bool(readers.written.all())

    def _unwritten(self, task: Task, region: Region, segment: int) -> Fault:
        cuts = self.columns.cuts[region.buffer]
        part = Region(region.buffer, cuts[segment], cuts[segment + 1])
        return Fault("unwritten", f"unwritten: {describe(self.graph, task.id)} reads {show(region)}, but no task before it writes {show(part)} "
                     "in the same step", (task.id,), (region,))


# ---- buffers in the same bytes
class _Occupant:
    """A buffer with a place in the arena."""

    def __init__(self, cells: slice, segments: int) -> None:
        self.cells = cells
        self.holds: NDArray[np.bool_] = np.zeros(segments, np.bool_)  # segments whose contents are there
        self.held: set[Region] = set()  # regions known to lie in such segments
        self.accesses: list[int] = []  # tasks
        self.needed_to_write: NDArray[np.int32] | None = None  # latest accesses of former owners, while it owns its cells
        self.lost_to = NOBODY  # the task that wrote another buffer over this one

    def lose(self, task: int) -> None:
        """`task` writes another buffer into these bytes."""
        self.holds[:] = False
        self.held.clear()
        self.needed_to_write = None
        self.lost_to = task


class _ArenaScan:
    """Accesses to different buffers in the same bytes, in an order in which tasks may run.

    Whatever that order, it tells the truth: a value lost in it is lost in a possible execution, and where no conflict is left
    unordered all executions agree.
    """

    def __init__(self, graph: SMTaskGraph, order: Order, columns: _Columns) -> None:
        self.graph, self.order, self.columns = graph, order, columns
        self.needs = _Needs(order, itself=False)  # a task may not even write over what it reads itself
        placed = {name: place for name, place in graph.arena.items() if name in columns.cuts and place.size > 0 and not graph.buffers[name].flagged}
        borders = np.array(sorted({b for p in placed.values() for b in (p.offset, p.offset + p.size)}), np.int64)
        self.occupants: dict[str, _Occupant] = {}
        for name, p in placed.items():
            begin, end = np.searchsorted(borders, (p.offset, p.offset + p.size))
            self.occupants[name] = _Occupant(slice(int(begin), int(end)), len(columns.cuts[name]) - 1)
        cells = max(len(borders) - 1, 0)
        self.owner: list[str | None] = [None] * cells
        self.former_access: NDArray[np.int32] = np.full((cells, order.clock.shape[1]), -1, np.int32)  # latest per queue by owners before

    def run(self) -> Fault | None:
        fault = None
        for t in self.order.topological:
            task = self.graph.tasks[t]
            lost = next((r for r in task.reads if r.buffer in self.occupants and not self._read(task, r)), None)
            if lost is not None:
                fault = self._lost(task, lost)
                break
            for region in task.writes:
                if region.buffer in self.occupants:
                    self.needs.vector(("arena", task.id, region), self._write(task, region))
        unmet = self.needs.first_unmet()
        return fault if unmet is None else _unordered(self.graph, self.order, *unmet, self._share_bytes)

    def _read(self, task: Task, region: Region) -> bool:
        """Whether what is read is there."""
        occupant = self.occupants[region.buffer]
        occupant.accesses.append(task.id)
        if region not in occupant.held:
            begin, end = self.columns.segments[region]
            if not occupant.holds[begin:end].all():
                return False
            occupant.held.add(region)
        return True

    def _write(self, task: Task, region: Region) -> NDArray[np.int32]:
        """Take the cells of the buffer; returns the latest accesses of all former owners."""
        occupant = self.occupants[region.buffer]
        begin, end = self.columns.segments[region]
        if occupant.needed_to_write is None:
            for cell in range(occupant.cells.start, occupant.cells.stop):
                self._take(cell, region.buffer, task.id)
            occupant.needed_to_write = self.former_access[occupant.cells].max(axis=0, initial=-1)
        occupant.accesses.append(task.id)
        occupant.holds[begin:end] = True
        return occupant.needed_to_write

    def _take(self, cell: int, name: str, task: int) -> None:
        owner = self.owner[cell]
        self.owner[cell] = name
        if owner is None or owner == name:
            return
        loser = self.occupants[owner]
        np.maximum(self.former_access[cell], self.order.frontier(loser.accesses), out=self.former_access[cell])
        if loser.needed_to_write is not None:
            loser.lose(task)

    def _share_bytes(self, a: str, b: str) -> bool:
        if a == b or a not in self.occupants or b not in self.occupants:
            return False
        x, y = self.occupants[a].cells, self.occupants[b].cells
        return bool(x.start < y.stop and y.start < x.stop)

    def _lost(self, task: Task, region: Region) -> Fault:
        other = self.occupants[region.buffer].lost_to
        written = next(r for r in self.graph.tasks[other].writes if self._share_bytes(r.buffer, region.buffer))
        return Fault("clobbered", f"clobbered: {describe(self.graph, task.id)} reads {show(region)}, but {describe(self.graph, other)} may write "
                     f"{show(written)} into the same bytes of the arena before", (task.id, other), (region, written))


def _unordered(graph: SMTaskGraph, order: Order, access: Access, needed: int, share_bytes: Callable[[str, str], bool] | None = None) -> Fault:
    """The fault of an access that may come before task `needed`; `share_bytes`: between buffers of the arena."""
    kind, task, region = access
    before = graph.tasks[needed]
    reads, writes = [(r, "reads") for r in before.reads], [(r, "writes") for r in before.writes]
    candidates = {"read-after-write": writes, "write-after-write": writes, "write-after-read": reads, "arena": writes + reads}[kind]
    if share_bytes is None:
        other, verb = next((r, v) for r, v in candidates if r.overlaps(region))
    else:
        other, verb = next((r, v) for r, v in candidates if share_bytes(r.buffer, region.buffer))
    if before.id == task:
        why = "all in one task"
    elif order.happens_before(task, before.id):
        why = "but the schedule runs them the other way round"
    else:
        why = "but nothing makes it wait for that"
    does = "reads" if kind == "read-after-write" else "writes"
    place = " into the same bytes of the arena" if kind == "arena" else ""
    return Fault(kind, f"{kind}: {describe(graph, task)} {does} {show(region)}{place} after {describe(graph, before.id)} {verb} "
                 f"{show(other)}, {why}", (before.id, task), (other, region))
