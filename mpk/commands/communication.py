"""What messages between ranks cost in a trace: the time they add to a step, and the share that hides under the products that feed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from mpk.graph.peers import received, sent
from mpk.runtime.perfetto import RUN

if TYPE_CHECKING:
    from mpk.graph.sm_task_graph import SMTaskGraph


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


def exchanges(graph: SMTaskGraph, spans: Sequence[np.ndarray]) -> list[Exchange]:
    """All exchanges in the trace of one rank (Span arrays, one a worker) that it holds whole."""
    ends: dict[int, list[int]] = {}
    for worker in spans:
        for span in worker[worker["phase"] == RUN]:
            ends.setdefault(int(span["task"]), []).append(int(span["end_ns"]))
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


def report(graph: SMTaskGraph, ranks: Sequence[Sequence[np.ndarray]]) -> dict[str, Any]:
    """Exposed microseconds of a sum over ranks (median) and of all messages of a step, and the hidden share, over the traces of all ranks."""
    found = [exchanges(graph, spans) for spans in ranks]
    every = [e for rank in found for e in rank]
    sums = [e.exposed_us for e in every if graph_kind(graph, e.operator) == "all_reduce"]
    if not sums:
        return {"messages": 0}
    names = {e.operator for e in every}
    steps = len(every) / len(names) / len(ranks)
    exposed, under_way = sum(e.exposed_us for e in every), sum(e.under_way_us for e in every)
    return {"messages": len(names), "all_reduce_exposed_us": round(median(sums), 3), "exposed_us_per_step": round(exposed / steps / len(ranks), 2),
            "hidden_share": round(1 - exposed / under_way, 4)}


def graph_kind(graph: SMTaskGraph, operator: str) -> str:
    """Kind of an operator by its name."""
    return next(op.kind for op in graph.tensor_graph.operators if op.name == operator)
