"""A tiny real model through the whole of mpk: lowered, compiled, run; against transformers, against itself, and under ThreadSanitizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpk.compiler import Compiler
from mpk.runtime.engine import Engine
from mpk.runtime.request import SamplingOptions
from tests.support.models import reference_logits, tiny_model
from tests.support.race import build_race_test, run_race_test

pytest.importorskip("transformers")
PROMPTS = [[1, 5, 9, 100, 3], [7], [int(t) for t in np.random.default_rng(0).integers(0, 131, 30)]]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def engine(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPK_CACHE", str(tmp_path_factory.mktemp("cache")))
        compiler = Compiler("cpp", dtype="f32", max_rows=8, max_batch=4, workers=3)
        yield compiler.build(compiler.lower_model(model))


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 7), (1, 8), (1, 9), (4, 17), (3, 60)])
def test_logits_equal_transformers_at_chunk_edges_and_in_batches(engine: Engine, model: Any, batch: int, length: int) -> None:
    tokens = np.random.default_rng(length).integers(0, 131, (batch, length))
    logits = engine.create_instance().forward(tokens)
    assert relative(logits, reference_logits(model, tokens.tolist())) < 1e-5


def test_greedy_tokens_equal_transformers(engine: Engine, model: Any) -> None:
    result = engine.create_instance().generate(PROMPTS, max_new_tokens=20, stop_tokens=[], logprobs=2)
    for slot, prompt in enumerate(PROMPTS):
        sequence = prompt + result.tokens[slot]
        logits = reference_logits(model, [sequence])[0, len(prompt) - 1 : -1].astype(np.float64)
        assert result.tokens[slot] == logits.argmax(-1).tolist()
        exact = logits.max(-1) - np.log(np.exp(logits).sum(-1))
        assert result.logprobs is not None
        assert np.abs(np.array([e.logprob for e in result.logprobs[slot]]) - exact).max() < 1e-4


def test_the_same_input_gives_the_same_bits_in_fifty_runs(engine: Engine) -> None:
    instance = engine.create_instance()
    tokens = np.random.default_rng(5).integers(0, 131, (2, 19))
    logits = instance.forward(tokens)
    first = instance.generate(PROMPTS, max_new_tokens=12, temperature=0.8, seed=[1, 2, 3], stop_tokens=[], logprobs=3)
    for _ in range(49):
        assert (instance.forward(tokens) == logits).all()
        again = instance.generate(PROMPTS, max_new_tokens=12, temperature=0.8, seed=[1, 2, 3], stop_tokens=[], logprobs=3)
        assert (again.tokens, again.logprobs) == (first.tokens, first.logprobs)


def test_a_generation_of_16_tokens_has_no_race(engine: Engine, tmp_path: Path) -> None:
    options = SamplingOptions(max_new_tokens=16, temperature=0.7, top_p=0.9, seed=3)
    run = run_race_test(build_race_test(engine, tmp_path), engine, PROMPTS, options, tmp_path, max_context=64)
    assert run.races == []
    assert [len(t) for t in run.tokens] == [16] * 3


def test_a_second_build_takes_program_and_weights_from_the_cache(engine: Engine, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpk.codegen import compile as compile_module
    from mpk.codegen import weights as weights_module

    monkeypatch.setattr(compile_module, "build_library", lambda *a: pytest.fail("compiled again"))
    monkeypatch.setattr(weights_module, "_pack", lambda *a: pytest.fail("packed again"))
    compiler = Compiler("cpp", dtype="f32", max_rows=8, max_batch=4, workers=3)
    again = compiler.build(compiler.lower_model(model))
    assert (again.create_instance().forward([PROMPTS[0]]) == engine.create_instance().forward([PROMPTS[0]])).all()
