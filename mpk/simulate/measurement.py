"""Measured decode steps as the simulator is fitted to them: the time of a step, and of each operator's tasks what they ran and waited."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpk.errors import RequestError
from mpk.simulate.timeline import CONSUMER, RUN, Timeline

QUANTILES = (0.1, 0.5, 0.9)


@dataclass(frozen=True)
class OperatorTimes:
    """Of one operator in all layers: tasks a step, mean microseconds of a task's run and of its wait, quantiles of the runs."""

    tasks: int
    run_us: float
    wait_us: float
    run_quantiles: tuple[float, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """One model, batch and context on a device. `step_us`: median of untraced steps; `operators`: from a traced run, may be empty.

    `max_batch`, `tp`: what the graph was lowered for; `options`: fields of the target that were different then. `flight`: bytes on their way of the run, where they
    are not the target's own.
    """

    model: str
    target: str
    batch: int
    context: int
    step_us: float
    operators: dict[str, OperatorTimes] = field(default_factory=dict)
    tp: int = 1
    max_batch: int = 16
    options: dict[str, Any] = field(default_factory=dict)
    flight: tuple[int, int] | None = None
    traced_us: float = 0.0
    device: str = ""
    commit: str = ""
    date: str = ""


def operator_times(timeline: Timeline) -> dict[str, OperatorTimes]:
    """Summary of the consumers' spans of whole steps, by operator without its layer."""
    from mpk.simulate.report import operator_name

    names = [operator_name(timeline.graph, t.id) for t in timeline.graph.tasks]
    order = list(dict.fromkeys(names))
    number = np.array([order.index(n) for n in names])
    rows = timeline.spans[timeline.spans["role"] == CONSUMER]
    took = (rows["end_ns"] - rows["begin_ns"]) / 1e3
    op, ran = number[rows["task"]], rows["phase"] == RUN
    out = {}
    for i, name in enumerate(order):
        runs = took[(op == i) & ran]
        if len(runs):
            quantiles = tuple(round(float(q), 3) for q in np.quantile(runs, QUANTILES))
            out[name] = OperatorTimes(round(len(runs) / timeline.steps), round(float(runs.mean()), 3),
                                      round(float(took[(op == i) & ~ran].sum() / len(runs)), 3), quantiles)
    return out


def save(measurements: list[Measurement], path: Path) -> None:
    """One JSON line a measurement."""
    path.write_text("".join(json.dumps(asdict(m)) + "\n" for m in measurements))


def load(path: Path) -> list[Measurement]:
    """Read what `save` wrote; raises `RequestError` for a file that is not of that form."""
    out = []
    try:
        for line in path.read_text().splitlines():
            data = json.loads(line)
            data["operators"] = {n: OperatorTimes(**{**o, "run_quantiles": tuple(o["run_quantiles"])}) for n, o in data["operators"].items()}
            data["flight"] = tuple(data["flight"]) if data["flight"] else None
            out.append(Measurement(**data))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RequestError(f"measurements {path}", expected="lines that `python -m benchmarks.calibrate record` writes", actual=str(error)) from error
    return out
