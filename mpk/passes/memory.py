"""Place activations in one arena, sharing bytes between buffers whose lives provably do not meet, and lay out the weights.

Runs after `event_fusion`, since only then is it known what happens before what. Two buffers may share bytes if every task
that touches the first happens before every task that touches the second; nothing is assumed about timing. First fit in order
of first use (Pisarchyk and Lee, arXiv 2001.03288, call this greedy by order). State and key-value caches have memory of
their own. Flagged buffers share bytes with nothing, since a word of theirs must stay empty until it is written, and have a part of
the arena to themselves, twice. Packed matrices stand in program order, which is the order in which they are streamed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpk.errors import TargetError
from mpk.graph.order import Order
from mpk.graph.sm_task_graph import Allocation, Buffer, SMTaskGraph
from mpk.tasks.base import WeightSource, kind_of
from mpk.tasks.matrices import matrix_bytes, matrix_key

ALIGNMENT = 64  # bytes: a cache line, and more than any vector access needs


def run(graph: SMTaskGraph) -> SMTaskGraph:
    """Fill `arena`, `arena_bytes`, `flagged_begin`, `flagged_bytes`, `peers`, `peer_bytes`, `weight_offsets`, `weight_bytes`; checks scratch memory."""
    _place_activations(graph)
    _place_peers(graph)
    _lay_out_weights(graph)
    _check_scratch(graph)
    return graph


def align(value: int) -> int:
    return -(-value // ALIGNMENT) * ALIGNMENT


def buffer_bytes(graph: SMTaskGraph, buffer: Buffer) -> int:
    """Size of an activation: one row for `step` rows, else as many as a step can hold."""
    rows = 1 if buffer.rows == "step" else graph.max_rows
    return align(rows * buffer.row_bytes)


@dataclass
class _Life:
    """When a buffer is touched: the last places in each queue, and what surely happened before its first touch."""

    name: str
    size: int
    last: np.ndarray
    before: np.ndarray
    offset: int = -1


def _place_activations(graph: SMTaskGraph) -> None:
    order = Order(graph, carried=False)
    touching: dict[str, list[int]] = {}
    for task in graph.tasks:
        for region in (*task.reads, *task.writes):
            touching.setdefault(region.buffer, []).append(task.id)
    placed: list[_Life] = []
    # What ephemeral operators write may still be written when the next step has begun.
    alone = {name for op in graph.tensor_graph.operators if op.attrs.get("ephemeral") for name in op.outputs}
    total = 0
    for name, tasks in touching.items():  # in order of first use
        buffer = graph.buffers[name]
        if buffer.kind != "activation" or buffer.flagged:
            continue
        ids = np.unique(np.array(tasks))
        life = _Life(name, buffer_bytes(graph, buffer), order.frontier(tasks), order.clock[ids].min(axis=0))
        blocked = sorted((p.offset, p.offset + p.size) for p in placed if name in alone or p.name in alone or not (life.before >= p.last).all())
        life.offset = _first_gap(blocked, life.size)
        placed.append(life)
        total += life.size
    graph.arena = {p.name: Allocation(p.offset, p.size) for p in placed}
    begin = end = max((p.offset + p.size for p in placed), default=0)
    flagged = [b for b in (graph.buffers[name] for name in touching) if b.flagged]
    for buffer in flagged:
        graph.arena[buffer.name] = Allocation(end, buffer_bytes(graph, buffer))
        end += graph.arena[buffer.name].size
    graph.flagged_begin, graph.flagged_bytes = begin, end - begin
    graph.arena_bytes = end + graph.flagged_bytes
    graph.notes.append(f"memory: {len(placed)} activations of {total} bytes in {begin}, {len(flagged)} flagged ones of twice {end - begin} bytes")


def _place_peers(graph: SMTaskGraph) -> None:
    """Side by side: other ranks write there at times that only `mpk.graph.peers` reasons about."""
    graph.peers, graph.peer_bytes = {}, 0
    for buffer in graph.buffers.values():
        if buffer.kind == "peer":
            graph.peers[buffer.name] = Allocation(graph.peer_bytes, buffer_bytes(graph, buffer))
            graph.peer_bytes += buffer_bytes(graph, buffer)


def _first_gap(blocked: list[tuple[int, int]], size: int) -> int:
    offset = 0
    for begin, end in blocked:
        if offset + size <= begin:
            break
        offset = max(offset, end)
    return offset


def _lay_out_weights(graph: SMTaskGraph) -> None:
    offset = 0
    graph.weight_offsets = {}
    for op in graph.tensor_graph.operators:
        kind = kind_of(op)
        size, key = matrix_bytes(kind, op, graph), matrix_key(kind, op, graph)
        if size and key not in graph.weight_offsets:
            graph.weight_offsets[key] = offset
            offset += align(size)
    graph.weight_bytes = offset


def lay_out_params(graph: SMTaskGraph, source: WeightSource) -> np.ndarray:
    """Fill `param_offsets` and return all small parameters as one float32 vector (every operator's part aligned)."""
    parts: list[np.ndarray] = []
    offset = 0
    graph.param_offsets = {}
    for op in graph.tensor_graph.operators:
        values = kind_of(op).params(op, graph.tensor_graph, source)
        if not values.size:
            continue
        graph.param_offsets[op.name] = offset
        padded = np.zeros(align(values.nbytes) // 4, np.float32)
        padded[: values.size] = values
        parts.append(padded)
        offset += padded.nbytes
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _check_scratch(graph: SMTaskGraph) -> None:
    limit = graph.limits.scratch_bytes if graph.limits else 1 << 60
    for op in graph.tensor_graph.operators:
        needed = kind_of(op).scratch_bytes(op, graph.tensor_graph, graph.max_rows)
        if needed > limit:
            raise TargetError(f"operator {op.name} on target {graph.target}: scratch memory of a worker", expected=f"at most {limit} bytes",
                              actual=f"{needed}", remedy="lower with fewer rows a step (max_rows)")


def scratch_bytes(graph: SMTaskGraph) -> int:
    """Private memory a worker needs: the most that any operator asks for."""
    tensors = graph.tensor_graph
    return max((kind_of(op).scratch_bytes(op, tensors, graph.max_rows) for op in tensors.operators), default=0)
