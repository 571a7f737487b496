"""Families: configurations are read as transformers reads them, and the graphs compute what transformers computes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from mpk.errors import InternalError, ModelError
from mpk.graph.tensor_graph import Operator, TensorGraph
from mpk.models.config import DecoderConfig, RopeScaling
from mpk.models.registry import build_graph, config_from_mapping, families, family
from mpk.models.shapes import SHAPES, RandomWeights, shape
from tests.support.models import BASE, LINEAR, LLAMA3, TINY_MODELS, YARN, reference_logits, tiny_config, tiny_model

LLAMA: Mapping[str, Any] = {**BASE, "architectures": ["LlamaForCausalLM"]}


class Evaluator:
    """The operators of a `TensorGraph` in plain numpy, for one sequence from position 0; attention in float64."""

    def __init__(self, graph: TensorGraph, weight: Callable[[str], np.ndarray], tokens: list[int]) -> None:
        self.graph, self.weight, self.tokens = graph, weight, tokens
        self.values: dict[str, np.ndarray] = {}

    def logits(self) -> np.ndarray:
        for op in self.graph.operators:
            if op.kind in ("sample", "advance"):
                continue
            inputs = [self.values[name] for name in op.inputs if name != "step"]
            self.values[op.outputs[0]] = getattr(self, op.kind)(op, *inputs)
        return self.values["logits"]

    def w(self, op: Operator, role: str) -> np.ndarray:
        (name,) = op.weights[role]
        array = self.weight(name)
        assert array.shape == self.graph.weights[name].shape
        return array

    def embedding(self, op: Operator) -> np.ndarray:
        return self.w(op, "weight")[self.tokens]

    def rms_norm(self, op: Operator, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + op.attrs["eps"]) * self.w(op, "weight")

    def head_norm(self, op: Operator, x: np.ndarray) -> np.ndarray:
        return self.rms_norm(op, x.reshape(len(x), -1, op.attrs["head_dim"])).reshape(x.shape)

    def linear(self, op: Operator, x: np.ndarray) -> np.ndarray:
        return x @ self.w(op, "weight").T + (self.w(op, "bias") if "bias" in op.weights else 0)

    def rope(self, op: Operator, x: np.ndarray) -> np.ndarray:
        d = op.attrs["head_dim"]
        frequencies, factor = self.graph.config.rope.inverse_frequencies(d)
        angle = np.arange(len(x), dtype=np.float32)[:, None, None] * frequencies
        cos, sin = np.cos(angle) * factor, np.sin(angle) * factor
        heads = x.reshape(len(x), -1, d)
        a, b = heads[..., :d // 2], heads[..., d // 2:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)

    def attention(self, op: Operator, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        n, d = len(q), op.attrs["head_dim"]
        group = op.attrs["heads"] // op.attrs["kv_heads"]
        q, k, v = (a.reshape(n, -1, d).transpose(1, 0, 2).astype(np.float64) for a in (q, k, v))
        k, v = np.repeat(k, group, 0), np.repeat(v, group, 0)
        scores = q @ k.transpose(0, 2, 1) * op.attrs["scale"]
        query, key = np.arange(n)[:, None], np.arange(n)[None]
        seen = (key <= query) & (key > query - (op.attrs["window"] or n + 1))
        scores = np.where(seen, scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        return ((p / p.sum(-1, keepdims=True)) @ v).transpose(1, 0, 2).reshape(n, -1).astype(np.float32)

    def silu_mul(self, op: Operator, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return gate / (1 + np.exp(-gate)) * up

    def add(self, op: Operator, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a + b


def state(model: Any) -> Callable[[str], np.ndarray]:
    tensors = model.state_dict()
    return lambda name: tensors[name].numpy()


def mapping_of(hf_config: Any) -> dict[str, Any]:
    return {**hf_config.to_dict(), "architectures": [type(hf_config).__name__.replace("Config", "ForCausalLM")]}


# ---- graphs

@pytest.mark.parametrize("name", TINY_MODELS)
def test_graph_computes_the_logits_of_transformers(name: str) -> None:
    model = tiny_model(name)
    config = config_from_mapping(mapping_of(model.config))
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 19).tolist()
    expected = reference_logits(model, [tokens])[0]
    actual = Evaluator(build_graph(config), state(model), tokens).logits()
    assert actual.shape == (19, config.vocab_size)
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert error < 1e-5, f"{name}: relative error {error:.2e}"


def test_graph_names_every_parameter_of_transformers() -> None:
    for name in TINY_MODELS:
        model = tiny_model(name)
        config = config_from_mapping(mapping_of(model.config))
        parameters = {n: tuple(p.shape) for n, p in model.named_parameters()}
        assert {w.name: w.shape for w in build_graph(config).weights.values()} == parameters, name


# ---- rotary embedding

@pytest.mark.parametrize("head_dim", [8, 24, 40, 64, 128])
@pytest.mark.parametrize(("rope", "theta", "context"), [
    ({"rope_type": "default"}, 10000.0, 64), ({"rope_type": "default"}, 1e6, 64), (LINEAR, 10000.0, 64), (LLAMA3, 500.0, 64),
    ({**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192}, 500000.0, 131072), (YARN, 5000.0, 128),
    ({**YARN, "original_max_position_embeddings": 4096, "beta_fast": 16, "beta_slow": 2}, 1e6, 32768),
    ({**YARN, "attention_factor": 0.7}, 10000.0, 64), ({**YARN, "mscale": 0.8, "mscale_all_dim": 0.5}, 10000.0, 64),
    ({**YARN, "truncate": False}, 10000.0, 64)])
def test_rope_frequencies_equal_those_of_transformers(rope: dict[str, Any], theta: float, context: int, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    hf = LlamaConfig(**{**BASE, "head_dim": head_dim, "max_position_embeddings": context, "rope_parameters": {**rope, "rope_theta": theta}})
    module = LlamaRotaryEmbedding(hf)
    frequencies, factor = config_from_mapping(mapping_of(hf)).rope.inverse_frequencies(head_dim)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, module.inv_freq.numpy(), rtol=1e-6)
    assert factor == pytest.approx(module.attention_scaling, rel=1e-7)


def test_frequency_factors_divide_the_frequencies() -> None:
    plain, _ = RopeScaling(theta=100.0).inverse_frequencies(8)
    divided, _ = RopeScaling(theta=100.0, frequency_factors=(1.0, 2.0, 4.0, 8.0)).inverse_frequencies(8)
    np.testing.assert_allclose(divided, plain / [1, 2, 4, 8], rtol=1e-7)
    with pytest.raises(ModelError, match="rope frequency factors, expected 4, half of the head size, got 2"):
        RopeScaling(frequency_factors=(1.0, 2.0)).inverse_frequencies(8)


@pytest.mark.parametrize("scaling", [LLAMA3, YARN, LINEAR])
def test_both_spellings_of_rope_parameters_are_read_alike(scaling: dict[str, Any]) -> None:
    old = {k: v for k, v in scaling.items() if k != "rope_theta"}
    old["type"] = old.pop("rope_type")
    new = config_from_mapping({**LLAMA, "rope_parameters": scaling})
    assert config_from_mapping({**LLAMA, "rope_scaling": old, "rope_theta": scaling["rope_theta"]}) == new
    assert new.rope.kind == scaling["rope_type"]


@pytest.mark.parametrize("theta", [{}, {"rope_theta": 55.0}])
@pytest.mark.parametrize("scaling", [{}, {"rope_type": "linear", "factor": 2.0}, LLAMA3])
def test_of_two_spellings_at_once_the_one_of_transformers_wins(scaling: dict[str, Any], theta: dict[str, Any]) -> None:
    from transformers import LlamaConfig

    mapping = {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 777.0}, "rope_scaling": scaling, **theta}
    copies = {key: dict(value) if isinstance(value, dict) else value for key, value in mapping.items()}
    theirs = LlamaConfig(**copies).rope_parameters
    ours = config_from_mapping(mapping).rope
    assert (ours.kind, ours.factor, ours.theta) == (theirs["rope_type"], theirs["factor"], theirs["rope_theta"])


def test_yarn_extends_the_context_and_finds_its_factor() -> None:
    config = config_from_mapping({**LLAMA, "rope_parameters": YARN})
    assert config.max_context == 128
    without = {k: v for k, v in YARN.items() if k != "factor"}
    assert config_from_mapping({**LLAMA, "rope_parameters": without}).rope.factor == 2.0


# ---- configurations

@pytest.mark.parametrize("name", TINY_MODELS)
def test_configuration_of_transformers_is_read_whole(name: str) -> None:
    hf = tiny_config(name)
    config = config_from_mapping(mapping_of(hf))
    assert config.architecture == hf.model_type
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (hf.vocab_size, hf.hidden_size, hf.intermediate_size)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, hf.num_attention_heads, hf.num_key_value_heads)
    assert config.head_dim == getattr(hf, "head_dim", hf.hidden_size // hf.num_attention_heads)
    assert (config.rms_norm_eps, config.tie_embeddings) == (hf.rms_norm_eps, hf.tie_word_embeddings)
    assert (config.bos_token, config.eos_tokens) == (1, (2,))
    assert DecoderConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_sliding_windows_per_layer() -> None:
    def windows(hf: dict[str, Any]) -> tuple[int, ...]:
        return config_from_mapping({**BASE, "num_hidden_layers": 3, **hf}).sliding_window

    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 7}
    assert windows(qwen) == ()
    assert windows({**qwen, "use_sliding_window": True, "max_window_layers": 1}) == (0, 7, 7)
    assert windows({**qwen, "use_sliding_window": True, "max_window_layers": 5}) == ()
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows({**qwen, "use_sliding_window": True, "layer_types": types}) == (7, 0, 7)
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert windows(mistral) == (4096, 4096, 4096)  # what transformers takes where the key is missing
    assert windows({**mistral, "sliding_window": None}) == ()
    assert windows({**mistral, "sliding_window": 9}) == (9, 9, 9)


def test_stop_tokens_are_one_or_several() -> None:
    assert config_from_mapping({**LLAMA, "eos_token_id": [7, 9]}).eos_tokens == (7, 9)
    assert config_from_mapping({**LLAMA, "eos_token_id": None}).eos_tokens == ()
    with pytest.raises(ModelError, match="'eos_token_id', expected an integer or a list of integers, got 'x'"):
        config_from_mapping({**LLAMA, "eos_token_id": "x"})


def test_families_are_found_by_architecture_and_by_model_type() -> None:
    assert set(families()) == {"llama", "mistral", "qwen2", "qwen3"}
    for f in families().values():
        assert family(f.architecture) is family(f.model_type) is f
    assert config_from_mapping({**BASE, "model_type": "qwen3"}).qk_norm


@pytest.mark.parametrize(("changes", "text"), [
    ({"architectures": ["GPT2LMHeadModel"]}, "unsupported architecture 'GPT2LMHeadModel'; supported: LlamaForCausalLM, MistralForCausalLM"),
    ({"architectures": ["LlamaModel"]}, "unsupported architecture 'LlamaModel'"),
    ({"architectures": None}, "without 'architectures' and 'model_type'"),
    ({"tie_word_embeddings": "yes"}, "llama: config key 'tie_word_embeddings', expected true or false, got 'yes'"),
    ({"architectures": "LlamaForCausalLM"}, "config key 'architectures', expected a list, e.g. [\"LlamaForCausalLM\"], got 'LlamaForCausalLM'"),
    ({"hidden_act": "gelu"}, "llama: unsupported 'hidden_act', got 'gelu'; supported: silu"),
    ({"num_local_experts": 8}, "llama: unsupported 'num_local_experts', got 8; supported: dense models"),
    ({"quantization_config": {"quant_method": "gptq"}}, "unsupported 'quantization_config', got 'gptq'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "unsupported 'rope_type', got 'dynamic'; supported: default, linear, llama3, yarn"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope parameters per layer type"),
    ({"rope_scaling": {"factor": 0}}, "rope parameter 'factor', expected a positive number, got 0"),
    ({"rope_scaling": {"type": "linear"}}, "rope parameter 'factor', expected a positive number, got nothing"),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "'high_freq_factor', expected more than low_freq_factor 1.0, got 1.0"),
    ({"partial_rotary_factor": 0.5}, "unsupported 'partial_rotary_factor', got 0.5"),
    ({"rope_theta": -1}, "config key 'rope_theta', expected a positive number, got -1"),
    ({"hidden_size": None}, "llama: config key 'hidden_size', expected a positive integer, got nothing"),
    ({"num_hidden_layers": 0}, "config key 'num_hidden_layers', expected a positive integer, got 0"),
    ({"num_hidden_layers": 10**9}, "config key 'num_hidden_layers', expected at most 10000, got 1000000000"),
    ({"hidden_size": 70}, "llama: hidden_size 70 with 9 heads, expected a multiple, or 'head_dim' in the config"),
    ({"head_dim": 12}, "llama: head size, expected a multiple of 8 up to 256, got 12"),
    ({"num_key_value_heads": 4}, "llama: query / key-value heads, expected a whole ratio, got 9 / 4"),
    ({"layer_types": ["sliding_attention", "full_attention"]}, "unsupported 'layer_types'"),
    ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["linear_attention", "full_attention"]}, "got 'linear_attention'"),
    ({"architectures": ["MistralForCausalLM"], "layer_types": ["sliding_attention", "full_attention"]}, "unsupported 'layer_types'"),
])
def test_unsupported_configurations_are_refused_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError) as error:
        config_from_mapping({**LLAMA, "head_dim": None, **changes})
    assert text in str(error.value)
    assert "\n" not in str(error.value)


# ---- shapes without weights

PARAMETERS = {  # as published, in millions
    "Llama-3.2-1B": 1236, "Llama-3.2-3B": 3213, "Llama-3.1-8B": 8030, "Llama-3.1-70B": 70554, "Qwen3-0.6B": 596, "Qwen3-1.7B": 1721,
    "Qwen3-4B": 4022, "Qwen3-8B": 8191, "Qwen3-14B": 14768, "Qwen3-32B": 32762, "Qwen2.5-0.5B": 494, "Qwen2.5-7B": 7616,
    "SmolLM2-135M": 135, "Mistral-7B": 7248, "Mistral-7B-v0.1": 7242}


def test_named_shapes_have_the_published_number_of_parameters() -> None:
    assert set(PARAMETERS) == set(SHAPES)
    for name, millions in PARAMETERS.items():
        assert round(build_graph(shape(name.upper())).weight_bytes(1) / 1e6) == millions, name


def test_a_shape_may_be_any_config_json(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert shape(str(tmp_path)) == shape(str(tmp_path / "config.json")) == config_from_mapping(LLAMA)
    with pytest.raises(ModelError, match=r"no shape, folder, file or bundled model 'Llama-9'; known shapes: Llama-3.2-1B, "):
        shape("Llama-9")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json is not valid JSON"):
        shape(str(tmp_path))


def test_random_weights_do_not_depend_on_how_they_are_read() -> None:
    config = shape("SmolLM2-135M")
    weights = RandomWeights(config, build_graph(config), seed=3)
    name = "model.layers.7.mlp.down_proj.weight"
    whole = weights.read(name)
    assert whole.shape == (576, 1536) and whole.dtype == np.float32
    pieces = [weights.read(name, a, z) for a, z in ((0, 1), (1, 170), (170, 171), (171, 576))]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    assert whole.std() == pytest.approx(1536**-0.5, rel=0.01) and abs(whole.mean()) < 1e-4
    assert not np.array_equal(whole, RandomWeights(config, build_graph(config), seed=4).read(name))
    assert not np.array_equal(whole, weights.read("model.layers.8.mlp.down_proj.weight"))
    assert weights.read("model.norm.weight").mean() == pytest.approx(1, abs=0.02)
    assert weights.read(name, 3, 3).shape == (0, 1536)
    with pytest.raises(InternalError, match="random weights have no tensor nothing"):
        weights.read("nothing")


def test_fingerprints_of_random_weights_tell_seeds_and_shapes_apart() -> None:
    def fingerprint(name: str, seed: int) -> str:
        config = shape(name)
        return RandomWeights(config, build_graph(config), seed).fingerprint()

    assert fingerprint("Qwen3-0.6B", 1) == fingerprint("Qwen3-0.6B", 1)
    assert len({fingerprint("Qwen3-0.6B", 1), fingerprint("Qwen3-0.6B", 2), fingerprint("Qwen3-1.7B", 1)}) == 3
