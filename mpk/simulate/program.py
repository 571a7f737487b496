"""The graph as the simulator's core takes it: one record a task with its times, in the order of the queues, and the machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mpk.errors import GraphError, RequestError
from mpk.graph.order import STEP_EVENT
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.simulate.machine import KindCost, Machine
from mpk.simulate.work import CHUNK_BYTES, Step, Work, activation_bytes, table
from mpk.tasks.base import load_kinds

PREFETCHES, OPENS = 1, 2  # Flags of core.hpp
CARRIED, LINK = 1, 2  # Via of core.hpp
PEER = "peer"  # kind of the buffers through which devices send to each other
PS = 1_000_000  # picoseconds of a microsecond
MAX_PIECES = 300_000_000  # that are simulated at once: minutes
MAX_SECONDS = 100_000  # of one worker in one step

# The structures of core.hpp.
TASK = np.dtype([*((n, np.int64) for n in ("earliest", "before", "start", "stage", "group", "end", "chunk", "link_bytes")),
                 *((n, np.int32) for n in ("stages", "stage_bytes", "group_stages", "chunks", "chunk_bytes", "flags", "wait_begin", "wait_count",
                                           "signal_begin", "signal_count", "source", "unused"))])
MACHINE = np.dtype([*((n, np.float64) for n in ("memory_ps_per_byte", "port_ps_per_byte", "load_ps_per_byte", "link_ps_per_byte", "queue_share", "fence_drains", "spread")),
                    *((n, np.int64) for n in ("memory_latency", "issue", "event", "flag", "poll", "fence", "step", "link_latency", "l2_latency", "prefetch_pace")),
                    *((n, np.int32) for n in ("workers", "events", "waits", "tasks", "steps", "step_event", "ring_stages", "flight", "idle_flight",
                                              "window", "pipelining", "prefetch"))])
RECORD = np.dtype([*((n, np.int64) for n in ("arrived", "ready", "begun", "ended", "published", "starved", "peer", "load_begun", "load_ended", "sent")),
                   ("cause", np.int32), ("via", np.int32)])


@dataclass(frozen=True)
class Program:
    """`tasks`: TASK in queue order, `ids`: their task ids; `begin`: int32 [workers + 1]; `via`: how each
    event is seen (`Via` of core.hpp); `work`: by task id, columns as `Work`."""

    machine: np.ndarray
    tasks: np.ndarray
    ids: np.ndarray
    begin: np.ndarray
    waits: np.ndarray
    signals: np.ndarray
    thresholds: np.ndarray
    via: np.ndarray
    shares: np.ndarray
    work: np.ndarray

    def column(self, name: str) -> np.ndarray:
        """int64 [tasks], one field of `Work` by task id; "memory_bytes": all bytes from device memory."""
        if name == "memory_bytes":
            return self.column("stages") * self.column("stage_bytes") + self.column("direct") + self.column("spilled")
        return self.work[:, Work._fields.index(name)]


def build(graph: SMTaskGraph, machine: Machine, step: Step, steps: int, pipelining: bool = True, spilling: bool | None = None) -> Program:
    """`spilling`: activations go through device memory (default: if what one operator reads and writes does not fit the machine's L2).

    Raises `GraphError` for a graph that was not scheduled."""
    ids = np.array([t for q in graph.queues for t in q], np.int32)
    if len(ids) != len(graph.tasks) or not graph.tasks:
        raise GraphError("a graph without queues", expected="every task in one queue", remedy="lower it with Compiler.lower_model")
    if spilling is None:
        spilling = max(activation_bytes(graph, op, step.batch) for op in graph.tensor_graph.operators) > machine.l2_mb * 1e6
    work = table(graph, machine.target, step, spilling)
    _require_end(work, machine, steps)
    tasks = np.zeros(len(ids), TASK)
    _times(tasks, graph, machine, ids, work)
    waits = [e for t in ids for e in graph.tasks[t].waits]
    signals = [e for t in ids for e in graph.tasks[t].signals]
    for name, values in (("wait", [len(graph.tasks[t].waits) for t in ids]), ("signal", [len(graph.tasks[t].signals) for t in ids])):
        tasks[f"{name}_count"] = values
        tasks[f"{name}_begin"] = np.cumsum([0, *values[:-1]])
    tasks["source"] = _sources(graph)
    begin = np.cumsum([0, *(len(q) for q in graph.queues)]).astype(np.int32)
    return Program(_machine(graph, machine, len(waits), steps, pipelining, work), tasks, ids, begin, np.array(waits, np.int32), np.array(signals, np.int32),
                   np.array([e.threshold for e in graph.events], np.int32), _via(graph), machine.shares(graph.num_workers), work)


def _require_end(work: np.ndarray, machine: Machine, steps: int) -> None:
    """Raise `RequestError` for work whose simulation would take longer than anybody waits, or whose times would not fit 64 bits."""
    fields = dict(zip(Work._fields, work.astype(np.float64).T, strict=True))
    loaded = fields["direct"] + fields["spilled"]
    moved = float((fields["stages"] * fields["stage_bytes"] + loaded).sum())
    pieces = float((fields["stages"] + np.ceil(loaded / CHUNK_BYTES)).sum()) * steps
    alone_s = float(fields["flops"].sum()) / (machine.target.worker_rate.value * 1e9) + moved / (machine.worker.port_gb_s * 1e9)
    if pieces > MAX_PIECES:
        raise RequestError(f"{steps} steps of {moved / 1e12:.3g} TB", expected=f"at most {MAX_PIECES * CHUNK_BYTES / 1e12:.3g} TB in all, in pieces of {CHUNK_BYTES >> 10} KB")
    if alone_s > MAX_SECONDS:
        raise RequestError(f"a step that takes one worker {alone_s:.3g} s", expected=f"at most {MAX_SECONDS} s")


def rebuild(program: Program, graph: SMTaskGraph, machine: Machine, steps: int, pipelining: bool = True) -> Program:
    """The same program with the costs of another machine of the same target; work and order are not looked at again."""
    tasks = program.tasks.copy()
    _times(tasks, graph, machine, program.ids, program.work)
    for name in ("wait_begin", "wait_count", "signal_begin", "signal_count", "source"):
        tasks[name] = program.tasks[name]
    return replace(program, tasks=tasks, machine=_machine(graph, machine, len(program.waits), steps, pipelining, program.work), shares=machine.shares(graph.num_workers))


def _via(graph: SMTaskGraph) -> np.ndarray:
    """int32 [events]: counter, data that is its own flag, or such data from other devices."""
    sending = {t.id for t in graph.tasks if any(graph.buffers[r.buffer].kind == PEER for r in t.writes)}
    return np.array([0 if not e.carried else LINK if not sending.isdisjoint(e.producers) else CARRIED for e in graph.events], np.int32)


def _sources(graph: SMTaskGraph) -> np.ndarray:
    """int32 [tasks], in queue order: place of the task of the same queue whose message a task receives without waiting for an event; -1: none."""
    out, place = [], 0
    for queue in graph.queues:
        sent: dict[str, list[tuple[int, int, int]]] = {}
        for t in queue:
            task = graph.tasks[t]
            found = [p for r in task.reads for begin, end, p in sent.get(r.buffer, ()) if begin < r.end and r.begin < end]
            out.append(max(found, default=-1))
            for r in task.writes:
                if graph.buffers[r.buffer].kind == PEER:
                    sent.setdefault(r.buffer, []).append((r.begin, r.end, place))
            place += 1
    return np.array(out, np.int32)


def _times(tasks: np.ndarray, graph: SMTaskGraph, machine: Machine, ids: np.ndarray, work: np.ndarray) -> None:
    """Fill everything but waits and signals: equal work of one kind takes equal time."""
    names = sorted({t.kind for t in graph.tasks})
    number = {name: i for i, name in enumerate(names)}
    kinds = np.array([number[graph.tasks[t].kind] for t in ids], np.int64)
    rows, inverse = np.unique(np.column_stack([kinds, work[ids]]), axis=0, return_inverse=True)
    streams = {name for name, kind in load_kinds().items() if kind.cuda_form == "stages"} if machine.target.kernel else set()
    known = []
    for kind, *values in rows.tolist():
        w = Work(*values)
        known.append(_one(machine.cost(names[kind], w.rows), w, names[kind] in streams, machine.target.worker_rate.value))
    tasks[:] = np.array(known, TASK)[inverse.reshape(-1)]


def _one(cost: KindCost, w: Work, streams: bool, gflop_s: float) -> tuple[int, ...]:
    """A task's record but for its waits and signals. What computing takes at the machine's rate is a lower bound of what a stage takes."""
    loaded = w.direct + w.spilled
    chunks = -(-loaded // CHUNK_BYTES)
    chunk_bytes = -(-loaded // chunks) if chunks else 0
    computing = w.flops / (gflop_s * 1e3)
    stage = cost.stage + cost.stage_kb * w.stage_bytes / 1024 + cost.stage_row * (w.rows - 1)
    if w.stages:
        stage += cost.level * w.levels / w.stages
    before = cost.before + cost.before_row * (w.rows - 1)
    chunk = cost.load_kb * chunk_bytes / 1024
    end = cost.end + cost.end_row * (w.rows - 1) + cost.end_kb * w.written / 1024 + cost.append * w.appends
    if w.stages:
        stage = max(stage, computing / w.stages)
    elif chunks:
        chunk = max(chunk, computing / chunks)
    else:
        end += computing
    start = cost.start + cost.start_kb * w.read / 1024
    flags = (PREFETCHES if cost.prefetches else 0) | (OPENS if w.stages and (w.tiles > 1 or not streams) else 0)  # as linear/cuda.cuh does
    times = (round(t * PS) for t in (before, start, stage, cost.group, end, chunk))
    return (0, *times, w.link, w.stages, w.stage_bytes, w.group, chunks, chunk_bytes, flags, 0, 0, 0, 0, -1, 0)


def _machine(graph: SMTaskGraph, machine: Machine, waits: int, steps: int, pipelining: bool, work: np.ndarray) -> np.ndarray:
    worker, plan = machine.worker, machine.target.kernel
    ahead = plan is not None and pipelining and int(work[:, Work._fields.index("rows")].max()) == 1  # as ring.cuh does, with one row only
    if plan is not None and graph.flight is not None:
        plan = replace(plan, flight_bytes=graph.flight[0], flight_idle_bytes=graph.flight[1])
    m = np.zeros(1, MACHINE)
    values: dict[str, float] = {
        "memory_ps_per_byte": 1e3 / (machine.bandwidth_gb_s * worker.memory_share), "port_ps_per_byte": 1e3 / worker.port_gb_s,
        "load_ps_per_byte": 1e3 / (worker.load_gb_s or worker.port_gb_s),
        "link_ps_per_byte": 1e3 / machine.link.bandwidth_gb_s if machine.link.bandwidth_gb_s else 0.0, "queue_share": worker.queue_share, "spread": worker.spread,
        "memory_latency": worker.latency_us * PS, "issue": worker.issue_us * PS, "event": worker.event_us * PS, "flag": worker.flag_us * PS, "poll": worker.poll_us * PS,
        "fence": worker.fence_us * PS, "step": worker.step_us * PS, "link_latency": machine.link.latency_us * PS,
        "workers": graph.num_workers, "events": len(graph.events), "waits": waits, "tasks": len(graph.tasks), "steps": steps,
        "step_event": STEP_EVENT if graph.tasks[-1].kind == "advance" and graph.events else -1,
        "ring_stages": plan.stages if plan else 1, "flight": plan.flight_bytes if plan else 1, "idle_flight": plan.flight_idle_bytes if plan else 1,
        "l2_latency": worker.l2_us * PS, "prefetch_pace": (plan.prefetch_ns if plan else 0) * PS / 1e3, "prefetch": plan.prefetch_bytes if plan and ahead else 0,
        "window": worker.window_kb * 1024, "pipelining": pipelining, "fence_drains": worker.fence_drains}
    for name, value in values.items():
        m[name] = round(value) if np.issubdtype(MACHINE[name], np.integer) else value
    return m
