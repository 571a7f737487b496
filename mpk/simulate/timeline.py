"""`Timeline`: what every worker did when, measured or simulated; the one form that pictures and comparisons read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpk.graph.sm_task_graph import SMTaskGraph

# What a worker's role does: consumers execute tasks, the loader streams weights, the link sends to other devices.
CONSUMER, LOADER, LINK = 0, 1, 2
ROLES = ("consumer", "loader", "link")

# Why a span is there. RUN: a task executes (LOADER, LINK: bytes move). The others are idle time of a consumer, by cause.
RUN, WAIT_EVENT, WAIT_WEIGHTS, WAIT_STEP, WAIT_PEER = 0, 1, 2, 3, 4
PHASES = ("run", "wait for an event", "wait for weights", "wait for the step", "wait for a peer")

SPAN = np.dtype([("device", np.int32), ("worker", np.int32), ("role", np.int8), ("phase", np.int8), ("task", np.int32),
                 ("begin_ns", np.int64), ("end_ns", np.int64), ("bytes", np.int64)])


@dataclass(frozen=True)
class Timeline:
    """Spans of one or several steps on all devices.

    `spans`: array of `SPAN`, sorted by (device, worker, role, begin_ns); nanoseconds from the beginning of the first step; `task` is a
    task id of `graph` (-1: none); `bytes` moved during the span (0 where it is not known, as in measured consumer spans).
    `source`: "simulated" or "measured". `steps`: how many steps the spans cover.
    """

    graph: SMTaskGraph
    spans: np.ndarray
    source: str
    workers: int
    devices: int = 1
    steps: int = 1

    @property
    def duration_ns(self) -> int:
        """Time from the beginning of the first step to the end of the last span."""
        return int(self.spans["end_ns"].max(initial=0))
