"""What a simulation says in numbers: latency against the floor, traffic, what workers wait for, and what the critical path consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.models.floor import floor_bytes
from mpk.models.registry import families
from mpk.simulate.program import LINK
from mpk.simulate.simulator import Simulation

CRITICAL = ("run", "input", "weights", "hand_off", "publish", "peer")  # what a step on the critical path is spent with
IDLE = ("event", "weights", "step", "peer", "end")  # causes of idle consumers


def operator_name(graph: SMTaskGraph, task: int) -> str:
    """Name of a task's operator without its layer."""
    op = graph.operator(task)
    return op.name.split(".", 1)[-1] if op.layer >= 0 else op.name


@dataclass(frozen=True)
class Traffic:
    """Bytes between device memory and one device in a step."""

    weights: int
    cache: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations


def traffic(simulation: Simulation) -> Traffic:
    """What one device moves; activations count where they do not stay in the L2."""
    program, graph = simulation.program, simulation.graph
    direct = program.column("direct")
    attention = np.array([any(graph.buffers[r.buffer].kind == "cache" for r in t.reads) for t in graph.tasks])
    weights = (program.column("stages") * program.column("stage_bytes")).sum() + direct[~attention].sum()
    return Traffic(int(weights), int(direct[attention].sum()), int(program.column("spilled").sum()))


def idle(simulation: Simulation) -> dict[str, float]:
    """Cause -> share of all consumers' time in the last step that they did not run for it."""
    records, program = simulation.records[-1], simulation.program
    begin, end = simulation.bounds[-2:]
    first = np.zeros(len(records), bool)
    queues = np.diff(program.begin) > 0
    first[program.begin[:-1][queues]] = True
    waited = np.minimum(records["ready"], end) - np.maximum(records["arrived"], begin) - records["peer"]
    whole = float(end - begin) * len(program.begin[:-1])
    last = records["published"][program.begin[1:][queues] - 1]
    lost = {"event": waited[~first].sum(), "weights": records["starved"].sum(), "step": np.maximum(waited[first], 0).sum(),
            "peer": records["peer"].sum(), "end": (end - last).sum() + (end - begin) * int((~queues).sum())}
    return {cause: float(v) / whole for cause, v in lost.items()}


def critical_path(simulation: Simulation) -> dict[str, dict[str, float]]:
    """Operator (without layer) -> microseconds of the last step's critical path it is there for, by `CRITICAL`; they sum to the latency.

    The path is followed backwards from the end of the step: a task began when its last event came, else when its predecessor in the
    queue had published; the time between a signal and its being seen is the waiting task's hand-off.
    """
    records, program, graph = simulation.records[-1], simulation.program, simulation.graph
    place = np.empty(len(program.ids), np.int64)
    place[program.ids] = np.arange(len(program.ids))
    queue_begin = set(program.begin[:-1].tolist())
    begin = int(simulation.bounds[-2])
    at = int(np.argmax(records["published"]))
    out: dict[str, dict[str, float]] = {}
    upto = int(records["published"][at])
    while True:
        r = records[at]
        row = out.setdefault(operator_name(graph, int(program.ids[at])), dict.fromkeys(CRITICAL, 0.0))
        pieces = {"publish": upto - r["ended"], "weights": r["starved"], "run": r["ended"] - r["begun"] - r["starved"], "input": r["begun"] - r["ready"]}
        for name, took in pieces.items():
            row[name] += int(took) / 1e6
        cause = int(r["cause"])
        if (at in queue_begin and cause < 0) or (cause >= 0 and records["ended"][cause] > r["ready"]):
            row["hand_off"] += (int(r["ready"]) - begin) / 1e6  # it waited for the step to begin
            return out
        at = cause if cause >= 0 else at - 1
        carried = cause >= 0 and int(r["via"]) != 0  # no release was waited for
        upto = int(records["ended" if carried else "published"][at])
        row["peer" if cause >= 0 and int(r["via"]) == LINK else "hand_off"] += (int(r["ready"]) - upto) / 1e6


def overlap(simulation: Simulation) -> float:
    """Of the time in which data are on the link, the share in which weights or keys and values arrive too; 0 without a link."""
    r = simulation.records[-1]
    link = _union(np.stack([r["ended"], r["sent"]], axis=1)[r["sent"] >= 0])
    loads = _union(np.stack([r["load_begun"], r["load_ended"]], axis=1)[r["load_begun"] >= 0])
    total = float((link[:, 1] - link[:, 0]).sum()) if len(link) else 0.0
    if not total:
        return 0.0
    both = 0
    for begin, end in link.tolist():
        first = np.searchsorted(loads[:, 1], begin)
        for a, b in loads[first:].tolist():
            if a >= end:
                break
            both += min(b, end) - max(a, begin)
    return both / total


def _union(spans: np.ndarray) -> np.ndarray:
    """int64 [n, 2]: the spans merged where they touch, sorted."""
    if not len(spans):
        return spans.reshape(0, 2)
    spans = spans[np.argsort(spans[:, 0])]
    ends = np.maximum.accumulate(spans[:, 1])
    new = np.concatenate([[True], spans[1:, 0] > ends[:-1]])
    return np.stack([spans[new, 0], ends[np.concatenate([new[1:], [True]])]], axis=1)


def floor_us(simulation: Simulation) -> float:
    """The bytes that a step cannot do without over the bandwidth of device memory: weights once, keys and values once, shared equally by the
    devices. Of a model, those of its sizes, without what packing adds; of other graphs, what their tasks read."""
    graph, step = simulation.graph, simulation.step
    config, moved = graph.tensor_graph.config, traffic(simulation)
    least = moved.weights + moved.cache
    if config.architecture in families():
        least = min(least, floor_bytes(config, graph.dtype, step.batch, step.context) // simulation.devices)
    return least / (simulation.machine.bandwidth_gb_s * 1e3)


def report(simulation: Simulation) -> dict[str, Any]:
    """Everything `mpk simulate` prints, JSON-ready. Microseconds, bytes, shares of 1."""
    moved, latency, floor = traffic(simulation), simulation.latency_us, floor_us(simulation)
    lost = idle(simulation)
    return {
        "target": simulation.machine.name, "batch": simulation.step.batch, "context": simulation.step.context, "devices": simulation.devices,
        "workers": simulation.graph.num_workers, "tasks": len(simulation.graph.tasks), "events_simulated": simulation.events,
        "latency_us": round(latency, 3), "ms_per_token": round(latency / 1e3, 4),
        "tokens_per_second": round(simulation.step.batch * 1e6 / latency, 4), "floor_us": round(floor, 3), "ratio": round(latency / floor, 3) if floor else None,
        "utilisation": round(1 - sum(lost.values()), 4), "memory_utilisation": round(moved.total / (simulation.machine.bandwidth_gb_s * 1e3) / latency, 4),
        "memory_bytes": {"total": moved.total, "weights": moved.weights, "cache": moved.cache, "activations": moved.activations},
        "activation_share": round(moved.activations / moved.total, 6) if moved.total else 0.0,
        "communication_overlap": round(overlap(simulation), 4), "idle": {k: round(v, 4) for k, v in lost.items()},
        "critical_path_us": {name: {k: round(v, 3) for k, v in row.items() if v} for name, row in critical_path(simulation).items()},
        "costs": simulation.machine.costs}


def sums(path: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Over operators: microseconds of the critical path by `CRITICAL`."""
    return {name: sum(row.get(name, 0.0) for row in path.values()) for name in CRITICAL}
