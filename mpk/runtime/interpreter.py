"""Reference executor: runs an SMTaskGraph task by task with the numpy references of the task kinds.

It is slow and simple, and what programs are compared with: any order of tasks that the graph allows, any part of the operators, the
contents of every buffer, memory shared as the plan says. It knows nothing of instructions, packed weights or pages.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np

from mpk.errors import GraphError, RequestError
from mpk.frontend.shard_source import shard_sources
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.tasks.advance.reference import PlannedSequence, plan
from mpk.tasks.base import Env, StepView, WeightSource
from mpk.tasks.sample.task import choice_column


def run_step(graph: SMTaskGraph, env: Env, order: Sequence[int] | None = None, first: str | None = None, last: str | None = None,
             after_task: Callable[[int], None] | None = None) -> None:
    """Execute the tasks of one step on `env`, in sequential order or in `order` (ids of tasks).

    `first` and `last` name operators: only tasks of these and of those between them run. `after_task` is called with each id. Where ranks
    share the model, each task runs on all of them before the next: what one waits for of another comes before it in any allowed order.
    Raises `GraphError` for an operator that is not there.
    """
    begin = 0 if first is None else operator_index(graph, first)
    end = len(graph.tensor_graph.operators) - 1 if last is None else operator_index(graph, last)
    for t in range(len(graph.tasks)) if order is None else order:
        task = graph.tasks[t]
        if begin <= task.op <= end:
            for own in env.peers or (env,):
                importlib.import_module(f"mpk.tasks.{task.kind}.reference").run(graph.operator(task), task, own)
            if after_task is not None:
                after_task(t)


def operator_index(graph: SMTaskGraph, name: str) -> int:
    """Place of the operator called `name`; raises `GraphError` listing a few names."""
    names = [op.name for op in graph.tensor_graph.operators]
    if name not in names:
        raise GraphError(f"operator '{name}'", remedy=f"operators are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}")
    return names.index(name)


def random_order(graph: SMTaskGraph, seed: int) -> list[int]:
    """One execution that queues and events allow: a random worker takes its next task whenever its events have fired.

    Raises `GraphError` if no worker can go on.
    """
    rng = random.Random(seed)
    counters = [0] * len(graph.events)
    if counters:
        counters[0] = 1  # the host starts the first step
    places = [0] * len(graph.queues)
    open_workers = [w for w, q in enumerate(graph.queues) if q]
    order: list[int] = []
    while open_workers:
        candidates = list(open_workers)
        rng.shuffle(candidates)
        for w in candidates:
            task = graph.tasks[graph.queues[w][places[w]]]
            if all(counters[e] >= graph.events[e].threshold for e in task.waits):
                break
        else:
            stuck = ", ".join(str(graph.queues[w][places[w]]) for w in open_workers[:8])
            raise GraphError(f"no worker can go on: tasks {stuck} wait for ever", remedy="see mpk verify")
        order.append(task.id)
        for e in task.signals:
            counters[e] += 1
        places[w] += 1
        if places[w] == len(graph.queues[w]):
            open_workers.remove(w)
    return order


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values as they are after storing them as "bf16" or "f32"."""
    return values.astype(ml_dtypes.bfloat16).astype(np.float32) if dtype == "bf16" else values


@dataclass
class Difference:
    """Where two runs differ first: after which operator, in which buffer, by how much (largest absolute difference)."""

    operator: str
    buffer: str
    largest: float


class ReferenceProgram:
    """A model that runs in numpy.

    graph: a lowered graph (any target). source: its weights; matrices are rounded to the graph's dtype, as the program packs
    them, and so is what is stored in caches. max_batch, max_context: sequences and positions there is cache for.
    order_seed: run every step in a random allowed order instead of the sequential one. share_memory: place buffers as the
    memory plan says, so that a wrong plan gives wrong results; otherwise each has memory of its own.

    Raises `GraphError` for shared memory on a target whose activations are not 4 bytes wide: here every array is float32.
    """

    def __init__(self, graph: SMTaskGraph, source: WeightSource, max_batch: int = 1, max_context: int | None = None,
                 order_seed: int | None = None, share_memory: bool = False) -> None:
        self.graph = graph
        self.sources = shard_sources(graph, source)
        self.max_batch = max_batch
        self.max_context = max_context or min(graph.tensor_graph.config.max_context, 1024)
        self.order_seed, self.share_memory = order_seed, share_memory
        narrow = next((n for n in graph.arena if graph.buffers[n].element_bytes != 4), None)
        if share_memory and narrow is not None:
            raise GraphError(f"buffer {narrow} with elements of {graph.buffers[narrow].element_bytes} bytes", expected="4 to share memory",
                             remedy="lower the model for target cpp")
        self.steps = 0
        self._weights: dict[tuple[int, str], np.ndarray] = {}
        self.reset()

    def reset(self) -> None:
        """Empty the caches."""
        shape = (self.max_batch, self.max_context)
        self.rank_caches = [{b.name: np.zeros((*shape, b.columns), np.float32) for b in self.graph.buffers.values() if b.kind == "cache"}
                            for _ in self.sources]
        self.caches = self.rank_caches[0]

    def weight(self, name: str, rank: int = 0) -> np.ndarray:
        """A tensor of the source (a rank's part of it) as the program sees it, float32."""
        if (rank, name) not in self._weights:
            tensor = self.sources[rank].read(name)
            self._weights[rank, name] = round_to(tensor, self.graph.dtype) if tensor.ndim > 1 else tensor
        return self._weights[rank, name]

    # ---- one step
    def env(self, step: StepView) -> Env:
        """Memory for one step (of rank 0, with that of all ranks in `peers`); activations hold NaN, so that a read of what was not written shows."""
        envs = [Env(self._buffers(step), caches, step, partial(self.weight, rank=rank), self.graph.tensor_graph, rank)
                for rank, caches in enumerate(self.rank_caches)]
        for env in envs:
            env.peers = envs if len(envs) > 1 else ()
        return envs[0]

    def _buffers(self, step: StepView) -> dict[str, np.ndarray]:
        counts = {"tokens": len(step.tokens), "logits": len(step.logit_rows), "step": 1}
        arena = np.full(-(-self.graph.arena_bytes // 4), np.nan, np.float32) if self.share_memory else None
        buffers: dict[str, np.ndarray] = {}
        for b in self.graph.buffers.values():
            if b.rows == "positions":  # caches, under whatever name
                continue
            shape = (counts[b.rows], b.columns * (self.graph.ranks if b.kind == "peer" else 1))
            if arena is not None and b.name in self.graph.arena:
                begin = self.graph.arena[b.name].offset // 4
                buffers[b.name] = arena[begin : begin + shape[0] * shape[1]].reshape(shape)
            else:
                buffers[b.name] = np.full(shape, np.nan, np.float32)
        return buffers

    def run(self, env: Env, first: str | None = None, last: str | None = None) -> Env:
        """Run one step, or its operators from `first` to `last`, on `env`; returns it."""
        order = None if self.order_seed is None else random_order(self.graph, self.order_seed + self.steps)
        self.steps += 1
        with np.errstate(invalid="ignore"):
            run_step(self.graph, env, order, first, last, lambda task: self._round_cache(env, task))
        return env

    def _round_cache(self, env: Env, task: int) -> None:
        for region in self.graph.tasks[task].writes:
            if region.buffer in env.caches and self.graph.dtype != "f32":
                place = (env.step.slots, env.step.positions, slice(region.begin, region.end))
                for own in env.peers or (env,):
                    own.caches[region.buffer][place] = round_to(own.caches[region.buffer][place], self.graph.dtype)

    def snapshots(self, env: Env) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        """Run a step operator by operator; yields each operator's name and copies of what it wrote ([rows, columns])."""
        for op in self.graph.tensor_graph.operators:
            self.run(env, op.name, op.name)
            written = {r.buffer for t in self.graph.tasks if self.graph.operator(t) is op for r in t.writes if r.buffer in env.buffers}
            yield op.name, {name: env.buffers[name].copy() for name in sorted(written)}

    # ---- whole sequences
    def _steps(self, sequences: list[PlannedSequence], tokens: list[list[int]]) -> Iterator[tuple[StepView, Env]]:
        """Plan and run steps until nothing is left to compute; the caller appends tokens in between."""
        while True:
            segments, logit_rows = plan(sequences, self.graph.max_rows)
            if not segments:
                return
            slots = [slot for slot, _, rows, _ in segments for _ in range(rows)]
            positions = [p + r for _, _, rows, p in segments for r in range(rows)]
            step = StepView(np.array([tokens[s][p] for s, p in zip(slots, positions, strict=True)], np.int32), np.array(slots, np.int32),
                            np.array(positions, np.int32), np.array(logit_rows, np.int32))
            for slot, _, rows, _ in segments:
                sequences[slot].computed += rows
            yield step, self.run(self.env(step))

    def _logits(self, env: Env) -> np.ndarray:
        op = next(op for op in reversed(self.graph.tensor_graph.operators) if op.kind == "sample")
        return env.buffers[op.inputs[0]]

    def forward(self, prompt_tokens: np.ndarray) -> np.ndarray:
        """Logits float32 [batch, tokens, vocab] of int64 [batch, tokens]; starts with empty caches."""
        prompt_tokens = np.asarray(prompt_tokens)
        self._check(prompt_tokens.tolist(), 0)
        self.reset()
        batch, length = prompt_tokens.shape
        logits = np.zeros((batch, length, self.graph.tensor_graph.config.vocab_size), np.float32)
        sequences = [PlannedSequence(length, all_logits=True) for _ in range(batch)]
        for step, env in self._steps(sequences, prompt_tokens.tolist()):
            rows = step.logit_rows
            logits[step.slots[rows], step.positions[rows]] = self._logits(env)
        return logits

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_tokens: Sequence[int] = ()) -> list[list[int]]:
        """Greedy continuation of each prompt (lists of token ids, of any lengths); a stop token ends it and is part of it."""
        self._check(prompts, max_new_tokens)
        self.reset()
        tokens = [list(p) for p in prompts]
        sequences = [PlannedSequence(len(p)) for p in prompts]
        for step, env in self._steps(sequences, tokens):
            sample = next(op for op in reversed(self.graph.tensor_graph.operators) if op.kind == "sample")
            for slot in step.slots[step.logit_rows]:
                token = int(env.buffers[sample.outputs[0]][0, choice_column(sample, int(slot))])
                tokens[slot].append(token)
                sequences[slot].length += 1
                if len(tokens[slot]) - len(prompts[slot]) >= max_new_tokens or token in stop_tokens:
                    sequences[slot].running = False
        return [t[len(p):] for t, p in zip(tokens, prompts, strict=True)]

    def _check(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        vocab = self.graph.tensor_graph.config.vocab_size
        if not 1 <= len(prompts) <= self.max_batch:
            raise RequestError("batch", expected=f"1 to {self.max_batch} sequences", actual=str(len(prompts)))
        for i, prompt in enumerate(prompts):
            if not 1 <= len(prompt) <= self.max_context - new_tokens:
                raise RequestError(f"prompt {i}", expected=f"1 to {self.max_context - new_tokens} tokens", actual=str(len(prompt)))
            wrong = next((t for t in prompt if not 0 <= t < vocab), None)
            if wrong is not None:
                raise RequestError(f"prompt {i}: token", expected=f"0 to {vocab - 1}", actual=str(wrong))


def first_difference(a: ReferenceProgram, b: ReferenceProgram, step: StepView, tolerance: float = 0.0) -> Difference | None:
    """Run one step on both and compare every buffer after every operator; the first that differs by more than `tolerance`.

    The two graphs must be of the same model. Operators and buffers that only one has (merged attention splits, say) are passed
    over; NaN differs from every number.
    """
    known = {op.name for op in b.graph.tensor_graph.operators}
    others = b.snapshots(b.env(step))
    for name, left in a.snapshots(a.env(step)):
        if name not in known:
            continue
        right = next(written for other, written in others if other == name)
        for buffer in sorted(left.keys() & right.keys()):
            largest = _largest_difference(left[buffer], right[buffer])
            if largest > tolerance:
                return Difference(name, buffer, largest)
    return None


def _largest_difference(x: np.ndarray, y: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):
        apart = np.where(np.isnan(x) & np.isnan(y), 0.0, np.abs(x - y))
    return float(np.max(np.where(np.isnan(apart), np.inf, apart), initial=0.0))
