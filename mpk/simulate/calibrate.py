"""Fit the costs of a target to measured decode steps, by least squares over simulated ones.

What is fitted: the protocol (event, release, step), and for each kind of task what its consumer takes. A residual is the error of a step's
time, or of the mean run or wait of an operator's tasks, as a share of the step. Levenberg's method with numeric derivatives; a weak pull
towards the start keeps what the data do not determine where it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from datetime import date
from functools import cached_property
from typing import Any

import numpy as np

from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.models.config import first_layers
from mpk.simulate import core
from mpk.simulate.machine import COSTS, Costs, KindCost, Machine, WorkerCost, load_costs, machine, save_costs
from mpk.simulate.measurement import Measurement
from mpk.simulate.program import Program, build, rebuild
from mpk.simulate.report import operator_name
from mpk.simulate.work import Step
from mpk.targets import hardware

STEP_WEIGHT, RUN_WEIGHT, WAIT_WEIGHT, PULL = 40.0, 3.0, 0.25, 0.02
WORKER_FIELDS = ("event_us", "flag_us", "fence_us", "fence_drains", "step_us", "queue_share", "latency_us", "load_gb_s", "memory_share", "spread")
STREAMED_FIELDS = ("start", "start_kb", "stage", "level", "group", "end")  # of a kind whose weights go through the ring
FEW_LAYERS = 2
LEAST = 1e-3  # of a parameter, so that steps in proportion to it can leave zero
PLAIN_FIELDS = ("before", "before_row", "end", "append", "load_kb", "end_row")
OPTIONAL = ("load_kb", "append", "before", "before_row", "level", "end_row")  # left alone where the start is without them


@dataclass
class Case:
    """One measurement, and the graph it was taken of with `layers` and twice as many layers: layers are alike, so a step of the whole model
    follows from the two, in a fraction of the time. A model with few layers has one graph, the whole."""

    measured: Measurement
    graphs: tuple[SMTaskGraph, ...]
    layers: int
    programs: tuple[Program, ...] = ()

    @cached_property
    def names(self) -> list[str]:
        return [operator_name(self.graphs[-1], t.id) for t in self.graphs[-1].tasks]

    def machine(self, costs: Costs | None = None) -> Machine:
        """The target with other costs, and with the bytes in flight of the measurement."""
        found = machine(hardware.load(self.measured.target))
        if costs is not None:
            found = replace(found, worker=costs.worker, kinds=costs.kinds)
        plan = found.target.kernel
        if plan is not None and self.measured.flight is not None:
            flight, idle = self.measured.flight
            found = replace(found, target=replace(found.target, kernel=replace(plan, flight_bytes=flight, flight_idle_bytes=idle)))
        return found

    def predict(self, costs: Costs | None = None) -> tuple[float, dict[str, tuple[float, float]]]:
        """Microseconds of a step; operator -> mean run and wait of its tasks."""
        step, described = Step(self.measured.batch, self.measured.context), self.machine(costs)
        if not self.programs:
            self.programs = tuple(build(g, described, step, 2) for g in self.graphs)
        times = []
        for graph, program in zip(self.graphs, self.programs, strict=True):
            records, _ = core.run(rebuild(program, graph, described, 2))
            ends = records["published"].max(axis=1)
            times.append(float(ends[1] - ends[0]) / 1e6)
        last = records[-1]
        places: dict[str, list[int]] = {}
        for place, task in enumerate(self.programs[-1].ids.tolist()):
            places.setdefault(self.names[task], []).append(place)
        operators = {name: (float((last["ended"] - last["ready"])[at].mean()) / 1e6, float((last["ready"] - last["arrived"])[at].mean()) / 1e6)
                     for name, at in places.items()}
        if len(times) == 1:
            return times[0], operators
        total = self.graphs[0].tensor_graph.config.num_layers
        return times[1] + (self.layers - 2 * total) * (times[1] - times[0]) / total, operators

    def residuals(self, costs: Costs) -> list[float]:
        step_us, operators = self.predict(costs)
        m = self.measured
        out = [STEP_WEIGHT * (step_us / m.step_us - 1)]
        workers = self.graphs[0].num_workers
        for name, times in m.operators.items():
            if name in operators:
                weight = max(1.0, times.tasks / workers) / m.step_us  # a task's time counts as often as a worker has one
                out += [RUN_WEIGHT * weight * (operators[name][0] - times.run_us), WAIT_WEIGHT * weight * (operators[name][1] - times.wait_us)]
        return out


def cases(measurements: Sequence[Measurement]) -> list[Case]:
    """Lower what is needed of every shape once."""
    from mpk import frontend
    from mpk.compiler import Compiler

    graphs: dict[tuple[str, str, int, int, str], tuple[int, tuple[SMTaskGraph, ...]]] = {}
    out = []
    for m in measurements:
        key = (m.model, m.target, m.max_batch, m.tp, json.dumps(m.options))
        if key not in graphs:
            loaded = frontend.load(m.model, shapes=True)
            config, compiler = loaded.config, Compiler(m.target, max_batch=m.max_batch, use_tuned=False, tensor_parallel_size=m.tp)
            compiler.target = replace(compiler.target, **m.options)  # of the program that was measured
            counts = (FEW_LAYERS, 2 * FEW_LAYERS) if config.num_layers > 2 * FEW_LAYERS else (config.num_layers,)
            parts = tuple(compiler.lower_model(replace(loaded, config=first_layers(config, n))) for n in counts)
            graphs[key] = (config.num_layers, parts)
        out.append(Case(m, graphs[key][1], graphs[key][0]))
    return out


@dataclass(frozen=True)
class Parameter:
    """A field of the worker's cost (`kind` -1) or of the entry `kind` of the kinds' costs."""

    kind: int
    name: str

    def get(self, costs: Costs) -> float:
        return float(getattr(costs.worker if self.kind < 0 else costs.kinds[self.kind], self.name))

    def set(self, costs: Costs, value: float) -> Costs:
        change: dict[str, Any] = {self.name: value}
        if self.kind < 0:
            return replace(costs, worker=replace(costs.worker, **change))
        kinds = [replace(k, **change) if i == self.kind else k for i, k in enumerate(costs.kinds)]
        return replace(costs, kinds=tuple(kinds))


    def concerns(self, case: Case, costs: Costs) -> bool:
        """Whether the case's time depends on the parameter."""
        kinds = {t.kind for t in case.graphs[0].tasks}
        return self.kind < 0 or any(_entry(costs.kinds, name, case.measured.batch) is costs.kinds[self.kind] for name in kinds)


def parameters(costs: Costs, streamed: set[str], seen: set[tuple[str, int]]) -> list[Parameter]:
    """What the measurements can say something about; `seen`: kinds and numbers of rows in them."""
    out = [Parameter(-1, f.name) for f in fields(WorkerCost) if f.name in WORKER_FIELDS and getattr(costs.worker, f.name) > 0]
    for i, kind in enumerate(costs.kinds):
        used = any(name == kind.name and _entry(costs.kinds, name, rows) is kind for name, rows in seen)
        if used:
            names = STREAMED_FIELDS if kind.name in streamed else PLAIN_FIELDS
            several = len({rows for name, rows in seen if name == kind.name and _entry(costs.kinds, name, rows) is kind}) > 1
            out += [Parameter(i, name) for name in names if (name not in OPTIONAL or getattr(kind, name) > 0) and (not name.endswith("_row") or several)]
    return out


def _entry(kinds: Sequence[KindCost], name: str, rows: int) -> KindCost | None:
    return max((k for k in kinds if k.name == name and k.rows <= rows), key=lambda k: k.rows, default=None)


def fit(start: Costs, given: Sequence[Case], rounds: int, say: Callable[[str], None]) -> Costs:
    """Costs that predict the cases best, found from `start` in `rounds` steps."""
    from mpk.tasks.base import load_kinds

    streamed = {name for name, kind in load_kinds().items() if kind.cuda_form == "stages"}
    seen = {(t.kind, c.measured.batch) for c in given for t in c.graphs[0].tasks}
    chosen = parameters(start, streamed, seen)
    x0 = np.array([max(p.get(start), LEAST) for p in chosen])

    def costs_of(x: np.ndarray) -> Costs:
        costs = start
        for p, value in zip(chosen, x, strict=True):
            costs = p.set(costs, float(value))
        return costs

    def residuals(x: np.ndarray, moved: Parameter | None = None, before: list[list[float]] | None = None) -> list[list[float]]:
        """Of every case; those that the one parameter that `moved` has nothing to do with are as `before`."""
        costs = costs_of(x)

        def of(i: int) -> list[float]:
            return given[i].residuals(costs) if before is None or moved is None or moved.concerns(given[i], costs) else before[i]

        with ThreadPoolExecutor(2) as pool:  # the core runs without Python's lock
            return list(pool.map(of, range(len(given))))

    def flat(parts: list[list[float]], x: np.ndarray) -> np.ndarray:
        return np.concatenate([np.array([r for part in parts for r in part]), PULL * np.log(x / x0)])

    x, damping = x0, 1e-2
    parts = residuals(x)
    r = flat(parts, x)
    say(f"{len(given)} measurements, {len(chosen)} parameters; start: {float(r @ r):.4f}")
    for number in range(rounds):
        columns = []
        for i in range(len(x)):
            moved = x.copy()
            moved[i] *= 1.1
            columns.append((flat(residuals(moved, chosen[i], parts), moved) - r) / np.log(1.1))
        jacobian = np.stack(columns, axis=1)
        for _ in range(4):
            change = np.linalg.solve(jacobian.T @ jacobian + damping * np.eye(len(x)), -jacobian.T @ r)
            tried = np.maximum(x * np.exp(np.clip(change, -1.0, 1.0)), LEAST)
            found = residuals(tried)
            new = flat(found, tried)
            if new @ new < r @ r:
                x, parts, r, damping = tried, found, new, damping / 4
                break
            damping *= 6
        say(f"round {number + 1}: {float(r @ r):.4f}")
    return costs_of(x)


def fit_file(measurements: Sequence[Measurement], target: str, hold_out: Sequence[str], rounds: int, say: Callable[[str], None]) -> Costs:
    """Fit the costs that `target` uses to the measurements whose model is not held out, and write their file."""
    name = str(hardware.description(target)["simulation"]["costs"])
    fitted = [m for m in measurements if m.model not in hold_out]
    found = fit(load_costs(name), cases(fitted), rounds, say)
    devices, commits = sorted({m.device for m in fitted}), sorted({m.commit for m in fitted})
    models = ", ".join(sorted({m.model for m in fitted}))
    source = f"fitted to {len(fitted)} decode steps on {' and '.join(devices)} ({models}; commit {', '.join(commits)})"
    found = replace(found, source=source, date=max((m.date for m in fitted), default=date.today().isoformat()))
    save_costs(found, COSTS / f"{name}.toml")
    load_costs.cache_clear()
    return found


def errors(measurements: Sequence[Measurement], target: str, hold_out: Sequence[str]) -> list[str]:
    """A line a measurement, predicted with the costs as they are, and the mean and largest error of those fitted and held out."""
    lines: list[str] = []
    by_group: dict[str, list[float]] = {"fitted": [], "held out": []}
    for case in cases(measurements):
        m = case.measured
        predicted = case.predict()[0]
        error = predicted / m.step_us - 1
        group = "held out" if m.model in hold_out else "fitted"
        by_group[group].append(abs(error))
        flight = f" flight {m.flight[0] // 1024}/{m.flight[1] // 1024} KB" if m.flight else ""
        lines.append(f"{m.model:14} batch {m.batch:2} context {m.context:5}{flight:20} measured {m.step_us:9.1f} us, predicted {predicted:9.1f}, "
                     f"{100 * error:+6.1f} %  {group}")
    for group, found in by_group.items():
        if found:
            lines.append(f"{group}: mean error {100 * float(np.mean(found)):.1f} %, largest {100 * max(found):.1f} %, of {len(found)}")
    return lines
