"""Give every task a worker and a place in that worker's queue (static list scheduling).

Runs after `dependencies` and before `event_fusion`, because the order within a queue makes many dependencies hold without
an event. Tasks are taken in sequential order, so every queue is sorted by task id and no schedule can contain a cycle. Each
goes to the worker on which it would finish first; a worker that holds one of its producers wins a tie (no event between
them), then the one with the least work so far. Tasks that go with another operator's (`TaskKind.follows`) take its workers.
"""

from __future__ import annotations

import numpy as np

from mpk.graph.sm_task_graph import SMTaskGraph, Task
from mpk.passes.partition import leader_of
from mpk.targets.hardware import Target


def duration_us(task: Task, target: Target, workers: int) -> float:
    """Estimated time of a task at one row, all workers streaming: microseconds."""
    bandwidth = min(target.worker_bandwidth.value, target.bandwidth.value / workers)
    moved = (task.cost.weight_bytes + task.cost.activation_bytes) / (bandwidth * 1e3)
    return target.task_latency.value + max(moved, task.cost.flops / (target.worker_rate.value * 1e3))


PLACEMENTS = ("spread", "earliest", "fixed")


def run(graph: SMTaskGraph, target: Target, placement: str = "spread") -> SMTaskGraph:
    """Fill `Task.worker` and `graph.queues`.

    placement: "spread" gives every worker one task of an operator before any gets a second; "earliest" goes by estimated times alone;
    "fixed" gives the j-th task of every operator to worker j.
    """
    workers = graph.num_workers
    free = np.zeros(workers)
    load = np.zeros(workers)
    finish = np.zeros(len(graph.tasks))
    ready_of: dict[frozenset[int], float] = {}
    queues: list[list[int]] = [[] for _ in range(workers)]
    leaders: dict[int, int | None] = {}
    placed: dict[tuple[int, int], int] = {}  # (operator, first tile) -> worker
    previous_op, taken = -1, np.zeros(workers, dtype=np.int64)
    for task in graph.tasks:
        if task.op != previous_op:
            previous_op, taken = task.op, np.zeros(workers, dtype=np.int64)
        sets = graph.needs(task.id)
        for s in sets:
            if s not in ready_of:
                ready_of[s] = float(max(finish[list(s)])) + target.event_latency.value
        ready = max((ready_of[s] for s in sets), default=0.0)
        took = 0.0 if graph.operator(task).attrs.get("optional") else duration_us(task, target, workers)
        end = np.maximum(free, ready) + took
        for producer in _few(sets):
            end[graph.tasks[producer].worker] -= 1e-3 * target.event_latency.value
        if placement == "fixed":
            worker = int(taken.sum()) % workers
        else:  # Spread the tasks of an operator first: its estimated times are equal only on paper.
            keys = (end, taken) if placement == "spread" else (taken, end)
            # The last task, `advance`, goes to the worker that has been idle longest: it prepares while the others work.
            least = load if task is not graph.tasks[-1] else free
            worker = int(np.lexsort((np.arange(workers), least, *keys))[0])
        if task.op not in leaders:
            leaders[task.op] = leader_of(graph.tensor_graph, task.op)
        leader = leaders[task.op]
        if leader is not None:
            worker = placed[leader, task.tile_begin]
        placed[task.op, task.tile_begin] = worker
        task.worker = worker
        queues[worker].append(task.id)
        taken[worker] += 1
        if took > 0.0:  # what is optional has mostly nothing to do
            free[worker] = max(free[worker], ready) + took
        load[worker] += took
        finish[task.id] = free[worker]
    graph.queues = queues
    busy = load.sum() / max(1e-9, free.max() * workers)
    graph.notes.append(f"schedule: {free.max():.1f} us estimated for one row, workers busy {100 * busy:.0f} %")
    return graph


def _few(sets: list[frozenset[int]]) -> list[int]:
    """Producers of small sets only: a worker among very many producers is no reason to prefer it."""
    return [t for s in sets if len(s) <= 4 for t in s]
