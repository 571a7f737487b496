"""The bundled real model on a GPU: as exact as torch bf16, the reference's text, and the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpk
from mpk import frontend
from mpk.runtime import cuda_device
from mpk.targets import hardware
from tests.support.smollm2 import MODEL, PROMPTS, reference_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cuda_device.device_count() == 0, reason="no GPU")]


@pytest.fixture(scope="module")
def loaded() -> frontend.LoadedModel:
    return frontend.load(MODEL)


@pytest.fixture(scope="module")
def engine(loaded: frontend.LoadedModel) -> Any:
    compiler = mpk.Compiler(hardware.choose("auto"))
    return compiler.build(compiler.lower_model(loaded))


@pytest.fixture(scope="module")
def models(loaded: frontend.LoadedModel) -> tuple[Any, Any]:
    """transformers in float32 (weights rounded to bf16, as ours are) and in bf16, on the GPU."""
    import torch

    model = reference_model(loaded)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
    return model, reference_model(loaded).to("cuda", torch.bfloat16)


def logits_of(model: Any, tokens: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor([tokens], device=model.device)).logits[0].float().cpu().numpy()


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.fixture(scope="module")
def text_tokens(loaded: frontend.LoadedModel) -> list[int]:
    text = (Path(__file__).parent.parent / "LICENSE").read_text()
    assert loaded.tokenizer is not None
    return loaded.tokenizer.encode(" ".join(text.split()))[:1000]


def test_logits_of_a_text_of_1000_tokens_are_as_exact_as_those_of_torch_bf16(engine: Any, models: tuple[Any, Any], text_tokens: list[int]) -> None:
    exact, half = (logits_of(m, text_tokens) for m in models)
    ours = engine.create_instance(max_batch=1, max_context=1024).forward([text_tokens])[0]
    assert relative(ours, exact) <= 1.5 * relative(half, exact)


def test_greedy_text_of_ten_prompts_is_the_reference_but_for_near_ties(engine: Any, loaded: frontend.LoadedModel, models: tuple[Any, Any]) -> None:
    assert loaded.tokenizer is not None
    prompts = [loaded.tokenizer.encode(text) for text in PROMPTS]
    result = engine.create_instance(max_batch=10, max_context=256).generate(prompts, max_new_tokens=64, stop_tokens=[])
    for prompt, tokens in zip(prompts, result.tokens, strict=True):
        assert len(tokens) == 64
        exact, half = (logits_of(m, prompt + tokens)[len(prompt) - 1 : -1] for m in models)
        error = np.abs(half - exact).max(-1)  # of torch bf16, token by token
        taken = exact[np.arange(64), tokens]
        assert (exact.max(-1) - taken <= 2 * error).all()


def test_the_command_line_answers_on_the_gpu(loaded: frontend.LoadedModel) -> None:
    assert loaded.tokenizer is not None
    command = [sys.executable, "-m", "mpk.cli", "generate", "--prompt", "The capital of France is", "--max-new-tokens", "8", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])})
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["target"] == hardware.choose("auto") and "Paris" in answer["text"] and answer["ms_per_token"] < 5
