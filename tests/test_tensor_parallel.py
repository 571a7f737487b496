"""Groups of threads as ranks: the same tokens and logits as one rank, for all options, and a rank that stops is noticed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpk.compiler import Compiler
from mpk.errors import RequestError, StallError, TargetError
from mpk.models.config import DecoderConfig
from mpk.passes import pipeline
from mpk.runtime.engine import Engine
from mpk.runtime.group import FLAGS, ThreadGroupExecutor
from mpk.runtime.instance import Instance
from mpk.targets.hardware import Figure
from tests.test_shard import config, model

# One family a number of ranks, with everything that is special about it: biases and replicated heads, windows, head norms, tied embeddings.
MODELS: dict[int, DecoderConfig] = {
    2: config("LlamaForCausalLM", heads=8, kv_heads=4, hidden=72, intermediate=208, vocab=131),
    4: config("MistralForCausalLM", heads=8, kv_heads=2, hidden=64, intermediate=224, vocab=150, sliding_window=(6, 0)),
    8: config("Qwen3ForCausalLM", heads=16, kv_heads=8, hidden=40, intermediate=256, vocab=131, head_dim=24, tie_embeddings=True),
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def build(c: DecoderConfig, ranks: int, two_shot_bytes: float | None = None, **options: Any) -> Engine:
    given = {"dtype": "f32", "workers": 2, "max_rows": 16, "max_batch": 4, **options}
    compiler = Compiler("cpp", tensor_parallel_size=ranks, **given)
    if two_shot_bytes is not None:
        compiler.target = replace(compiler.target, two_shot_bytes=Figure(two_shot_bytes, "test", ""))
    return compiler.build(compiler.lower_model(model(c)))


Pair = tuple[Instance, Instance, DecoderConfig]


@pytest.fixture(scope="module", params=sorted(MODELS))
def pair(request: pytest.FixtureRequest) -> Pair:
    """One rank and several, of the same model."""
    c = MODELS[request.param]
    return build(c, 1).create_instance(), build(c, request.param).create_instance(), c


def prompts(c: DecoderConfig, *lengths: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, c.vocab_size, n).tolist() for n in lengths]


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def group(instance: Instance) -> ThreadGroupExecutor:
    assert isinstance(instance.executor, ThreadGroupExecutor)
    return instance.executor


# ---- the same as on one rank
def test_logits_are_those_of_one_rank(pair: Pair) -> None:
    one, several, c = pair
    for lengths in ((1,), (16,), (17, 17), (40, 40, 40)):
        tokens = prompts(c, *lengths)
        assert difference(several.forward(tokens), one.forward(tokens)) < 1e-5, lengths


@pytest.mark.parametrize("options", [
    {}, {"temperature": 0.9, "seed": [1, 2, 3, 4]}, {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": 7},
    {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": [0.0, 0.1, 0.2, 0.3]},
], ids=["greedy", "temperature", "filters", "penalties"])
def test_batches_of_prompts_in_chunks_give_the_tokens_of_one_rank(pair: Pair, options: dict[str, Any]) -> None:
    one, several, c = pair
    given = {"max_new_tokens": [20, 3, 11, 16], "stop_tokens": [5], "logprobs": 2, **options}
    tokens = prompts(c, 1, 16, 37, 8)
    expected, result = one.generate(tokens, **given), several.generate(tokens, **given)
    assert result.tokens == expected.tokens and result.finish_reasons == expected.finish_reasons and result.steps == expected.steps
    assert result.logprobs is not None and expected.logprobs is not None
    ours, theirs = ([e.logprob for s in r.logprobs or [] for e in s] for r in (result, expected))
    assert np.abs(np.array(ours) - np.array(theirs)).max() < 1e-4


def test_runs_repeat_bit_for_bit(pair: Pair) -> None:
    _, several, c = pair
    tokens = prompts(c, 33, 33)
    first = several.forward(tokens)
    generated = several.generate(tokens, max_new_tokens=12, temperature=1.0, seed=3, stop_tokens=[]).tokens
    for _ in range(3):
        assert np.array_equal(several.forward(tokens).view(np.uint32), first.view(np.uint32))
        assert several.generate(tokens, max_new_tokens=12, temperature=1.0, seed=3, stop_tokens=[]).tokens == generated


def test_all_ranks_end_in_the_same_state(pair: Pair) -> None:
    _, several, c = pair
    several.generate(prompts(c, 5, 30), max_new_tokens=9, temperature=1.0, stop_tokens=[])
    first, *others = group(several).states
    for state in others:
        assert np.array_equal(state.tokens, first.tokens) and np.array_equal(state.sequences, first.sequences)
        assert np.array_equal(state.step, first.step) and np.array_equal(state.page_table, first.page_table)
        assert not np.shares_memory(state.kv, first.kv) and not np.shares_memory(state.arena, first.arena)


def test_bf16_weights_give_the_logits_of_one_rank() -> None:
    c = MODELS[2]
    tokens = prompts(c, 20, 20)
    one, two = (build(c, n, dtype="bf16").create_instance().forward(tokens) for n in (1, 2))
    assert difference(two, one) < 1e-2  # keys and values are rounded, and may fall the other way where sums differ in the last bit


def test_two_shots_have_the_bits_of_one() -> None:
    """Sums over ranks are taken in the same order either way; with 2000 bytes, steps of more than 2 rows take two shots."""
    c = MODELS[4]
    tokens = prompts(c, 1, 2, 3, 40)
    results = []
    for most in (262144.0, 2000.0):
        instance = build(c, 4, most).create_instance()
        rows = {int(op.attrs["two_shot_rows"]) for op in instance.engine.graph.tensor_graph.operators if op.kind == "all_reduce"}
        assert rows == {int(most // (4 * 64 * 3))}
        results.append([*(instance.forward([t]).view(np.uint32) for t in tokens),
                        np.array(instance.generate(tokens, max_new_tokens=8, temperature=1.0, stop_tokens=[]).tokens)])
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


# ---- calls
def test_tokens_are_streamed_and_a_run_is_cancelled_on_all_ranks(pair: Pair) -> None:
    _, several, c = pair
    seen: list[int] = []
    result = several.generate(prompts(c, 4), max_new_tokens=10, stop_tokens=[], on_token=lambda slot, token: seen.append(token))
    assert seen == result.tokens[0]

    def cancel() -> None:
        while group(several).state.step[0]["number"] < 4:
            time.sleep(1e-4)
        several.executor.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    result = several.generate(prompts(c, 2), max_new_tokens=62, stop_tokens=[])
    thread.join()
    assert result.finish_reasons in (["cancelled"], ["length"])
    steps = {int(s.step[0]["number"]) for s in group(several).states}
    assert len(steps) == 1 and several.generate(prompts(c, 2), max_new_tokens=3, stop_tokens=[]).finish_reasons == ["length"]


def test_an_answer_that_is_cancelled_before_it_begins_ends_after_one_step_on_all_ranks(pair: Pair) -> None:
    _, several, c = pair
    executor = group(several)
    start = executor.start

    def start_cancelled(*arguments: Any) -> None:
        start(*arguments)
        executor.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "start", start_cancelled)
        result = several.generate(prompts(c, 3), max_new_tokens=50, stop_tokens=[])
    assert result.finish_reasons == ["cancelled"] and result.steps == 1
    assert {int(s.step[0]["number"]) for s in executor.states} == {2}


def test_peer_memory_is_cleared_before_flags_would_come_again(pair: Pair) -> None:
    _, several, c = pair
    executor = group(several)
    expected = several.generate(prompts(c, 9), max_new_tokens=6, stop_tokens=[]).tokens
    executor.flags.next = FLAGS - 3 * executor.flags.messages  # too few flags are left
    assert several.generate(prompts(c, 9), max_new_tokens=6, stop_tokens=[]).tokens == expected
    assert 0 < executor.flags.next < 100 * executor.flags.messages
    executor.flags.next = FLAGS - 100 * executor.flags.messages  # just enough
    assert several.generate(prompts(c, 9), max_new_tokens=6, stop_tokens=[]).tokens == expected


@pytest.mark.parametrize("ids", [[0], [0, 0], [0, 5], [0, 1, 2]])
def test_wrong_devices_are_refused(ids: list[int]) -> None:
    engine = build(MODELS[2], 2)
    with pytest.raises(TargetError) as error:
        engine.create_instance(device_ids=ids)
    assert str(error.value) == (f"device_ids {ids} for tensor_parallel_size 2, expected 2 different devices out of 2; device_ids=[0, 1]")
    assert engine.create_instance(device_ids=[1, 0]).forward([[1, 2]]).shape == (1, 2, 131)


def test_a_second_call_at_the_same_time_is_refused(pair: Pair) -> None:
    _, several, c = pair
    with several._exclusive(), pytest.raises(RequestError, match="the instance is running another call"):
        several.forward(prompts(c, 3))


# ---- a rank that stops
def test_a_rank_that_stops_is_noticed_by_all_others(pair: Pair) -> None:
    _, several, c = pair
    executor = group(several)
    expected = several.generate(prompts(c, 6), max_new_tokens=8, stop_tokens=[]).tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "stall_limit_s", 0.4)
        patch.setattr(several, "stall_limit_s", 0.4)
        executor.halt = (1, 4)
        begin = time.monotonic()
        with pytest.raises(StallError) as error:
            several.generate(prompts(c, 6), max_new_tokens=8, stop_tokens=[])
        executor.halt = None
    assert time.monotonic() - begin < 8
    text = str(error.value)
    assert text.startswith("no progress for 0.4 s: rank 0: worker 0 waits in step 4 at task 2 (embed_reduce, tiles 0 to ")
    for rank in range(len(executor.states)):
        assert f"rank {rank}: " in text, text
    assert "for rank 1's part of message 0, expected flag" in text
    assert several.generate(prompts(c, 6), max_new_tokens=8, stop_tokens=[]).tokens == expected  # and the instance still works


def test_lowered_graphs_are_checked_in_the_pipeline() -> None:
    compiler = Compiler("cpp", tensor_parallel_size=2, dtype="f32", workers=2)
    assert [name for name, _ in pipeline.tensor_passes(compiler.target, compiler.options)][:3] == ["fuse", "shard", "split_attention"]
