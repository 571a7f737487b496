"""The same model as one kernel per operator: what a mega-kernel is compared with.

A kernel boundary is a device-wide barrier: every tile of an operator waits for all tiles of the one before, nothing is fetched ahead of
it, activations go through device memory, and collectives are calls of a library that nothing overlaps. Tiles, their costs and the
machine are those of the mega-kernel's simulation. Models, from slow to fast: "eager" (the model's plain operators, each launched by
the host), "CUDA graph" (the same, recorded), "fused" (the operators after `passes/fuse`, recorded).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from mpk.graph.sm_task_graph import Buffer, Cost, Region, SMTaskGraph
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.models import registry
from mpk.passes.partition import ranges
from mpk.passes.split_attention import choose_splits
from mpk.simulate.machine import KindCost, Machine
from mpk.simulate.program import PS, build
from mpk.simulate.report import floor_us, overlap, traffic
from mpk.simulate.simulator import STEPS, Simulation, run_program
from mpk.simulate.work import Step, Work
from mpk.tasks.stages import TILE_ROWS

COLLECTIVE = "collective"  # kind of a library's all-reduce
COLLECTIVES = (COLLECTIVE, "all_reduce", "all_gather")
SPLIT_INPUT = ("o", "down")  # products whose matrices are split along their input when devices share them; a collective adds up
ELEMENTWISE_COLUMNS = 256  # of a tile of an operator without a matrix


def kernel_per_operator(graph: SMTaskGraph, machine: Machine, step: Step, launch: str, devices: int = 1) -> Simulation:
    """Simulate `graph` with a kernel per operator; `launch`: "eager" or "graph"."""
    barriers = with_barriers(graph)
    costs = machine.launch
    gap = costs.gap_us if launch == "eager" else costs.graph_us
    worker = replace(machine.worker, event_us=gap, poll_us=0.0, fence_us=0.0, fence_drains=0.0, step_us=0.0, queue_share=0.0)
    kinds = tuple(replace(k, prefetches=False) for k in machine.kinds if k.name not in COLLECTIVES)
    split = replace(machine, worker=worker, kinds=(*kinds, *(KindCost(name, end=costs.collective_us) for name in COLLECTIVES)))
    program = build(barriers, split, step, STEPS, pipelining=False, spilling=True)
    called = np.array([t.kind in COLLECTIVES for t in barriers.tasks])[program.ids]
    program.tasks["link_bytes"], program.tasks["source"] = 0, -1
    program.tasks["chunks"][called] = 0  # the library's call has it all in its time, and what it moves is not known
    program.work[program.ids[called], Work._fields.index("spilled")] = 0
    if launch == "eager":  # the host runs ahead within a step, and waits for the token at its end
        ops = np.array([t.op for t in barriers.tasks])[program.ids]
        program.tasks["earliest"] = ((np.searchsorted(np.unique(ops), ops) + 1) * costs.eager_us * PS).astype(np.int64)
    return run_program(barriers, split, step, program, devices)


def with_barriers(graph: SMTaskGraph) -> SMTaskGraph:
    """The same tasks on the same workers, each operator behind a barrier over the one before."""
    out = replace(graph, tasks=[replace(t, waits=(), signals=()) for t in graph.tasks], events=[], dependencies={}, notes=[])
    by_op: dict[int, list[int]] = {}
    for t in out.tasks:
        by_op.setdefault(t.op, []).append(t.id)
    out.add_event((out.tasks[-1].id,), sorted(q[0] for q in out.queues if q))
    stages = list(by_op.values())
    for before, after in pairwise(stages):
        out.add_event(before, after)
    return out


def compare(simulation: Simulation) -> list[dict[str, Any]]:
    """One row an execution model, the mega-kernel's last: latency, traffic, overlap. Milliseconds, bytes, shares of 1."""
    graph, machine, step = simulation.graph, simulation.machine, simulation.step
    plain = plain_graph(graph, machine, step, simulation.devices)
    models = {"eager": (plain, "eager"), "CUDA graph": (plain, "graph"), "fused, CUDA graph": (graph, "graph")}
    found = {name: kernel_per_operator(g, machine, step, launch, simulation.devices) for name, (g, launch) in models.items()}
    found["mega-kernel"] = simulation
    slowest = found["eager"].latency_us
    return [row(name, s, slowest, 1 if s is simulation else len({t.op for t in s.graph.tasks})) for name, s in found.items()]


def row(name: str, simulation: Simulation, reference_us: float, kernels: int) -> dict[str, Any]:
    """What a table says about one execution model."""
    moved, latency = traffic(simulation), simulation.latency_us
    return {"model": name, "kernels": kernels, "ms_per_token": round(latency / 1e3, 4), "speed_up": round(reference_us / latency, 3),
            "ratio": round(latency / floor_us(simulation), 3) if floor_us(simulation) else None,
            "memory_bytes": moved.total, "activation_share": round(moved.activations / max(1, moved.total), 6),
            "memory_utilisation": round(moved.total / (simulation.machine.bandwidth_gb_s * 1e3) / latency, 4),
            "communication_overlap": round(overlap(simulation), 4)}


# ---- the model's plain operators, as kernels
def plain_graph(graph: SMTaskGraph, machine: Machine, step: Step, devices: int) -> SMTaskGraph:
    """Every operator of the unfused model as tiles over all workers; tensors as one of `devices` holds them."""
    model = registry.build_graph(graph.tensor_graph.config)
    builder = _Plain(model, graph, machine, step, devices)
    for op in model.operators:
        builder.add(op)
    return builder.finish()


class _Plain:
    """Builds the graph of one device."""

    def __init__(self, model: TensorGraph, fused: SMTaskGraph, machine: Machine, step: Step, devices: int) -> None:
        self.model, self.machine, self.step, self.devices = model, machine, step, devices
        self.workers = fused.num_workers
        self.element = 2 if fused.dtype == "bf16" else 4
        self.tensors = TensorGraph(model.config, dict(model.values), dict(model.weights), [])
        self.out = SMTaskGraph(self.tensors, fused.target, self.workers, fused.max_rows, fused.dtype, queues=[[] for _ in range(self.workers)])

    def add(self, op: Operator) -> None:
        if op.kind == "linear":
            self._linear(op)
        elif op.kind == "attention":
            self._attention(op)
        else:
            columns = max((self._columns(n) for n in (*op.inputs, *op.outputs)), default=1)
            tiles = 1 if op.kind == "advance" else max(1, columns // ELEMENTWISE_COLUMNS)
            self._emit(op, op.kind, {}, tiles, lambda b, e: ((), ()), lambda b, e: Cost())
            if op.kind == "embedding" and self.devices > 1:  # every device holds a part of the vocabulary
                self._collective(op)

    def _collective(self, op: Operator) -> None:
        summed = replace(op, name=f"{op.name}.sum", inputs=op.outputs, weights={})
        self._emit(summed, COLLECTIVE, {}, 1, lambda b, e: ((), ()), lambda b, e: Cost())

    def _columns(self, value: str) -> int:
        """Of one device's part of a value: heads and the inside of the MLP are shared out, the residual stream is whole."""
        c, columns = self.model.config, self.model.values[value].columns
        whole = columns in (c.hidden_size, 1) and not self._shared(value)
        return columns if whole else max(1, columns // self.devices)

    def _shared(self, value: str) -> bool:
        producer = self.model.producer(value)
        name = producer.name.rsplit(".", 1)[-1] if producer is not None else ""
        return producer is not None and producer.layer >= 0 and name in ("q", "k", "v", "q_rope", "k_rope", "q_norm", "k_norm", "attn", "gate", "up", "act")

    def _linear(self, op: Operator) -> None:
        inside = op.name.rsplit(".", 1)[-1] in SPLIT_INPUT and op.layer >= 0
        rows, depth = self.model.weights[op.weights["weight"][0]].shape
        n, k = (rows, depth // self.devices) if inside else (-(-rows // self.devices), depth)
        self._emit(op, "linear", {"n": n, "k": k}, -(-n // TILE_ROWS), lambda b, e: ((), ()),
                   lambda b, e: Cost((e - b) * TILE_ROWS * k * self.element, 0, 2 * (e - b) * TILE_ROWS * k))
        if self.devices > 1 and (inside or op.layer < 0):
            self._collective(op)

    def _attention(self, op: Operator) -> None:
        c = self.model.config
        heads, kv_heads = max(1, c.num_heads // self.devices), max(1, c.num_kv_heads // self.devices)
        splits, cache = choose_splits(kv_heads, self.workers), f"{op.name}.kv"
        self.out.buffers[cache] = Buffer(cache, 2 * kv_heads * c.head_dim, "positions", "cache", self.element)
        attrs: dict[str, Scalar] = {**op.attrs, "heads": heads, "kv_heads": kv_heads, "splits": splits}

        def reads(begin: int, end: int) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
            return (Region(cache, 0, 2 * c.head_dim * (-(-end // splits) - begin // splits)),), ()  # as many heads as the tiles touch

        kind = "rotary_attention" if any(k.name == "rotary_attention" for k in self.machine.kinds) else "attention"
        self._emit(op, kind, attrs, kv_heads * splits, reads, lambda b, e: Cost(0, 1, 1))
        if splits > 1:
            self._emit(replace(op, name=f"{op.name}.combine", inputs=op.outputs), "attention_combine", {}, heads, lambda b, e: ((), ()), lambda b, e: Cost())

    def _emit(self, op: Operator, kind: str, attrs: dict[str, Scalar], tiles: int, regions: Any, cost: Any) -> None:
        index = len(self.tensors.operators)
        self.tensors.operators.append(replace(op, kind=kind, attrs=attrs))
        for value in (*op.inputs, *op.outputs):
            v = self.model.values[value]
            element = 4 if op.kind in ("sample", "advance") or v.rows == "logits" else self.element
            self.out.buffers.setdefault(value, Buffer(value, self._columns(value), v.rows, v.kind, element))
        for worker, (begin, end) in self._shares(tiles):
            read, written = regions(begin, end)
            task = self.out.add_task(kind, index, (begin, end), read, written, cost(begin, end), worker)
            self.out.queues[worker].append(task.id)

    def _shares(self, tiles: int) -> Iterator[tuple[int, tuple[int, int]]]:
        return enumerate(ranges(tiles, min(tiles, self.workers), 0))

    def finish(self) -> SMTaskGraph:
        return self.out
