"""What messages between ranks cost in a trace: the time they add to a step, and the share that hides under the products that feed them."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from mpk.graph.peers import received, sent
from mpk.simulate.timeline import CONSUMER, RUN

if TYPE_CHECKING:
    from mpk.graph.sm_task_graph import SMTaskGraph
    from mpk.simulate.timeline import Timeline


@dataclass(frozen=True)
class Exchange:
    """One message of one step on one rank, in ns of the rank's clock."""

    operator: str
    first_sent: int  # end of the first task that sends: parts are under way
    last_sent: int  # end of the last one: what follows is not hidden by the product
    received: int  # end of the last task that waits for parts

    @property
    def exposed_us(self) -> float:
        return max(self.received - self.last_sent, 0) / 1e3

    @property
    def under_way_us(self) -> float:
        return max(self.received - self.first_sent, 1) / 1e3


def exchanges(graph: SMTaskGraph, spans: np.ndarray) -> list[Exchange]:
    """All exchanges in the spans of one rank that these hold whole."""
    ends: dict[int, list[int]] = {}
    runs = spans[(spans["phase"] == RUN) & (spans["role"] == CONSUMER)]
    for task, end in zip(runs["task"].tolist(), runs["end_ns"].tolist(), strict=True):
        ends.setdefault(task, []).append(end)
    found = []
    for receiver in sorted({t.op for t in graph.tasks if received(graph, t)}):
        tasks = [t.id for t in graph.tasks if t.op == receiver]
        buffers = {r.buffer for t in tasks for r in received(graph, graph.tasks[t])}
        sender = max(t.op for t in graph.tasks if t.op < receiver and any(r.buffer in buffers for r in sent(graph, t)))
        senders = [t.id for t in graph.tasks if t.op == sender]
        steps = min(len(ends.get(t, ())) for t in (*tasks, *senders))
        for step in range(steps):
            own = [ends[t][len(ends[t]) - steps + step] for t in senders]
            found.append(Exchange(graph.operator(tasks[0]).name, min(own), max(own), max(ends[t][len(ends[t]) - steps + step] for t in tasks)))
    return found


def report(timeline: Timeline) -> dict[str, Any]:
    """Exposed microseconds of a sum over ranks (median) and of all messages of a step, and the hidden share, over all ranks."""
    graph = timeline.graph
    found = [exchanges(graph, timeline.spans[timeline.spans["device"] == rank]) for rank in range(timeline.devices)]
    every = [e for rank in found for e in rank]
    kinds = {op.name: op.kind for op in graph.tensor_graph.operators}
    sums = [e.exposed_us for e in every if kinds[e.operator] == "all_reduce"]
    if not sums:
        return {"messages": 0}
    names = {e.operator for e in every}
    steps = len(every) / len(names) / timeline.devices
    exposed, under_way = sum(e.exposed_us for e in every), sum(e.under_way_us for e in every)
    return {"messages": len(names), "all_reduce_exposed_us": round(median(sums), 3), "exposed_us_per_step": round(exposed / steps / timeline.devices, 2),
            "hidden_share": round(1 - exposed / under_way, 4)}
