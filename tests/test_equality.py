"""Logits of every supported family on random tiny models against transformers in float32, in both weight types.

float32: relative L2 error under 1e-4. bf16: no further from the float32 reference than 1.5 times what torch bf16 is on the same
weights. Steps hold 16 rows, so that prompts of 1 to 60 tokens meet every position of a chunk edge; batches hold several sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpk.compiler import Compiler
from mpk.runtime.engine import Engine
from tests.support.models import TINY_MODELS, reference_logits, tiny_model

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

VOCAB = 131


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def build(model: Any, dtype: str) -> Engine:
    compiler = Compiler("cpp", dtype=dtype, max_rows=16, max_batch=5, workers=2)
    return compiler.build(compiler.lower_model(model))


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b.astype(np.float64)))


def random_tokens(batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(1000 * batch + length).integers(0, VOCAB, (batch, length))


@pytest.mark.parametrize("name", TINY_MODELS)
def test_float32_logits_and_decoding_equal_transformers(name: str) -> None:
    model = tiny_model(name)
    instance = build(model, "f32").create_instance()
    for batch, length in ((1, 1), (1, 16), (1, 17), (5, 13), (3, 60)):
        tokens = random_tokens(batch, length)
        assert relative(instance.forward(tokens), reference_logits(model, tokens.tolist())) < 1e-4, (batch, length)
    # Decoding from the cache: each new token's log-probability must be the one that transformers gives it in one pass.
    prompts = [random_tokens(1, n)[0].tolist() for n in (1, 15, 16, 33)]
    result = instance.generate(prompts, max_new_tokens=24, temperature=1.0, seed=[1, 2, 3, 4], stop_tokens=[], logprobs=0)
    assert result.logprobs is not None
    for prompt, tokens, logprobs in zip(prompts, result.tokens, result.logprobs, strict=True):
        logits = reference_logits(model, [prompt + tokens])[0, len(prompt) - 1 : -1].astype(np.float64)
        exact = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[np.arange(len(tokens)), tokens]
        assert np.abs(np.array([e.logprob for e in logprobs]) - exact).max() < 1e-3


@pytest.mark.parametrize("name", ["llama", "llama-biases", "qwen2", "qwen3", "mistral-window"])
def test_bf16_logits_are_as_close_as_those_of_torch_bf16(name: str) -> None:
    model = tiny_model(name)
    with torch.no_grad():
        for parameter in model.parameters():  # the same weights for both: exact in bf16
            parameter.copy_(parameter.to(torch.bfloat16).float())
    instance = build(model, "bf16").create_instance()
    inputs = [random_tokens(batch, length) for batch, length in ((1, 9), (4, 31), (2, 60))]
    ours = [instance.forward(tokens) for tokens in inputs]
    references = [reference_logits(model, tokens.tolist()) for tokens in inputs]
    half = model.to(torch.bfloat16)
    for tokens, logits, reference in zip(inputs, ours, references, strict=True):
        limit = 1.5 * relative(reference_logits(half, tokens.tolist()), reference)
        assert relative(logits, reference) <= limit, tokens.shape


def test_more_rows_and_workers_than_work_change_nothing() -> None:
    model = tiny_model("qwen2")
    compiler = Compiler("cpp", dtype="f32", max_rows=64, max_batch=2, workers=7)
    instance = compiler.build(compiler.lower_model(model)).create_instance()
    tokens = random_tokens(2, 60)
    assert relative(instance.forward(tokens), reference_logits(model, tokens.tolist())) < 1e-4
