"""A `Timeline` from the trace of a real run (`Instance.spans()`), with waits split by cause as far as a trace knows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpk.errors import InternalError
from mpk.graph.order import STEP_EVENT
from mpk.simulate.timeline import CONSUMER, RUN, SPAN, WAIT_EVENT, WAIT_PEER, WAIT_STEP, Timeline

if TYPE_CHECKING:
    from mpk.graph.sm_task_graph import SMTaskGraph


NEVER = np.iinfo(np.int64).max


def measured(graph: SMTaskGraph, spans: Sequence[np.ndarray], first: int = 0, steps: int | None = None, devices: int = 1) -> Timeline:
    """The steps [first, first + steps) of a traced run as a timeline; `steps` None: all that follow.

    `spans`: one array a worker, the workers of device 0 first, with fields `task`, `phase` (0 run, else wait), `begin_ns`, `end_ns` (one
    clock a device: each device's chosen steps begin at 0). A step lasts from the end of one `advance` to the end of the next, the first one
    from the first span; spans that reach beyond the chosen steps are cut there. A worker's wait before the first task of its queue, which the
    program records apart from the task's own waits, is a wait for the step; other waits are for a peer where the task reads what devices
    send one another, else for events. What a task waits while it runs, for weights or (on threads) for a peer, is not in a trace. Raises `InternalError` where the trace does not hold these
    steps (its buffer was too small).
    """
    workers = graph.num_workers
    if len(spans) != workers * devices:
        raise InternalError(f"a trace of {len(spans)} workers, expected {workers} on each of {devices} devices")
    receives = np.array([any(graph.buffers[r.buffer].kind == "peer" for r in t.reads) for t in graph.tasks])
    parts: list[np.ndarray] = []
    for device in range(devices):
        own = spans[device * workers : (device + 1) * workers]
        begin, end, count = _window(graph, own, first, steps)
        parts += [_worker(graph, w, device, worker, begin, end, receives) for worker, w in enumerate(own)]
    return Timeline(graph, np.concatenate(parts), "measured", workers, devices, count)


def _window(graph: SMTaskGraph, spans: Sequence[np.ndarray], first: int, steps: int | None) -> tuple[int, int, int]:
    """When the chosen steps begin and end on one device's clock, and how many they are."""
    closing = np.array([t.kind == "advance" for t in graph.tasks])
    ends = np.sort(np.concatenate([w["end_ns"][closing[w["task"]] & (w["phase"] == RUN)] for w in spans]))
    started = min((int(w["begin_ns"][~closing[w["task"]] & (w["phase"] == RUN)].min(initial=NEVER)) for w in spans), default=NEVER)
    planned, ends = ends[ends <= started], ends[ends > started]  # GPUs begin with an `advance` that closes nothing, and only plans the first step
    wanted = len(ends) - first if steps is None else steps
    if wanted < 1 or len(ends) < first + wanted:
        raise InternalError(f"the trace holds {len(ends)} steps, expected {first + max(wanted, 1)}")
    begin = int(ends[first - 1]) if first else int(planned[-1]) if len(planned) else min(int(w["begin_ns"].min()) for w in spans if len(w))
    return begin, int(ends[first + wanted - 1]), wanted


def _worker(graph: SMTaskGraph, spans: np.ndarray, device: int, worker: int, begin: int, end: int, receives: np.ndarray) -> np.ndarray:
    kept = spans[(spans["end_ns"] > begin) & (spans["begin_ns"] < end)]
    out = np.zeros(len(kept), SPAN)
    out["device"], out["worker"], out["role"], out["task"] = device, worker, CONSUMER, kept["task"]
    out["begin_ns"] = np.maximum(kept["begin_ns"], begin) - begin
    out["end_ns"] = np.minimum(kept["end_ns"], end) - begin
    waits = kept["phase"] != RUN
    out["phase"] = np.where(waits, np.where(receives[kept["task"]], WAIT_PEER, WAIT_EVENT), RUN)
    queue = graph.queues[worker]
    if queue:
        # the program records the wait for the step under the queue's first task; where that task waits for events too, a second wait follows
        mine = waits & (kept["task"] == queue[0])
        only_step = set(graph.tasks[queue[0]].waits) <= {STEP_EVENT}
        first = np.ones(len(kept), bool) if only_step else ~np.append([False], mine[:-1])
        out["phase"][mine & first] = WAIT_STEP
    return out[np.argsort(out["begin_ns"], kind="stable")]
