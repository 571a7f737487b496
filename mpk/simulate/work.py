"""What every task of a graph moves and computes in one decode step of a batch at a context, taken from its regions and its kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mpk.graph.sm_task_graph import Buffer, Region, SMTaskGraph, Task
from mpk.graph.tensor_graph import Operator
from mpk.targets.hardware import Target
from mpk.tasks.base import TaskKind, load_kinds
from mpk.tasks.stages import groups, stages_of

CHUNK_BYTES = 16384  # of what a consumer loads itself; finer pieces change nothing but the simulator's own time


@dataclass(frozen=True)
class Step:
    """The step that is simulated: `batch` sequences decode one row each, behind `context` tokens each."""

    batch: int = 1
    context: int = 512


class Work(NamedTuple):
    """Of one task. Bytes; `stages` of `stage_bytes` are weights that go through the ring, used up in groups of `group`; `direct` is what
    the consumer loads from device memory itself; `read` and `written` are activations, `spilled` those of them that go through device
    memory; `link` goes to other devices; `appends`: 1 for a task that writes to the key-value cache;
    `levels`: how often a part of a normed input is brought in, once a stage of every group of tiles."""

    rows: int
    tiles: int
    stages: int
    stage_bytes: int
    group: int
    direct: int
    read: int
    written: int
    spilled: int
    flops: int
    link: int
    appends: int
    levels: int

    @property
    def memory(self) -> int:
        """Bytes from device memory."""
        return self.stages * self.stage_bytes + self.direct + self.spilled


class WorkModel:
    """Works out tasks; equal tiles of equal operators are worked out once."""

    def __init__(self, graph: SMTaskGraph, target: Target, step: Step) -> None:
        self.graph, self.target, self.step = graph, target, step
        self.kinds = load_kinds()
        self.known: dict[tuple[object, ...], Work] = {}
        self.classes: dict[tuple[object, ...], int] = {}
        self.op_class = [self._class(op) for op in graph.tensor_graph.operators]

    def _class(self, op: Operator) -> int:
        buffers = tuple((self.graph.buffers[n].columns, self.graph.buffers[n].rows) if n in self.graph.buffers else (0, n) for n in (*op.inputs, *op.outputs))
        key = (op.kind, tuple(sorted(op.attrs.items())), tuple(sorted(op.weights)), buffers)
        return self.classes.setdefault(key, len(self.classes))

    def of(self, task: Task) -> Work:
        key = (self.op_class[task.op], task.tile_begin, task.tile_end, task.cost)
        if key not in self.known:
            self.known[key] = self._work(task, self.graph.operator(task))
        return self.known[key]

    def _work(self, task: Task, op: Operator) -> Work:
        buffers, batch = self.graph.buffers, self.step.batch
        cached = sum(self._cached(buffers[r.buffer], r, task, op) for r in task.reads if buffers[r.buffer].kind == "cache")
        read = sum(self._bytes(buffers[r.buffer], r) for r in task.reads if buffers[r.buffer].kind != "cache")
        written = sum(self._bytes(buffers[r.buffer], r) for r in task.writes)
        kind = self.kinds.get(task.kind)
        gathered = written if kind is not None and kind.cuda_form == "rows" else 0  # rows of a table, as long as what they become
        stages, size, group = self._stages(task, op, kind)
        weights = 0 if stages else task.cost.weight_bytes
        flops = task.cost.flops * batch
        if cached:  # the nominal context of the cost is not the one of this step
            flops = 4 * cached * self._group(op) // max(1, self._element(task))
        return Work(batch, task.tile_end - task.tile_begin, stages, size, group, cached + gathered + weights, read, written, 0, flops, self._sent(task),
                    int(any(buffers[r.buffer].rows == "positions" for r in task.writes)), self._levels(task, op, stages))

    def _stages(self, task: Task, op: Operator, kind: TaskKind | None) -> tuple[int, int, int]:
        """(stages, bytes of each, stages of a group of tiles) of the task's weights; (0, 0, 0) if none go through a ring."""
        plan, tiles = self.target.kernel, task.tile_end - task.tile_begin
        if plan is None or not task.cost.weight_bytes:
            return 0, 0, 0
        if kind is not None and kind.cuda_form == "stages":
            shape = stages_of(op)
            return tiles * shape.count, shape.bytes, max(groups(tiles)) * shape.count
        return -(-task.cost.weight_bytes // plan.stage_bytes), min(plan.stage_bytes, task.cost.weight_bytes), 0

    def _levels(self, task: Task, op: Operator, stages: int) -> int:
        tiles = task.tile_end - task.tile_begin
        return stages // tiles * len(groups(tiles)) if stages >= tiles and "norm" in op.weights else 0

    def _sent(self, task: Task) -> int:
        """Bytes that go to the other devices; an element of a buffer of messages holds the words of all of them."""
        buffers, ranks = self.graph.buffers, self.graph.ranks
        return sum(self._bytes(buffers[r.buffer], r) for r in task.writes if buffers[r.buffer].kind == "peer") * (ranks - 1) // ranks

    def _bytes(self, buffer: Buffer, region: Region) -> int:
        rows = 1 if buffer.rows == "step" else self.step.batch
        return (region.end - region.begin) * buffer.element_bytes * rows

    def _cached(self, buffer: Buffer, region: Region, task: Task, op: Operator) -> int:
        """Bytes of keys or values that a task reads: its columns, its share of the positions of every sequence.

        A tile is one split of one key-value head. Columns are those of all heads that a task touches, of the first and last of which it
        may have some splits only."""
        window, splits = int(op.attrs.get("window", 0)), int(op.attrs.get("splits", 1))
        seen = min(self.step.context, window or self.step.context)
        heads = -(-task.tile_end // splits) - task.tile_begin // splits
        whole = (region.end - region.begin) * buffer.element_bytes * seen * self.step.batch
        return -(-whole * (task.tile_end - task.tile_begin) // (splits * heads))

    def _element(self, task: Task) -> int:
        return next(self.graph.buffers[r.buffer].element_bytes for r in task.reads if self.graph.buffers[r.buffer].kind == "cache") * 2

    @staticmethod
    def _group(op: Operator) -> int:
        return int(op.attrs.get("heads", 1)) // max(1, int(op.attrs.get("kv_heads", 1)))


def table(graph: SMTaskGraph, target: Target, step: Step, spilling: bool) -> np.ndarray:
    """int64 [tasks, fields of `Work`], by task id. `spilling`: activations go through device memory, each operator's inputs and outputs
    once, shared among its tasks; otherwise they stay in the L2."""
    model = WorkModel(graph, target, step)
    out = np.array([model.of(t) for t in graph.tasks], np.int64).reshape(len(graph.tasks), len(Work._fields))
    if spilling:
        ops = np.array([t.op for t in graph.tasks])
        moved = np.array([activation_bytes(graph, op, step.batch) for op in graph.tensor_graph.operators])
        count = np.bincount(ops, minlength=len(moved))
        out[:, Work._fields.index("spilled")] = -(-moved[ops] // np.maximum(count[ops], 1))
    return out


def activation_bytes(graph: SMTaskGraph, op: Operator, batch: int) -> int:
    """Bytes of the activations that an operator reads and writes in a greedy step."""
    buffers = [graph.buffers[name] for name in _touched(graph, op) if name in graph.buffers]
    return sum(b.row_bytes * (1 if b.rows == "step" else batch) for b in buffers if b.kind == "activation")


def _touched(graph: SMTaskGraph, op: Operator) -> list[str]:
    """Names of what a greedy step touches: logits after penalties are not made, and what comes after the slices of the vocabulary looks at what these
    left, not at rows of logits."""
    names = [n for n in (*op.inputs, *op.outputs) if n in graph.buffers]  # twice what is updated in place: it is read and written
    if "parts" not in op.attrs:
        return names
    widest = max(graph.buffers[n].columns for n in names)
    rows_of_logits = [n for n in names if graph.buffers[n].columns == widest]
    kept = rows_of_logits[:1] if op.kind not in ("sample", "advance") else []
    return [n for n in names if n not in rows_of_logits or n in kept]
