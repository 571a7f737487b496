"""What a program that made no progress waited for, in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpk.graph.sm_task_graph import SMTaskGraph

Locate = Callable[[int], tuple[SMTaskGraph, int]]


def stall_text(graph: SMTaskGraph, stalls: Sequence[np.void], limit_s: float, locate: Locate | None = None) -> str:
    """One line for people; `stalls`: the Stall of every rank, zeros where a rank waited for nothing; `locate`: `Engine.locate`."""
    head = f"no progress for {limit_s:g} s: "
    if len(stalls) == 1:
        return head + _waiting(graph, stalls[0], locate)
    told = [f"rank {rank}: {_waiting(graph, s, locate)}" for rank, s in enumerate(stalls) if s["step"] > 0]
    silent = [str(rank) for rank, s in enumerate(stalls) if s["step"] <= 0]
    if silent:
        told.append(f"rank {', '.join(silent)}: no report, it hangs or has ended")
    return head + "; ".join(told)


def _waiting(graph: SMTaskGraph, s: np.void, locate: Locate | None) -> str:
    graph, number = locate(int(s["task"])) if locate is not None else (graph, int(s["task"]))
    task = graph.tasks[number]
    where = (f"worker {s['worker']} waits in step {s['step']} at task {task.id} ({graph.operator(task).name}, tiles {task.tile_begin} to "
             f"{task.tile_end}) for ")
    if s["peer"] > 0:
        return f"{where}rank {int(s['peer']) - 1}'s part of message {graph.operator(task).attrs['message']}, expected flag {s['expected']}, seen {s['seen']}"
    return f"{where}event {s['event']}, expected {s['expected']}, seen {s['seen']}"
