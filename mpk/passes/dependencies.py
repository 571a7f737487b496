"""Derive from overlapping regions which task needs which: read-after-write, write-after-read, write-after-write.

Runs after `partition`. Dependencies are never written by hand: the regions of the task kinds are the only source. Tasks of
one operator are independent of each other by construction, so the pass works operator by operator; tasks with equal needs
share one frozenset, which keeps a graph of 132 workers and 80 layers (millions of pairs) small. Every task without a
dependent is made a predecessor of `advance`, so that a step is over when `advance` runs. Flagged buffers, which are written once a
step, give nothing but read-after-write dependencies, and these stand apart: the data itself carries them. So do messages between ranks;
that they are not sent over each other follows from the flow of data (`mpk.graph.peers` and `mpk.graph.hazards` prove it).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby, pairwise

import numpy as np

from mpk.errors import InternalError
from mpk.graph.sm_task_graph import STEP_CLOSERS, Region, SMTaskGraph, Task


class _Accesses:
    """Writers and readers of one buffer since they were last covered: parallel arrays of column ranges and task ids."""

    def __init__(self) -> None:
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.by_range: dict[tuple[int, int], frozenset[int]] = {}
        self.by_mask: dict[bytes, frozenset[int]] = {}

    def add(self, accesses: list[tuple[int, int, int]]) -> None:
        table = np.array(accesses, dtype=np.int64)
        self._replace([*self.parts, (table[:, 0], table[:, 1], table[:, 2])])

    def _replace(self, parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
        self.parts = parts
        self.by_range.clear()
        self.by_mask.clear()

    def overlapping(self, begin: int, end: int) -> frozenset[int]:
        """Tasks whose range overlaps [begin, end); equal answers are the same object."""
        key = (begin, end)
        if key not in self.by_range:
            masks = [(b < end) & (begin < e) for b, e, _ in self.parts]
            mask = b"".join(m.tobytes() for m in masks)
            if mask not in self.by_mask:
                self.by_mask[mask] = frozenset(i for m, (_, _, ids) in zip(masks, self.parts, strict=True) for i in ids[m].tolist())
            self.by_range[key] = self.by_mask[mask]
        return self.by_range[key]

    def drop_covered(self, ranges: list[tuple[int, int]]) -> None:
        """Forget accesses that lie inside the union of `ranges` (later tasks are ordered behind the new writes)."""
        merged = _merge(ranges)
        kept = []
        for b, e, ids in self.parts:
            inside = np.zeros(len(ids), dtype=bool)
            for begin, end in merged:
                inside |= (b >= begin) & (e <= end)
            if not inside.all():
                kept.append((b[~inside], e[~inside], ids[~inside]))
        self._replace(kept)


def run(graph: SMTaskGraph) -> SMTaskGraph:
    """Fill `graph.dependencies` and `graph.carried`."""
    writers: dict[str, _Accesses] = {}
    readers: dict[str, _Accesses] = {}
    for _, group in groupby(graph.tasks, key=lambda t: t.op):
        tasks = list(group)
        _check_independent(graph, tasks)
        for task in tasks:
            for out, flagged in ((graph.dependencies, False), (graph.carried, True)):
                needs = _needs(graph, task, writers, readers, flagged)
                if needs:
                    out[task.id] = needs
        _record(tasks, writers, readers)
    _close_step(graph)
    counted, carried = (sum(len(s) for sets in needs.values() for s in sets) for needs in (graph.dependencies, graph.carried))
    graph.notes.append(f"dependencies: {counted} pairs of tasks from overlapping regions, and {carried} that flagged data carries")
    return graph


def _needs(graph: SMTaskGraph, task: Task, writers: dict[str, _Accesses], readers: dict[str, _Accesses], flagged: bool) -> list[frozenset[int]]:
    """What a task needs because of buffers that are flagged, or because of the others."""
    sets: dict[frozenset[int], None] = {}
    for region in (*task.reads, *task.writes):
        if region.buffer in writers and graph.buffers[region.buffer].says_itself == flagged:
            sets[writers[region.buffer].overlapping(region.begin, region.end)] = None
    for region in task.writes:
        if region.buffer in readers and not flagged and not graph.buffers[region.buffer].says_itself:
            sets[readers[region.buffer].overlapping(region.begin, region.end)] = None
    return [s for s in sets if s]


def _record(tasks: list[Task], writers: dict[str, _Accesses], readers: dict[str, _Accesses]) -> None:
    written = _by_buffer((r, t.id) for t in tasks for r in t.writes)
    read = _by_buffer((r, t.id) for t in tasks for r in t.reads)
    for buffer, accesses in written.items():
        ranges = [(b, e) for b, e, _ in accesses]
        for known in (writers, readers):
            if buffer in known:
                known[buffer].drop_covered(ranges)
        writers.setdefault(buffer, _Accesses()).add(accesses)
    for buffer, accesses in read.items():
        readers.setdefault(buffer, _Accesses()).add(accesses)


def _by_buffer(items: Iterable[tuple[Region, int]]) -> dict[str, list[tuple[int, int, int]]]:
    out: dict[str, list[tuple[int, int, int]]] = {}
    for region, task in items:
        out.setdefault(region.buffer, []).append((region.begin, region.end, task))
    return out


def _merge(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _check_independent(graph: SMTaskGraph, tasks: list[Task]) -> None:
    """Tasks of one operator may not touch what another of them writes."""
    written = sorted((r.buffer, r.begin, r.end, t.id) for t in tasks for r in t.writes)
    for (buffer_a, _, end_a, a), (buffer_b, begin_b, _, b) in pairwise(written):
        if buffer_a == buffer_b and begin_b < end_a and a != b:
            raise InternalError(f"operator {graph.operator(tasks[0]).name}: tasks {a} and {b} both write {buffer_a}")
    for buffer, accesses in _by_buffer((r, t.id) for t in tasks for r in t.writes).items():
        begins, ends, ids = np.array(accesses).T
        for t in tasks:
            for r in t.reads:
                if r.buffer == buffer and ((begins < r.end) & (r.begin < ends) & (ids != t.id)).any():
                    raise InternalError(f"operator {graph.operator(t).name}: task {t.id} reads what another of its tasks writes in {buffer}")


def _close_step(graph: SMTaskGraph) -> None:
    last = graph.tasks[-1]
    if last.kind not in STEP_CLOSERS:
        raise InternalError(f"the last task is {last.kind}, expected advance")
    needed = frozenset().union(*{s for needs in (graph.dependencies, graph.carried) for sets in needs.values() for s in sets})
    sinks = frozenset(t.id for t in graph.tasks if t.id not in needed and t is not last)
    if sinks:
        graph.dependencies.setdefault(last.id, []).append(sinks)
