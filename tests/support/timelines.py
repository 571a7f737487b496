"""Made-up graphs of many workers and layers, and timelines of them: a list schedule whose times are plain arithmetic."""

from __future__ import annotations

import numpy as np

from mpk.graph.sm_task_graph import Cost, SMTaskGraph
from mpk.graph.tensor_graph import Operator, TensorGraph
from mpk.simulate.timeline import CONSUMER, LOADER, RUN, SPAN, WAIT_EVENT, WAIT_STEP, WAIT_WEIGHTS, Timeline
from tests.support.graphs import CONFIG

LAYER = (("qkv", "linear", 40_000), ("attention", "rotary_attention", 0), ("o", "linear", 30_000), ("gate_up", "linear", 220_000), ("down", "linear", 110_000))
HOP_NS = 900  # from the last signal to the waiting tasks


def layered_graph(workers: int, layers: int, target: str = "h200") -> SMTaskGraph:
    """Every operator has one task of two tiles on every worker and one event, which the tasks of the next operator wait for; `advance` closes."""
    operators = [Operator("embed", "embed", (), ("x",))]
    operators += [Operator(f"l{n}.{name}", kind, ("x",), ("x",), layer=n) for n in range(layers) for name, kind, _ in LAYER]
    operators.append(Operator("advance", "advance", ("x", "step"), ("step",)))
    graph = SMTaskGraph(TensorGraph(CONFIG, operators=operators), target, workers, 1)
    weights = {name: amount for name, _, amount in LAYER}
    for index, op in enumerate(operators):
        for worker in range(workers if op.kind != "advance" else 1):
            cost = Cost(weights.get(op.name.split(".")[-1], 0), 1000, 1000)
            graph.add_task(op.kind, index, (2 * worker, 2 * worker + 2), cost=cost, worker=worker)
    graph.queues = [[t.id for t in graph.tasks if t.worker == w] for w in range(workers)]
    advance = graph.tasks[-1].id
    graph.add_event([advance], [q[0] for q in graph.queues])
    for index in range(len(operators) - 1):
        producers = range(index * workers, (index + 1) * workers)
        graph.add_event(producers, range(producers.stop, min(producers.stop + workers, len(graph.tasks))))
    return graph


def list_schedule(graph: SMTaskGraph, steps: int = 1, seed: int = 0, loads: bool = True, slower: float = 1.0, source: str = "simulated") -> Timeline:
    """Operators one after the other: every task starts `HOP_NS` after the last task of the operator before, and takes some 30 ns a KB.

    `loads`: loaders fetch each task's weights from 2 us before it starts on, and every fourth task waits for them at first.
    """
    rng = np.random.default_rng(seed)
    workers = np.arange(graph.num_workers)
    clock = np.zeros(graph.num_workers, np.int64)
    parts: list[np.ndarray] = []

    def record(who: np.ndarray, role: int, phase: int, task: np.ndarray, begin: np.ndarray, end: np.ndarray, amount: int = 0) -> None:
        kept = end > begin
        out = np.zeros(int(kept.sum()), SPAN)
        for name, values in (("worker", who), ("role", role), ("phase", phase), ("task", task), ("begin_ns", begin), ("end_ns", end), ("bytes", amount)):
            out[name] = values[kept] if isinstance(values, np.ndarray) else values
        parts.append(out)

    for _ in range(steps):
        clock[:] = clock.max()
        for index, op in enumerate(graph.tensor_graph.operators):
            first = index * graph.num_workers
            who = workers if op.kind != "advance" else workers[:1]
            task = first + who
            amount = graph.tasks[first].cost.weight_bytes
            begin = np.full(len(who), int(clock.max()) + HOP_NS)
            end = begin + ((1500 + amount * 0.03) * slower * (1 + 0.2 * rng.random(len(who)))).astype(np.int64)
            record(who, CONSUMER, WAIT_STEP if index == 0 else WAIT_EVENT, task, clock[who], begin)
            starved = begin + (400 * (who % 4 == 0) if loads and amount else np.zeros(len(who), np.int64))
            record(who, CONSUMER, WAIT_WEIGHTS, task, begin, starved)
            record(who, CONSUMER, RUN, task, starved, end)
            if loads and amount:
                record(who, LOADER, RUN, task, begin - 2000, end - 1000, amount)
            clock[who] = end
    spans = np.concatenate(parts)
    spans = spans[np.lexsort((spans["begin_ns"], spans["role"], spans["worker"], spans["device"]))]
    return Timeline(graph, spans, source, graph.num_workers, 1, steps)
