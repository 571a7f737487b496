"""The bundled real model, SmolLM2-135M-Instruct, against transformers in float32 on the same dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpk import frontend
from mpk.compiler import Compiler
from tests.support.smollm2 import MODEL, PROMPTS, reference_model

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

@pytest.fixture(scope="module")
def loaded() -> frontend.LoadedModel:
    return frontend.load(MODEL)


@pytest.fixture(scope="module")
def reference(loaded: frontend.LoadedModel) -> Any:
    return reference_model(loaded)


def reference_logits(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


def test_greedy_tokens_of_ten_prompts_equal_transformers_float32(loaded: frontend.LoadedModel, reference: Any) -> None:
    compiler = Compiler("cpp", dtype="f32")
    instance = compiler.build(compiler.lower_model(loaded)).create_instance(max_batch=10, max_context=256)
    assert loaded.tokenizer is not None
    prompts = [loaded.tokenizer.encode(text) for text in PROMPTS]
    result = instance.generate(prompts, max_new_tokens=64, stop_tokens=[])
    for prompt, tokens in zip(prompts, result.tokens, strict=True):
        assert len(tokens) == 64
        # Greedy decoding step by step is the argmax at every place of one pass over prompt and output.
        logits = reference_logits(reference, prompt + tokens)[len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()


@pytest.fixture(scope="module")
def text_tokens(loaded: frontend.LoadedModel) -> list[int]:
    text = (Path(__file__).parent.parent / "LICENSE").read_text()
    assert loaded.tokenizer is not None
    return loaded.tokenizer.encode(" ".join(text.split()))[:1000]


def perplexity(logits: np.ndarray, tokens: list[int]) -> float:
    scores = logits[:-1].astype(np.float64)
    scores -= scores.max(-1, keepdims=True)
    losses = np.log(np.exp(scores).sum(-1)) - scores[np.arange(len(tokens) - 1), tokens[1:]]
    return float(np.exp(losses.mean()))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_perplexity_of_a_text_of_1000_tokens(loaded: frontend.LoadedModel, reference: Any, text_tokens: list[int], dtype: str) -> None:
    assert len(text_tokens) == 1000
    compiler = Compiler("cpp", dtype=dtype)
    instance = compiler.build(compiler.lower_model(loaded)).create_instance(max_batch=1, max_context=1024)
    ours = perplexity(instance.forward([text_tokens])[0], text_tokens)
    theirs = perplexity(reference_logits(reference, text_tokens), text_tokens)
    assert abs(ours / theirs - 1) < (1e-4 if dtype == "f32" else 5e-3)


def test_a_chat_question_is_answered(loaded: frontend.LoadedModel) -> None:
    compiler = Compiler("cpp")
    instance = compiler.build(compiler.lower_model(loaded)).create_instance(max_batch=1)
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    question = tokenizer.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    result = instance.generate([tokenizer.encode(question, add_special=False)], max_new_tokens=24)
    assert result.finish_reasons == ["stop"]
    assert "Paris" in tokenizer.decode(result.tokens[0])
