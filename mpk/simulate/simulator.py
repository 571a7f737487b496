"""Run a graph on a described machine without having it: `simulate(graph)` gives times, traffic and a timeline of a steady step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from mpk.errors import RequestError
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.simulate import core
from mpk.simulate.machine import Machine, machine
from mpk.simulate.program import Program, build
from mpk.simulate.timeline import CONSUMER, LINK, LOADER, RUN, SPAN, WAIT_EVENT, WAIT_PEER, WAIT_STEP, WAIT_WEIGHTS, Timeline
from mpk.simulate.work import Step
from mpk.targets import hardware

STEPS = 3  # simulated: the first begins with an empty ring and is left out; of the others, the last is reported


@dataclass(frozen=True)
class Simulation:
    """What came out. `records`: RECORD [steps, tasks in queue order], picoseconds; `program`: what was simulated; `events`: how many."""

    graph: SMTaskGraph
    machine: Machine
    step: Step
    program: Program
    records: np.ndarray
    events: int
    devices: int = 1

    @cached_property
    def bounds(self) -> np.ndarray:
        """int64 [steps + 1], picoseconds: when each step begins; the last is the end. A step ends when its last task has published."""
        return np.concatenate([[0], self.records["published"].max(axis=1)])

    @property
    def latency_us(self) -> float:
        """Of the last, steady step."""
        return float(self.bounds[-1] - self.bounds[-2]) / 1e6

    def by_task(self, name: str, step: int = -1) -> np.ndarray:
        """int64 [tasks], by task id: a field of the records in one step, picoseconds."""
        out = np.empty(len(self.program.ids), np.int64)
        out[self.program.ids] = self.records[name][step]
        return out

    @cached_property
    def timeline(self) -> Timeline:
        """Spans of all steps but the first, nanoseconds from the beginning of the second (of the first, if there is no other)."""
        first = 1 if len(self.records) > 1 else 0
        begin = int(self.bounds[first])
        parts = [part for s in range(first, len(self.records)) for part in self._spans(s, begin)]
        spans = np.concatenate(parts)
        spans = _wrapped(spans[spans["end_ns"] > spans["begin_ns"]], int(self.bounds[-1] - begin) // 1000)
        spans = spans[np.lexsort((spans["begin_ns"], spans["role"], spans["worker"], spans["device"]))]
        return Timeline(self.graph, _apart(spans), "simulated", self.graph.num_workers, self.devices, len(self.records) - first)

    def _spans(self, step: int, begin: int) -> list[np.ndarray]:
        r, program = self.records[step], self.program
        worker = np.repeat(np.arange(self.graph.num_workers, dtype=np.int32), np.diff(program.begin))
        first = np.zeros(len(r), bool)
        first[program.begin[:-1][np.diff(program.begin) > 0]] = True
        moved = program.column("memory_bytes")[program.ids]

        def part(role: int, phase: int, start: np.ndarray, end: np.ndarray, size: np.ndarray | None = None) -> np.ndarray:
            out = np.zeros(len(r), SPAN)
            out["worker"], out["role"], out["task"] = worker, role, program.ids
            out["phase"] = phase if role != CONSUMER or phase != WAIT_EVENT else np.where(first, WAIT_STEP, WAIT_EVENT)
            out["begin_ns"], out["end_ns"] = (start - begin) // 1000, (end - begin) // 1000
            if size is not None:
                out["bytes"] = size
            return out

        # Waits for single stages within a task are drawn as one, before it runs.
        peer, busy = r["ready"] - r["peer"], r["ready"] + r["starved"]
        spans = [part(CONSUMER, WAIT_EVENT, r["arrived"], peer), part(CONSUMER, WAIT_PEER, peer, r["ready"]),
                 part(CONSUMER, WAIT_WEIGHTS, r["ready"], busy), part(CONSUMER, RUN, busy, r["published"])]
        sent = r["sent"] >= 0
        spans.append(part(LINK, RUN, r["ended"], r["sent"], program.column("link")[program.ids])[sent])
        loaded = r["load_begun"] >= 0
        spans.append(part(LOADER, RUN, r["load_begun"], r["load_ended"], moved)[loaded])
        return spans


def _wrapped(spans: np.ndarray, duration_ns: int) -> np.ndarray:
    """Spans from 0 on. What was loaded before is shown at the end instead, where the loaders of a generation that goes on fetch the same for the next step."""
    early = (spans["begin_ns"] < 0) & (spans["role"] == LOADER)
    before = spans[early]
    before["end_ns"] = np.minimum(before["end_ns"], 0)
    before["bytes"] = before["bytes"] * (before["end_ns"] - before["begin_ns"]) // (spans["end_ns"] - spans["begin_ns"])[early]
    spans["bytes"][early] -= before["bytes"]
    before["begin_ns"] += duration_ns
    before["end_ns"] += duration_ns
    spans = np.concatenate([spans, before])
    spans["begin_ns"] = np.maximum(spans["begin_ns"], 0)
    return spans[spans["end_ns"] > spans["begin_ns"]]


def _apart(spans: np.ndarray) -> np.ndarray:
    """Loads of a worker overlap: by what is on its way, and where its consumer loads too. They are drawn one after the other, in pieces, so that what the
    worker brings in any time is what it brought."""
    loads = spans["role"] == LOADER
    others, loads = spans[~loads], spans[loads]
    at = np.flatnonzero(np.diff(loads["worker"], prepend=-1) | np.diff(loads["device"], prepend=-1))
    parts = [_interleaved(part) for part in np.split(loads, at[1:])] if len(at) else []
    return np.concatenate([others, *parts])


def _interleaved(loads: np.ndarray) -> np.ndarray:
    """SPAN, in order of begin, of one worker -> the same bytes in spans that do not overlap: a time in which several are on their way is shared
    among them by their rates."""
    if not (loads["begin_ns"][1:] < loads["end_ns"][:-1]).any():
        return loads
    begins, ends, sizes = (loads[name].tolist() for name in ("begin_ns", "end_ns", "bytes"))
    edges = np.unique(np.concatenate([loads["begin_ns"], loads["end_ns"]])).tolist()
    pieces: list[list[int]] = []  # [load, begin, end, bytes]
    active: list[int] = []
    left, following = [0] * len(begins), 0  # bytes of pieces shorter than a nanosecond
    for t0, t1 in pairwise(edges):
        active = [i for i in active if ends[i] > t0]
        while following < len(begins) and begins[following] <= t0:
            active.append(following)
            following += 1
        if not active:
            continue
        moved = [sizes[i] * (t1 - begins[i]) // (ends[i] - begins[i]) - sizes[i] * (t0 - begins[i]) // (ends[i] - begins[i]) for i in active]
        whole, done, begin = sum(moved), 0, t0
        for n, (i, amount) in enumerate(zip(active, moved, strict=True)):
            done += amount
            end = t1 if n + 1 == len(active) else t0 + ((t1 - t0) * done // whole if whole else 0)
            left[i] += amount
            if end == begin:
                continue
            if pieces and pieces[-1][0] == i and pieces[-1][2] == begin:
                pieces[-1][2], pieces[-1][3] = end, pieces[-1][3] + left[i]
            else:
                pieces.append([i, begin, end, left[i]])
            left[i], begin = 0, end
    table = np.array(pieces, np.int64)
    out = loads[table[:, 0]]
    out["begin_ns"], out["end_ns"], out["bytes"] = table[:, 1], table[:, 2], table[:, 3]
    out["bytes"][-1] += sum(left)
    return out


def simulate(graph: SMTaskGraph, *, target: Machine | str | None = None, batch: int = 1, context: int = 512, steps: int = STEPS,
             pipelining: bool = True, devices: int = 1) -> Simulation:
    """Simulate `steps` consecutive decode steps of `batch` sequences at `context` tokens.

    graph: scheduled, with events. target: a `Machine`, or the name of a described target (default: the graph's own). `pipelining`: weights
    are fetched ahead of events, across tasks and steps. `devices`: that share the model; they are alike, so one is simulated.
    Raises `RequestError` for sizes out of range, `TargetError` for a target without costs, `GraphError` for a schedule that hangs.
    """
    for name, value, most in (("batch", batch, graph.max_rows), ("context", context, 1 << 40), ("steps", steps, 1000)):
        if not 1 <= value <= most:
            raise RequestError(f"{name} {value}", expected=f"1 to {most}")
    wanted: Machine | str = target or graph.target
    described = wanted if isinstance(wanted, Machine) else machine(hardware.load(wanted).with_workers(graph.num_workers), devices)
    step = Step(batch, context)
    return run_program(graph, described, step, build(graph, described, step, steps, pipelining), devices)


def run_program(graph: SMTaskGraph, described: Machine, step: Step, program: Program, devices: int = 1) -> Simulation:
    """Simulate a program that was built from `graph`."""
    records, events = core.run(program)
    return Simulation(graph, described, step, program, records, events, devices)
