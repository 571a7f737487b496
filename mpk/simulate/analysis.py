"""What a `Timeline` says in numbers: time by operator, idle time by cause, utilisation and bandwidth over time, who was waited for.

Pictures, `mpk trace` and comparisons print these, so that they never disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from mpk.simulate.timeline import CONSUMER, LINK, LOADER, PHASES, RUN, WAIT_EVENT, WAIT_PEER, WAIT_WEIGHTS, Timeline

if TYPE_CHECKING:
    from mpk.graph.sm_task_graph import SMTaskGraph
    from mpk.graph.tensor_graph import Operator

NOT_TRACED = "no span"  # time of a worker that no span covers: no task is left, or the trace is silent


def short_name(op: Operator) -> str:
    """An operator's name without its layer: the same in all layers ("down", "attention.combine")."""
    return op.name.split(".", 1)[-1] if op.layer >= 0 else op.name


def task_operators(graph: SMTaskGraph) -> tuple[np.ndarray, list[str]]:
    """(int32 [tasks]: index of each task's short operator name, the names in program order)."""
    names: dict[str, int] = {}
    of_op = [names.setdefault(short_name(op), len(names)) for op in graph.tensor_graph.operators]
    return np.array([of_op[t.op] for t in graph.tasks], np.int32), list(names)


def weight_bytes(graph: SMTaskGraph) -> np.ndarray:
    """int64 [tasks]: bytes of weights that each task multiplies."""
    return np.array([t.cost.weight_bytes for t in graph.tasks], np.int64)


def devices_shown(timeline: Timeline) -> int:
    """How many devices have spans: where all are alike, a simulation may show the first one only."""
    return int(timeline.spans["device"].max(initial=0)) + 1


def covered_ns(begin: np.ndarray, end: np.ndarray) -> int:
    """Length of the union of intervals [begin, end)."""
    if len(begin) == 0:
        return 0
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    reach = np.maximum.accumulate(end)
    gaps = np.maximum(begin[1:] - reach[:-1], 0)
    return int(reach[-1] - begin[0] - gaps.sum())


# What happens inside a task, from the moment its events have come to its end. A measured trace has all of it as RUN; a simulated one
# tells the waits for weights and peers apart. So what both are compared by is the whole.
INSIDE = (RUN, WAIT_WEIGHTS, WAIT_PEER)


@dataclass
class OperatorTime:
    """One row of the table by operator; times are microseconds of one step.

    `task_us`: what an average worker spends in tasks of it (`INSIDE`); `run_us`: without waits inside tasks, as far as these are known.
    `wait_us`: all its waits, by cause (index of `PHASES`). `active_us`: how long at least one worker of a device is in a task of it.
    `bytes`: weights it reads in a step, per device. `gb_s`: those per second of `active_us`; weights that were fetched ahead count where
    they are used, so that a short operator may exceed the memory's bandwidth.
    """

    name: str
    kind: str
    tasks: int
    task_us: float
    run_us: float
    active_us: float
    bytes: int
    gb_s: float
    wait_us: dict[int, float] = field(default_factory=dict)

    @property
    def before_us(self) -> float:
        """Waits before tasks: for events and for the step."""
        return sum(us for phase, us in self.wait_us.items() if phase not in INSIDE)


def per_operator(timeline: Timeline) -> list[OperatorTime]:
    """Time by operator (all layers together), in program order; operators without spans are left out."""
    graph, spans = timeline.graph, timeline.spans
    of_task, names = task_operators(graph)
    kinds = {short_name(op): op.kind for op in reversed(graph.tensor_graph.operators)}
    weights = weight_bytes(graph)
    spans = spans[(spans["role"] == CONSUMER) & (spans["task"] >= 0)]
    took = (spans["end_ns"] - spans["begin_ns"]) / 1e3
    ops = of_task[spans["task"]]
    inside = np.isin(spans["phase"], INSIDE)
    devices = devices_shown(timeline)
    scale = 1.0 / (timeline.workers * devices * timeline.steps)
    rows = []
    for index, name in enumerate(names):
        mine = ops == index
        if not mine.any():
            continue
        busy = spans[mine & inside]
        active = sum(covered_ns(r["begin_ns"], r["end_ns"]) for r in by_device(busy, devices)) / devices / timeline.steps / 1e3
        tasks = np.unique(busy["task"])
        moved = int(weights[tasks].sum())
        times = {phase: float(took[mine & (spans["phase"] == phase)].sum() * scale) for phase in range(len(PHASES))}
        rows.append(OperatorTime(name, kinds[name], len(tasks), sum(times[p] for p in INSIDE), times[RUN], active, moved,
                                 moved / active / 1e3 if active else 0.0, {p: us for p, us in times.items() if us and p != RUN}))
    return rows


def by_device(spans: np.ndarray, devices: int) -> list[np.ndarray]:
    """The spans of each device."""
    return [spans[spans["device"] == d] for d in range(devices)]


def shares(timeline: Timeline, device: int | None = None) -> dict[str, float]:
    """Share of the consumers' time by what they do: the names of `PHASES`, and `NOT_TRACED`. Sums to 1. `device`: of that one only."""
    spans = timeline.spans[timeline.spans["role"] == CONSUMER]
    if device is not None:
        spans = spans[spans["device"] == device]
    whole = timeline.duration_ns * timeline.workers * (devices_shown(timeline) if device is None else 1)
    if not whole:
        return {**dict.fromkeys(PHASES, 0.0), NOT_TRACED: 1.0}
    took = np.bincount(spans["phase"], weights=(spans["end_ns"] - spans["begin_ns"]).astype(np.float64), minlength=len(PHASES)) / whole
    out = {name: float(t) for name, t in zip(PHASES, took, strict=True)}
    out[NOT_TRACED] = max(0.0, 1.0 - float(took.sum()))
    return out


def utilisation(timeline: Timeline) -> float:
    """Share of the time of all consumers in which they run tasks."""
    return shares(timeline)[PHASES[RUN]]


def in_tasks(timeline: Timeline) -> float:
    """Share of the time of all consumers that they spend in tasks (`INSIDE`)."""
    found = shares(timeline)
    return sum(found[PHASES[phase]] for phase in INSIDE)


def knows_waits_inside(timeline: Timeline) -> bool:
    """Whether the timeline tells what tasks wait for weights and peers; else that is part of their runs."""
    return bool(np.isin(timeline.spans["phase"], (WAIT_WEIGHTS, WAIT_PEER)).any())


def step_ends(timeline: Timeline, device: int = 0) -> np.ndarray:
    """int64 [steps]: when each step ended, that is, when `advance` did (the duration where a graph has none, or the trace is cut)."""
    spans = timeline.spans
    closing = np.array([t.kind == "advance" for t in timeline.graph.tasks] + [False])  # the last one is for task -1
    ends = np.sort(spans["end_ns"][closing[spans["task"]] & (spans["phase"] == RUN) & (spans["role"] == CONSUMER) & (spans["device"] == device)])
    if len(ends) == 0 or len(ends) % timeline.steps:
        return np.array([timeline.duration_ns], np.int64)
    return ends.reshape(timeline.steps, -1)[:, -1].astype(np.int64)


LOADS, WEIGHTS_OF_TASKS = "loads", "weights of the tasks that run"


def traffic(timeline: Timeline) -> tuple[np.ndarray, str]:
    """(int64 [spans]: bytes that each span brings from memory, how that is known).

    `LOADS`: what the loaders moved. `WEIGHTS_OF_TASKS`, where the timeline does not tell: the weights of each task, while it runs.
    """
    spans = timeline.spans
    loads = np.where(spans["role"] == LOADER, spans["bytes"], 0)
    if loads.any():
        return loads, LOADS
    runs = (spans["role"] == CONSUMER) & (spans["phase"] == RUN) & (spans["task"] >= 0)
    tasks = spans["task"][runs]
    pieces = np.bincount(tasks, minlength=1)[tasks]  # more than one a step where waits inside a task cut its run
    moved = np.zeros(len(spans), np.int64)
    moved[runs] = weight_bytes(timeline.graph)[tasks] * (timeline.steps * devices_shown(timeline)) // np.maximum(pieces, 1)
    return moved, WEIGHTS_OF_TASKS


def bytes_per_step(timeline: Timeline) -> tuple[int, int]:
    """What one device brings from memory and sends to other devices in a step."""
    scale = timeline.steps * devices_shown(timeline)
    spans = timeline.spans
    return int(traffic(timeline)[0].sum()) // scale, int(spans["bytes"][spans["role"] == LINK].sum()) // scale


def binned(begin: np.ndarray, end: np.ndarray, amount: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """float64 [len(edges) - 1]: how much of the spans' amounts, spread evenly over each, falls between two edges (ns)."""
    length = np.maximum(end - begin, 1).astype(np.float64)
    out = np.zeros(len(edges))
    # integral up to an edge x = sum of amount * clip((x - begin) / length, 0, 1): two sorted prefix sums give it for all edges
    rate = amount / length
    for times, sign in ((begin, 1.0), (begin + length, -1.0)):
        order = np.argsort(times, kind="stable")
        at = times[order].astype(np.float64)
        slope, offset = np.cumsum(rate[order]), np.cumsum(rate[order] * at)
        place = np.searchsorted(at, edges, side="right")
        known = place > 0
        out[known] += sign * (slope[place[known] - 1] * edges[known] - offset[place[known] - 1])
    return np.maximum(np.diff(out), 0.0)


def series(timeline: Timeline, bins: int, device: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(edges [bins + 1] in ns, utilisation [bins] from 0 to 1, bytes per second [bins]) of a device over the whole timeline."""
    edges = np.linspace(0, max(timeline.duration_ns, 1), bins + 1)
    width = edges[1] - edges[0]
    spans = timeline.spans[(timeline.spans["device"] == device) & (timeline.spans["role"] == CONSUMER) & (timeline.spans["phase"] == RUN)]
    took = (spans["end_ns"] - spans["begin_ns"]).astype(np.float64)
    busy = binned(spans["begin_ns"], spans["end_ns"], took, edges) / (width * timeline.workers)
    moved = traffic(timeline)[0]
    chosen = (moved > 0) & (timeline.spans["device"] == device)
    moves = timeline.spans[chosen]
    rate = binned(moves["begin_ns"], moves["end_ns"], moved[chosen].astype(np.float64), edges) / width * 1e9
    return edges, np.minimum(busy, 1.0), rate


def waited_for(timeline: Timeline) -> np.ndarray:
    """int32 [spans]: for a wait for an event or a peer, the task whose end came last among those it needs; -1 elsewhere and where unknown.

    Looked up per step and device: the last of the producers of all events that the task waits for.
    """
    graph, spans = timeline.graph, timeline.spans
    out = np.full(len(spans), -1, np.int32)
    count = np.array([len(t.waits) for t in graph.tasks], np.int64)
    events = np.array([e for t in graph.tasks for e in t.waits], np.int64)  # of all tasks, one after the other
    first = np.cumsum(count) - count
    for device in range(devices_shown(timeline)):
        ends = step_ends(timeline, device)
        mine = (spans["device"] == device) & (spans["role"] == CONSUMER) & (spans["task"] >= 0)
        step = np.searchsorted(ends, spans["begin_ns"], side="right")
        done = np.full((len(ends) + 1, len(graph.tasks)), -1, np.int64)
        ran = mine & (spans["phase"] == RUN)
        np.maximum.at(done, (step[ran], spans["task"][ran]), spans["end_ns"][ran])
        last = _last_producers(graph, done)
        waits = np.flatnonzero(mine & ((spans["phase"] == WAIT_EVENT) | (spans["phase"] == WAIT_PEER)))
        each = count[spans["task"][waits]]
        row = np.repeat(np.arange(len(waits)), each)  # one entry for each event that a wait waits for
        place = np.arange(len(row)) - np.repeat(np.cumsum(each) - each, each) + first[spans["task"][waits]][row]
        at = step[waits][row]
        producer = last[at, events[place]]
        when = np.where(producer >= 0, done[at, producer], -1)
        order = np.lexsort((producer, when, row))
        order = order[np.flatnonzero(np.diff(row[order], append=-1))]  # the latest of each wait
        order = order[when[order] >= 0]
        out[waits[row[order]]] = producer[order]
    return out


def _last_producers(graph: SMTaskGraph, done: np.ndarray) -> np.ndarray:
    """int32 [steps, events]: the producer of each event that ended last, given when each task ended ([steps, tasks], -1: never)."""
    out = np.full((len(done), len(graph.events)), -1, np.int32)
    closing = {t.id for t in graph.tasks if t.kind == "advance"}
    for event in graph.events:
        if event.producers and not closing.intersection(event.producers):  # `advance` ends the step before, which is no event of this one
            producers = np.array(event.producers)
            out[:, event.id] = producers[np.argmax(done[:, producers], axis=1)]
    return out


def steps_of(timeline: Timeline, device: int = 0) -> list[tuple[int, int]]:
    """(begin, end) in ns of each step."""
    return list(pairwise([0, *step_ends(timeline, device).tolist()]))
