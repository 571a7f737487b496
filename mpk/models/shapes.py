"""Published shapes of models by name, and random weights of any shape: for benchmarks and checks without the real weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import xxhash

from mpk.errors import InternalError, ModelError
from mpk.graph.tensor_graph import TensorGraph
from mpk.models.config import DecoderConfig
from mpk.models.registry import config_from_mapping

_LLAMA3_TOKENS = {"vocab_size": 128256, "bos_token_id": 128000, "eos_token_id": 128001}


def _llama3(hidden: int, intermediate: int, layers: int, heads: int, *, factor: float, tied: bool) -> dict[str, Any]:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}
    return {"architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 64 if hidden == 2048 else 128, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072, "rope_parameters": rope, "tie_word_embeddings": tied, **_LLAMA3_TOKENS}


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": hidden, "intermediate_size": intermediate,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 40960, "rope_theta": 1000000.0, "tie_word_embeddings": tied, "bos_token_id": 151643,
            "eos_token_id": 151645}


def _qwen2(hidden: int, intermediate: int, layers: int, heads: int, *, kv_heads: int, vocab: int, context: int,
           tied: bool) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"], "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": intermediate,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-6,
            "max_position_embeddings": context, "rope_theta": 1000000.0, "tie_word_embeddings": tied, "bos_token_id": 151643,
            "eos_token_id": 151643}


def _mistral_7b(vocab: int, theta: float, window: int | None) -> dict[str, Any]:
    return {"architectures": ["MistralForCausalLM"], "vocab_size": vocab, "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 32768, "rope_theta": theta, "sliding_window": window, "bos_token_id": 1, "eos_token_id": 2}


_SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 100000.0,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0}

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Llama-3.2-1B": _llama3(2048, 8192, 16, 32, factor=32.0, tied=True),
    "Llama-3.2-3B": _llama3(3072, 8192, 28, 24, factor=32.0, tied=True),
    "Llama-3.1-8B": _llama3(4096, 14336, 32, 32, factor=8.0, tied=False),
    "Llama-3.1-70B": _llama3(8192, 28672, 80, 64, factor=8.0, tied=False),
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32, tied=False),
    "Qwen3-14B": _qwen3(5120, 17408, 40, 40, tied=False),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64, tied=False),
    "Qwen2.5-0.5B": _qwen2(896, 4864, 24, 14, kv_heads=2, vocab=151936, context=32768, tied=True),
    "Qwen2.5-7B": _qwen2(3584, 18944, 28, 28, kv_heads=4, vocab=152064, context=131072, tied=False),
    "SmolLM2-135M": _SMOLLM2_135M,
    "Mistral-7B": _mistral_7b(32768, 1000000.0, None),  # v0.3
    "Mistral-7B-v0.1": _mistral_7b(32000, 10000.0, 4096),
}


def shape(name: str) -> DecoderConfig:
    """The configuration of a named shape (case is ignored), of a config.json, or of a folder with one.

    Raises `ModelError` with the known names when `name` is neither.
    """
    for known, mapping in SHAPES.items():
        if known.lower() == name.lower():
            return config_from_mapping(mapping)
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.suffix == ".json" and path.is_file():
        try:
            data = json.loads(path.read_text())
        except ValueError as e:
            raise ModelError(f"{path} is not valid JSON", remedy=str(e)) from e
        if not isinstance(data, dict):
            raise ModelError(f"{path}", expected="a JSON object", actual=type(data).__name__)
        return config_from_mapping(data)
    if name and Path(name).is_dir():
        raise ModelError(f"folder {name}", expected="config.json in it, or a named shape")
    raise ModelError(f"no shape, folder, file or bundled model '{name}'",
                     remedy=f"known shapes: {', '.join(SHAPES)}; or a config.json, a folder with one, a .gguf file, or smollm2-135m-instruct")


@cache
def _normal_table() -> np.ndarray:
    """float32 [65536]: the quantiles of the standard normal distribution, so that 16 random bits make one sample."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / 65536) for i in range(65536)], np.float32)


class RandomWeights:
    """A `WeightSource` of random weights for every weight of `graph`; the same seed gives the same values, however they are read.

    Matrices [n, k] are normal with deviation k^-1/2 (the deviation of activations is kept), norm weights are normal around 1
    with deviation 0.1, biases have deviation 0.1. Values are made in blocks of whole rows, each from its own generator.
    """

    def __init__(self, config: DecoderConfig, graph: TensorGraph, seed: int = 0) -> None:
        self.config, self.seed = config, seed
        self._shapes = {w.name: w.shape for w in graph.weights.values()}

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise InternalError(f"random weights have no tensor {name}")
        return self._shapes[name]

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Rows [begin, end) as float32."""
        shape = self.shape(name)
        end = shape[0] if end is None else end
        if not 0 <= begin <= end <= shape[0]:
            raise InternalError(f"rows [{begin}, {end}) of {name}, which has {shape[0]}")
        columns = int(np.prod(shape[1:], dtype=np.int64))
        block_rows = max(1, (1 << 18) // columns)
        out = np.empty((end - begin, columns), np.float32)
        for block in range(begin // block_rows, -(-end // block_rows)):
            first = block * block_rows
            low, high = max(begin, first), min(end, first + block_rows)
            values = self._block(name, block, block_rows * columns).reshape(block_rows, columns)
            out[low - begin:high - begin] = values[low - first:high - first]
        if len(shape) > 1:
            out *= np.float32(columns**-0.5)
        else:
            out *= np.float32(0.1)
            if name.endswith("norm.weight"):
                out += np.float32(1)
        return out.reshape(end - begin, *shape[1:])

    def _block(self, name: str, block: int, size: int) -> np.ndarray:
        key = xxhash.xxh3_64_intdigest(f"{self.seed}/{name}/{block}".encode())
        words = np.random.PCG64(key).random_raw(-(-size // 4)).astype("<u8", copy=False)
        return np.asarray(_normal_table()[words.view("<u2")[:size]])

    def fingerprint(self) -> str:
        return xxhash.xxh3_128_hexdigest(f"random {self.seed} {sorted(self._shapes.items())}".encode())
