"""Run a graph on a described machine without having it: `simulate(graph)` gives times, traffic and a timeline of a steady step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
        spans = spans[(spans["end_ns"] > spans["begin_ns"]) & (spans["end_ns"] > 0)]
        spans["begin_ns"] = np.maximum(spans["begin_ns"], 0)
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


def _apart(spans: np.ndarray) -> np.ndarray:
    """Loads of consecutive tasks of a worker overlap by what is on its way; each is drawn from the end of the one before."""
    follows = np.zeros(len(spans), bool)
    follows[1:] = (spans["worker"][1:] == spans["worker"][:-1]) & (spans["role"][1:] == spans["role"][:-1]) & (spans["device"][1:] == spans["device"][:-1])
    ends = np.roll(spans["end_ns"], 1)
    clip = follows & (spans["role"] == LOADER)
    spans["begin_ns"][clip] = np.minimum(np.maximum(spans["begin_ns"][clip], ends[clip]), spans["end_ns"][clip])
    return spans


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
