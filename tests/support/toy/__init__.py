"""A made-up model of two task kinds whose next token depends on the whole sequence through the paged cache.

With h = sum over positions of (position + 1) * token, the logit of id v is table[v] + 0.125 * ((31 h + 17 v) mod 101): cheap,
exact in float32, and wrong at once if a page, a row, a chunk or the feedback is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.graph.tensor_graph import Operator, TensorGraph, Value, Weight
from mpk.models.config import DecoderConfig
from mpk.passes import dependencies, event_fusion, memory, partition, schedule
from mpk.targets import hardware
from mpk.tasks.advance.task import KIND as ADVANCE
from mpk.tasks.sample.task import KIND as SAMPLE

EOS = 58  # greedy continuations reach it


class ToySource:
    """A source with one tensor, `table` float32 [vocab]."""

    def __init__(self, vocab: int, seed: int = 0) -> None:
        self.table = np.random.default_rng(seed).integers(0, 8, vocab).astype(np.float32) / 8
        self.seed = seed

    def names(self) -> list[str]:
        return ["table"]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.table.shape

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        return np.ascontiguousarray(self.table[begin:end])

    def fingerprint(self) -> str:
        return f"toy {self.seed} {len(self.table)}"

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits float32 [vocab] after the sequence."""
        h = sum((i + 1) * int(t) for i, t in enumerate(tokens))
        v = np.arange(len(self.table))
        return (self.table + 0.125 * ((31 * h + 17 * v) % 101)).astype(np.float32)


def kinds() -> dict[str, object]:
    """The task kinds that a toy graph uses, for `mpk.tasks.base.load_kinds`."""
    from tests.support.toy.toy_append.task import KIND as APPEND
    from tests.support.toy.toy_logits.task import KIND as LOGITS

    return {k.name: k for k in (APPEND, LOGITS, SAMPLE, ADVANCE)}


def toy_graph(vocab: int = 97, workers: int = 2, max_rows: int = 8, max_batch: int = 4, context: int = 512) -> SMTaskGraph:
    """A scheduled graph of the toy model; `load_kinds` must already give `kinds()`."""
    config = DecoderConfig("toy", vocab, 8, 8, 1, 1, 1, 8, 1e-5, context, eos_tokens=(EOS,))
    graph = TensorGraph(config)
    values = (Value("step", 1, "step", "state"), Value("l0.kv", 16, "positions", "cache"), Value("x", 8), Value("logits", vocab, "logits"),
              Value("choice", max_batch, "step"))
    graph.values = {v.name: v for v in values}
    graph.weights = {"table": Weight("table", (vocab,))}
    graph.operators = [
        Operator("append", "toy_append", ("step",), ("x", "l0.kv"), {}, {}, 0),
        Operator("logits", "toy_logits", ("x", "l0.kv"), ("logits",), {"weight": ("table",)}, {"vocab": vocab}),
        Operator("sample", "sample", ("logits", "step"), ("choice",), {}, {"vocab": vocab, "max_batch": max_batch}),
        Operator("advance", "advance", ("choice", "step"), ("step",)),
    ]
    target = hardware.load("cpp").with_workers(workers)
    tasks = partition.run(graph.check(), target, partition.Options(max_rows, max_batch, "f32"))
    for task_pass in (dependencies.run, lambda g: schedule.run(g, target), lambda g: event_fusion.run(g, target), memory.run):
        tasks = task_pass(tasks)
    return tasks
