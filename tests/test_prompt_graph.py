"""The graph that reads prompts: it computes what transformers computes, whatever the order of its tasks, and shares the decode graph's weights."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from mpk.codegen import layout
from mpk.codegen.cuda_program import CudaProgramBuilder
from mpk.codegen.prompt_program import PromptProgram
from mpk.compiler import Compiler
from mpk.frontend import LoadedModel, load
from mpk.graph.order import STEP_EVENT
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.models import registry
from mpk.passes import pipeline
from mpk.passes.memory import lay_out_params
from mpk.runtime.interpreter import ReferenceProgram
from mpk.targets import hardware
from mpk.tasks.base import StepView, kind_of
from mpk.tasks.matrices import matrix_key
from tests.support.models import TINY_MODELS, reference_logits, tiny_model

WORKERS = 5


@cache
def model(name: str) -> tuple[Any, LoadedModel]:
    torch_model = tiny_model(name)
    return torch_model, load(torch_model)


@cache
def prompt_graph(name: str) -> SMTaskGraph:
    target = hardware.load("h200").with_workers(WORKERS)
    return pipeline.lower_prompts(registry.build_graph(model(name)[1].config), target, 32)


def step(segments: list[tuple[int, int, int]], tokens: np.ndarray) -> StepView:
    """Rows of (slot, position, rows); tokens [slots, positions]."""
    slots = np.concatenate([np.full(rows, slot) for slot, _, rows in segments]).astype(np.int32)
    positions = np.concatenate([np.arange(p, p + rows) for _, p, rows in segments]).astype(np.int32)
    return StepView(tokens[slots, positions].astype(np.int32), slots, positions, np.zeros(0, np.int32))


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
@pytest.mark.parametrize("seed", [None, 3])
def test_logits_of_all_positions_equal_those_of_transformers(name: str, seed: int | None) -> None:
    torch_model, loaded = model(name)
    tokens = np.random.default_rng(1).integers(0, 131, (2, 19))
    program = ReferenceProgram(replace(prompt_graph(name), dtype="f32"), loaded.source, max_batch=2, max_context=32, order_seed=seed)
    found = np.zeros((2, 19, 131), np.float32)
    for segments in ([(0, 0, 19), (1, 0, 5)], [(1, 5, 14)]):  # two prompts in two steps
        view = step(segments, tokens)
        found[view.slots, view.positions] = program.run(program.env(view)).buffers["logits"]
    exact = reference_logits(torch_model, tokens.tolist())
    assert np.linalg.norm(found - exact) < 1e-5 * np.linalg.norm(exact)


@pytest.fixture(scope="module")
def joined() -> tuple[PromptProgram, CudaProgramBuilder]:
    loaded = model("qwen2")[1]
    decode = Compiler("h200", workers=WORKERS).lower_model(loaded)
    builder = CudaProgramBuilder(decode)
    program = PromptProgram(prompt_graph("qwen2"), builder)
    program.join_params(lay_out_params(decode, loaded.source), loaded.source)
    return program, builder


def test_tables_follow_those_of_the_decode_graph(joined: tuple[PromptProgram, CudaProgramBuilder]) -> None:
    program, builder = joined
    decode = builder.cuda_tables()
    tables = program.prompt_tables(decode.waits, decode.signals)
    graph, instructions = program.graph, tables.records["instruction"]
    order = [t for queue in graph.queues for t in queue]
    assert (tables.waits[: len(decode.waits)] == decode.waits).all() and (tables.signals[: len(decode.signals)] == decode.signals).all()
    assert tables.events == len(builder.graph.events) + len(graph.events) + 1 == tables.over + 1
    for record, t in zip(tables.records, order, strict=True):
        i, task = record["instruction"], graph.tasks[t]
        assert i["task"] == len(builder.graph.tasks) + t
        waits = [e for e in task.waits if e != STEP_EVENT]
        begin = int(i["wait_begin"])
        mine = tables.waits[begin : begin + int(i["wait_count"])]
        assert mine["event"].tolist() == [len(builder.graph.events) + e for e in waits]
        assert mine["count"].tolist() == [graph.events[e].threshold for e in waits]
        assert record["waits"][: len(mine)].tolist() == mine[: layout.INLINE_EVENTS].tolist()
        begin = int(i["signal_begin"])
        signals = tables.signals[begin : begin + int(i["signal_count"])]
        assert signals["event"].tolist() == [len(builder.graph.events) + e for e in task.signals]
        assert record["signals"][: len(signals)].tolist() == signals[: layout.INLINE_EVENTS].tolist()
    operands = instructions["operand"]
    assert (operands[operands >= 0] >= builder.graph.arena_bytes).all() and operands.max() < program.arena_bytes


def test_products_find_the_stages_of_the_decode_graph(joined: tuple[PromptProgram, CudaProgramBuilder]) -> None:
    program, builder = joined
    decode = builder.cuda_tables()
    tables = program.prompt_tables(decode.waits, decode.signals)
    operators = program.graph.tensor_graph.operators
    plans = {matrix_key(kind_of(op), op, builder.graph): (builder.plans[i], builder.graph.weight_offsets[matrix_key(kind_of(op), op, builder.graph)])
             for i, op in enumerate(builder.graph.tensor_graph.operators) if i in builder.plans}
    products = 0
    for i in tables.records["instruction"]:
        op = operators[i["op"]]
        if op.kind == "prompt_linear":
            plan, offset = plans[matrix_key(kind_of(op), op, program.graph)]
            begin = int(i["iargs"][0])
            assert tables.places[begin] == plan.shape.rows
            assert (tables.places[begin + 1 : begin + 1 + plan.place.size].reshape(plan.place.shape) == plan.place).all()
            assert i["weights"] == offset
            products += 1
        behind = op.name in ("l1.attention", "l1.o", "l1.gate_up.norm", "l1.gate_up", "l1.down", "logits.norm", "logits")  # the last append
        assert bool(i["iargs"][1]) == behind, op.name
    assert products == WORKERS * (4 * 2 + 1)
