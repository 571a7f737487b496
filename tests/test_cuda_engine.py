"""Whole programs on a GPU against transformers: equality, batches, repeats, streaming, trace, and a plan that cannot go on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

import mpk
from mpk.errors import StallError
from mpk.runtime import cuda_device
from mpk.targets import hardware
from tests.support.cuda_check import relative_error, rounded_model
from tests.support.models import TINY_MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cuda_device.device_count() == 0, reason="no GPU")]
NEAR_TIE = 0.05  # of the logits' deviation: what bf16 may turn over


@cache
def built(name: str, pipelining: bool = True) -> tuple[Any, Any]:
    """A tiny model (float32, bf16 values) and its engine."""
    model = rounded_model(name)
    compiler = mpk.Compiler(hardware.choose("auto"), enable_cross_op_pipelining=pipelining)
    return model, compiler.build(compiler.lower_model(model))


def prompts_of(batch: int, vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(batch)
    return [rng.integers(0, vocab, 1 + 5 * slot % 23).tolist() for slot in range(batch)]


@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_are_as_exact_as_those_of_transformers_in_bf16(name: str) -> None:
    import torch

    model, engine = built(name)
    tokens = np.random.default_rng(7).integers(0, model.config.vocab_size, (2, 37))
    with torch.no_grad():
        exact = model(torch.tensor(tokens)).logits.numpy()
        half = rounded_model(name).to("cuda", torch.bfloat16)(torch.tensor(tokens, device="cuda")).logits.float().cpu().numpy()
    ours = engine.create_instance(stall_limit_s=2.0).forward(tokens)
    assert relative_error(ours, exact) <= 1.5 * relative_error(half, exact)


@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral-window"])
def test_greedy_tokens_are_the_best_and_repeat_bit_by_bit(name: str, batch: int) -> None:
    import torch

    model, engine = built(name)
    prompts = prompts_of(batch, model.config.vocab_size)
    instance = engine.create_instance(stall_limit_s=2.0)
    first = instance.generate(prompts, max_new_tokens=16, stop_tokens=[], logprobs=0)
    assert [len(t) for t in first.tokens] == [16] * batch
    for prompt, tokens in zip(prompts, first.tokens, strict=True):
        with torch.no_grad():
            rows = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].numpy()
        assert all(row.max() - row[t] <= NEAR_TIE * row.std() for row, t in zip(rows, tokens, strict=True))
    for _ in range(100):
        again = instance.generate(prompts, max_new_tokens=16, stop_tokens=[], logprobs=0)
        assert again.tokens == first.tokens and again.logprobs == first.logprobs


def same_as_plain(run: Callable[[Any, list[list[int]]], Any], engine: Any) -> None:
    _, plain = built("llama")
    prompts = prompts_of(3, 131)
    expected = plain.create_instance(stall_limit_s=2.0).generate(prompts, max_new_tokens=24, stop_tokens=[])
    assert expected.finish_reasons == ["length"] * 3
    assert run(engine, prompts).tokens == expected.tokens


def test_without_pipelining_the_result_is_the_same() -> None:
    same_as_plain(lambda e, p: e.create_instance(stall_limit_s=2.0).generate(p, max_new_tokens=24, stop_tokens=[]), built("llama", False)[1])


def test_a_trace_changes_no_result_and_covers_all_tasks() -> None:
    _, engine = built("llama")
    instance = engine.create_instance(stall_limit_s=2.0, trace_spans=10000)
    same_as_plain(lambda e, p: instance.generate(p, max_new_tokens=24, stop_tokens=[]), engine)
    spans = np.concatenate(instance.spans())
    assert set(spans["task"][spans["phase"] == 0]) == {t.id for t in engine.graph.tasks}
    assert (spans["end_ns"] >= spans["begin_ns"]).all()


def test_tokens_stream_while_the_kernel_runs() -> None:
    _, engine = built("llama")
    told: list[tuple[int, int]] = []
    result = engine.create_instance(stall_limit_s=2.0).generate(prompts_of(3, 131), max_new_tokens=24, stop_tokens=[],
                                                                on_token=lambda slot, token: told.append((slot, token)))
    for slot, tokens in enumerate(result.tokens):
        assert len(tokens) == 24
        assert [t for s, t in told if s == slot] == tokens


def test_a_kernel_that_cannot_go_on_leaves_and_says_who_waits_for_what() -> None:
    _, engine = built("llama", True)
    instance = engine.create_instance(stall_limit_s=0.5)
    records = engine.on_device(0).constants["records"]
    broken = engine.tables.records.copy()
    row = next(i for i, r in enumerate(broken) if engine.graph.operator(int(r["instruction"]["task"])).name == "l1.o")
    closing = broken["waits"]["event"][broken["instruction"]["wait_count"] > 0][0, 0]
    broken["instruction"]["wait_count"][row], broken["waits"]["event"][row, 0], broken["waits"]["count"][row, 0] = 1, closing, 1000
    records.upload(broken)
    try:
        with pytest.raises(StallError, match=r"no progress for 0.5 s: worker \d+ waits in step 1 at task \d+ \(l1.o, tiles .* expected 1000, seen \d+"):
            instance.generate([[1, 2, 3]], max_new_tokens=4, stop_tokens=[])
    finally:
        records.upload(engine.tables.records)
    assert len(instance.generate([[1, 2, 3]], max_new_tokens=4, stop_tokens=[]).tokens[0]) == 4
