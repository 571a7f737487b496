"""Traces in the trace event format that Perfetto and chrome://tracing read: one track a worker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpk.graph.sm_task_graph import SMTaskGraph

RUN, WAIT = 0, 1


def write_trace(graph: SMTaskGraph, ranks: Sequence[Sequence[np.ndarray]], path: Path) -> None:
    """Write the spans of all workers (see `Instance.spans`) of every rank; times start at the rank's first span and are in microseconds."""
    events: list[dict[str, object]] = []
    for rank, spans in enumerate(ranks):
        name = f"mpk {graph.target}" + (f" rank {rank}" if len(ranks) > 1 else "")
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}})
        events += _rank_events(graph, rank, spans)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


def _rank_events(graph: SMTaskGraph, rank: int, spans: Sequence[np.ndarray]) -> list[dict[str, object]]:
    start = min((int(worker["begin_ns"].min()) for worker in spans if len(worker)), default=0)
    events: list[dict[str, object]] = []
    for index, worker in enumerate(spans):
        events.append({"ph": "M", "pid": rank, "tid": index, "name": "thread_name", "args": {"name": f"worker {index}"}})
        for span in worker:
            task = graph.tasks[int(span["task"])]
            op = graph.operator(task)
            waiting = int(span["phase"]) == WAIT
            events.append({
                "ph": "X", "pid": rank, "tid": index, "cat": "wait" if waiting else task.kind, "name": f"wait {op.name}" if waiting else op.name,
                "ts": (int(span["begin_ns"]) - start) / 1e3, "dur": int(span["end_ns"] - span["begin_ns"]) / 1e3,
                "args": {"task": task.id, "tiles": f"{task.tile_begin}-{task.tile_end}", "layer": op.layer,
                         "weight_bytes": task.cost.weight_bytes}})
    return events
