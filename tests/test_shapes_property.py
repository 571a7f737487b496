"""Random model shapes: every one lowers to a graph that verifies, and computes what transformers computes.

The seed is fixed (derandomize), so a run is repeatable; a failing example is printed in full by hypothesis. The numpy executor
covers many shapes quickly; the compiled program covers a few, since each compiles anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpk import frontend
from mpk.compiler import Compiler
from mpk.runtime.interpreter import ReferenceProgram
from tests.support.models import TINY_MODELS, reference_logits, tiny_model

pytest.importorskip("transformers")

QUIET = {"deadline": None, "derandomize": True, "print_blob": True, "suppress_health_check": list(HealthCheck)}


@dataclass(frozen=True)
class Shape:
    """One example: a family with its options, sizes, and how it is lowered and fed."""

    family: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_key_value_heads: int
    num_attention_heads: int
    head_dim: int
    vocab_size: int
    workers: int
    max_rows: int
    lengths: tuple[int, ...]

    def model(self) -> Any:
        sizes = {k: getattr(self, k) for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads",
                                               "num_attention_heads", "vocab_size", "head_dim")}
        if TINY_MODELS[self.family][0] == "Qwen2":  # has no head size of its own
            sizes["head_dim"] = self.hidden_size // self.num_attention_heads
        return tiny_model(self.family, **sizes)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3, 5, 7, 8]))
    head_dim = draw(st.sampled_from([8, 16, 24, 40, 64]))
    family = draw(st.sampled_from(sorted(TINY_MODELS)))
    heads = kv_heads * group
    if TINY_MODELS[family][0] == "Qwen2":
        hidden = heads * head_dim
    elif TINY_MODELS[family][0] == "Llama":  # transformers wants a multiple of the number of heads here
        hidden = math.lcm(heads, 8) * draw(st.integers(1, 3))
    else:
        hidden = 8 * draw(st.integers(1, 24))
    return Shape(
        family, hidden, 8 * draw(st.integers(1, 30)), draw(st.integers(1, 3)), kv_heads, heads, head_dim, draw(st.integers(33, 300)),
        draw(st.sampled_from([1, 2, 3, 5, 8])), draw(st.sampled_from([5, 16, 33])),
        tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))))


def tokens_of(shape: Shape) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, shape.vocab_size, n).tolist() for n in shape.lengths]


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@settings(max_examples=40, **QUIET)  # type: ignore[arg-type]
@given(shapes())
def test_any_shape_lowers_verifies_and_its_graph_means_what_transformers_computes(shape: Shape) -> None:
    model = shape.model()
    loaded = frontend.load(model)
    graph = Compiler("cpp", dtype="f32", workers=shape.workers, max_rows=max(shape.max_rows, 4), max_batch=4).lower_model(loaded)
    prompt = tokens_of(shape)[0]
    program = ReferenceProgram(graph, loaded.source, max_batch=1, max_context=64, order_seed=3, share_memory=True)
    logits = np.asarray(program.forward([prompt]))[0]
    assert relative(logits, reference_logits(model, [prompt])[0]) < 1e-4


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@settings(max_examples=6, **QUIET)  # type: ignore[arg-type]
@given(shapes())
def test_any_shape_compiles_and_computes_what_transformers_computes(shape: Shape) -> None:
    model = shape.model()
    compiler = Compiler("cpp", dtype="f32", workers=shape.workers, max_rows=max(shape.max_rows, 4), max_batch=4)
    instance = compiler.build(compiler.lower_model(model)).create_instance()
    prompts = tokens_of(shape)
    result = instance.generate(prompts, max_new_tokens=6, stop_tokens=[], logprobs=0)
    assert result.logprobs is not None
    for prompt, tokens, logprobs in zip(prompts, result.tokens, result.logprobs, strict=True):
        assert relative(instance.forward([prompt])[0], reference_logits(model, [prompt])[0]) < 1e-4
        logits = reference_logits(model, [prompt + tokens])[0, len(prompt) - 1 : -1].astype(np.float64)
        exact = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[np.arange(len(tokens)), tokens]
        assert np.abs(np.array([e.logprob for e in logprobs]) - exact).max() < 1e-3
