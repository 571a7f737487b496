"""The reference executor computes what transformers computes, in any order that the graph allows and with any plan of memory."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from mpk.compiler import Compiler
from mpk.errors import GraphError, RequestError
from mpk.frontend import LoadedModel, load
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.runtime.interpreter import ReferenceProgram, first_difference, random_order, round_to
from mpk.tasks.base import StepView
from tests.support.models import TINY_MODELS, reference_logits, tiny_model


@cache
def model(name: str) -> tuple[Any, LoadedModel]:
    torch_model = tiny_model(name)
    return torch_model, load(torch_model)


def lower(name: str, workers: int = 3, max_rows: int = 8, dtype: str = "f32") -> tuple[SMTaskGraph, LoadedModel]:
    loaded = model(name)[1]
    return Compiler("cpp", dtype=dtype, max_rows=max_rows, max_batch=4, workers=workers).lower_model(loaded), loaded


def program(name: str = "llama", *, workers: int = 3, max_rows: int = 8, dtype: str = "f32", **options: Any) -> ReferenceProgram:
    graph, loaded = lower(name, workers, max_rows, dtype)
    return ReferenceProgram(graph, loaded.source, max_batch=4, max_context=64, **options)


def prompt(seed: int, batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 131, (batch, length))


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_logits_equal_those_of_transformers(name: str) -> None:
    tokens = prompt(1, 2, 11)  # two chunks of a prompt and parts of both sequences in one step
    ours = program(name).forward(tokens)
    assert distance(ours, reference_logits(model(name)[0], tokens.tolist())) < 1e-5


def test_generation_is_greedy_with_sequences_of_different_lengths() -> None:
    prompts = [prompt(2, 1, n)[0].tolist() for n in (1, 5, 9)]
    generated = program(max_rows=4).generate(prompts, 6)
    for p, new in zip(prompts, generated, strict=True):
        logits = reference_logits(model("llama")[0], [p + new])[0]
        assert new == logits[len(p) - 1 : -1].argmax(-1).tolist()


def test_generation_stops_at_a_stop_token() -> None:
    reference = program()
    first = reference.generate([[3, 4, 5]], 8)[0]
    assert len(first) == 8
    assert reference.generate([[3, 4, 5]], 8, stop_tokens=[first[2]])[0] == first[: first.index(first[2]) + 1]


@pytest.mark.parametrize("workers", [1, 2, 5, 16])
def test_any_allowed_order_and_shared_memory_give_the_same_bits(workers: int) -> None:
    tokens = prompt(3, 3, 7)
    expected = program(workers=workers).forward(tokens)
    for seed in range(3):
        assert np.array_equal(program(workers=workers, order_seed=seed, share_memory=True).forward(tokens), expected)


def test_a_wrong_memory_plan_gives_wrong_results() -> None:
    graph, loaded = lower("llama")
    names = [n for n in graph.arena if n.endswith(".q")]
    graph.arena[names[0]] = graph.arena["x"]
    expected = program().forward(prompt(4, 1, 5))
    assert not np.array_equal(ReferenceProgram(graph, loaded.source, share_memory=True).forward(prompt(4, 1, 5)), expected)


def test_random_orders_follow_queues_and_events() -> None:
    graph, _ = lower("llama")
    orders = {tuple(random_order(graph, seed)) for seed in range(5)}
    assert len(orders) == 5
    for order in orders:
        place = {t: i for i, t in enumerate(order)}
        assert sorted(order) == list(range(len(graph.tasks)))
        for queue in graph.queues:
            assert [place[t] for t in queue] == sorted(place[t] for t in queue)
        for task in graph.tasks:
            assert all(place[p] < place[task.id] for e in task.waits if e for p in graph.events[e].producers)


def test_random_order_of_a_schedule_that_hangs() -> None:
    graph, _ = lower("llama")
    graph.events[1].threshold += 1
    with pytest.raises(GraphError, match=r"no worker can go on: tasks .* wait for ever; see mpk verify"):
        random_order(graph, 0)


def one_step() -> StepView:
    return StepView(np.array([5, 6, 7], np.int32), np.array([0, 0, 1], np.int32), np.array([0, 1, 0], np.int32), np.array([1, 2], np.int32))


def test_a_step_can_stop_and_go_on_at_any_operator() -> None:
    whole, parts = program(), program()
    expected, env = whole.run(whole.env(one_step())), parts.env(one_step())
    parts.run(env, last="l0.qkv")
    assert np.array_equal(env.buffers["l0.q"], expected.buffers["l0.q"])
    assert np.isnan(env.buffers["l0.attn"]).all()
    parts.run(env, first="l0.attention")
    for name in ("x", "l1.attn", "logits", "choice"):
        np.testing.assert_array_equal(env.buffers[name], expected.buffers[name])
    with pytest.raises(GraphError, match=r"operator 'l7.qkv'; operators are embed, rope, l0.qkv, "):
        parts.run(env, first="l7.qkv")


def test_first_difference_names_operator_and_buffer() -> None:
    assert first_difference(program(), program(order_seed=4), one_step()) is None
    assert first_difference(program(), program(workers=7), one_step(), 1e-4) is None  # splits attention otherwise
    other = program()
    name = "model.layers.1.self_attn.o_proj.weight"
    other._weights[0, name] = other.weight(name).copy()
    other._weights[0, name][4, 2] += 0.5
    found = first_difference(program(), other, one_step(), 1e-6)
    assert found is not None
    assert (found.operator, found.buffer) == ("l1.o", "x")
    assert found.largest > 1e-3


def test_bf16_rounds_matrices_and_caches_and_nothing_else() -> None:
    reference = program("llama-biases", dtype="bf16")
    source = model("llama-biases")[1].source
    for name, rounded in (("model.layers.0.mlp.up_proj.weight", True), ("model.norm.weight", False), ("model.layers.0.mlp.up_proj.bias", False)):
        tensor = source.read(name)
        assert np.array_equal(reference.weight(name), round_to(tensor, "bf16") if rounded else tensor)
    tokens = prompt(5, 1, 9)
    logits = reference.forward(tokens)
    for cache_ in reference.caches.values():
        assert np.array_equal(cache_, round_to(cache_, "bf16")) and cache_.any()
    exact = program("llama-biases").forward(tokens)
    assert 1e-4 < distance(logits, exact) < 0.05


BAD_CALLS: list[tuple[list[list[int]], int, str]] = [
    ([], 1, "batch, expected 1 to 4 sequences, got 0"),
    ([[1]] * 5, 1, "batch, expected 1 to 4 sequences, got 5"),
    ([[1], []], 1, "prompt 1, expected 1 to 63 tokens, got 0"),
    ([[1] * 60], 5, "prompt 0, expected 1 to 59 tokens, got 60"),
    ([[1, 131]], 1, "prompt 0: token, expected 0 to 130, got 131"),
]


@pytest.mark.parametrize(("prompts", "new_tokens", "message"), BAD_CALLS)
def test_calls_that_cannot_be_served(prompts: list[list[int]], new_tokens: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        program().generate(prompts, new_tokens)
