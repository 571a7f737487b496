"""Weights and configuration from a GGUF file, under transformers' names.

Files of architecture llama (Llama, Mistral, SmolLM) hold the rows of q and k permuted for a rotation of neighbouring pairs;
reading undoes that, so that halves of a head rotate against each other as in transformers. Qwen files are not permuted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mpk.errors import ModelError
from mpk.frontend.files import files_fingerprint
from mpk.frontend.gguf_header import TENSOR_TYPES, GGUFHeader, TensorType, read_header
from mpk.frontend.source import TensorSource
from mpk.models.config import DecoderConfig, RopeScaling
from mpk.models.registry import config_from_mapping

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
PERMUTED = ("llama",)
ROPE_FACTORS = "rope_freqs.weight"  # llama3 scaling, as divisors of the frequencies
STOP_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def transformers_name(name: str) -> str:
    """The name that transformers gives a tensor of a GGUF file; tensors that it does not know keep theirs, under their layer."""
    module, _, suffix = name.rpartition(".")
    if module in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[module]}.{suffix}"
    parts = module.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER_NAMES.get(parts[2], parts[2])}.{suffix}"
    return name


class GGUFFile(TensorSource):
    """The tensors of one file, dequantised row block by row block from a memory map."""

    def __init__(self, path: Path) -> None:
        """Read the header and the configuration; `ModelError` for damaged files and unsupported models."""
        super().__init__()
        self.path = path
        self.header: GGUFHeader = read_header(path)
        self._names = {transformers_name(name): name for name in self.header.tensors if name != ROPE_FACTORS}
        self._data = np.asarray(np.memmap(path, np.uint8, "r"))
        self.architecture = str(self.header.metadata.get("general.architecture", ""))
        self.config = self._config()

    # ---- tensors
    def names(self) -> list[str]:
        return list(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def where(self, name: str) -> str:
        return str(self.path)

    def _shape(self, name: str) -> tuple[int, ...]:
        self._type(self._names[name], name)
        return self.header.tensors[self._names[name]].shape

    def _type(self, stored: str, name: str) -> TensorType:
        """How the tensor `stored` (known to the caller as `name`) is kept; `ModelError` for types that are not read."""
        number = self.header.tensors[stored].type_number
        if number not in TENSOR_TYPES:
            supported = ", ".join(t.name for t in TENSOR_TYPES.values())
            raise ModelError(f"tensor {name} in {self.path} is of type {_type_name(number)}", remedy=f"supported: {supported}")
        return TENSOR_TYPES[number]

    def _rows(self, name: str, begin: int, end: int) -> np.ndarray:
        rows: slice | np.ndarray = slice(begin, end)
        if self.architecture in PERMUTED and (".self_attn.q_proj." in name or ".self_attn.k_proj." in name):
            rows = interleaved_rows(begin, end, self.config.head_dim)
        return self._dequantise(self._names[name], rows)

    def _dequantise(self, stored: str, rows: slice | np.ndarray) -> np.ndarray:
        """Rows of a tensor by its name in the file. Rows of a vector are its elements; a quantised vector is one block row."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        info = self.header.tensors[stored]
        kind = self._type(stored, stored)
        qtype = GGMLQuantizationType[kind.name]
        raw = self._data[info.offset:info.offset + math.prod(info.shape) // kind.block * kind.size]
        if len(info.shape) == 1 and kind.block > 1:
            return np.asarray(dequantize(raw, qtype)[rows])
        picked = np.ascontiguousarray(raw.reshape(info.shape[0], -1)[rows])
        if not picked.size:
            return np.zeros((0, *info.shape[1:]), np.float32)
        return np.asarray(dequantize(picked, qtype)).reshape(picked.shape[0], *info.shape[1:])

    def fingerprint(self) -> str:
        return files_fingerprint([(self.path, self.header.size)])

    # ---- configuration
    def _config(self) -> DecoderConfig:
        meta, arch = self.header.metadata, self.architecture
        if arch not in ARCHITECTURES:
            raise ModelError(f"unsupported architecture '{arch}' in {self.path}", remedy=f"supported in GGUF: {', '.join(ARCHITECTURES)}")
        if int(meta.get("split.count", 1)) > 1:
            raise ModelError(f"{self.path} is one of {meta['split.count']} parts", remedy="merge the parts into one GGUF file")
        config = config_from_mapping(self._mapping(_Keys(meta, arch, self.path)))
        layer = "model.layers.0."
        factors: tuple[float, ...] = ()
        if ROPE_FACTORS in self.header.tensors:
            factors = tuple(self._dequantise(ROPE_FACTORS, slice(None)).tolist())
        return replace(
            config, rope=replace(config.rope, frequency_factors=factors), qkv_bias=f"{layer}self_attn.q_proj.bias" in self,
            output_bias=f"{layer}self_attn.o_proj.bias" in self, mlp_bias=f"{layer}mlp.gate_proj.bias" in self)

    def _mapping(self, keys: _Keys) -> dict[str, Any]:
        """The configuration spelled as in config.json."""
        embedding = self.header.tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelError(f"tensor token_embd.weight is missing in {self.path}")
        heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
        if "attention.key_length" not in keys and hidden % heads:
            raise ModelError(f"{self.path}: embedding length {hidden} with {heads} heads", expected=f"{keys.arch}.attention.key_length")
        head_dim = keys.integer("attention.key_length", hidden // heads)
        keys.refuse_unless("attention.value_length", head_dim, "values as long as keys")
        keys.refuse_unless("rope.dimension_count", head_dim, "rotation of the whole head")
        keys.refuse_unless("expert_count", 0, "dense models (no mixture of experts)")
        if "attention.scale" in keys and not math.isclose(keys.number("attention.scale"), head_dim**-0.5, rel_tol=1e-6):
            keys.refuse_unless("attention.scale", head_dim**-0.5, "1 / sqrt(head size)")
        context = keys.integer("context_length")
        stops = [int(self.header.metadata[k]) for k in STOP_KEYS if k in self.header.metadata]
        mapping: dict[str, Any] = {
            "architectures": [ARCHITECTURES[keys.arch]], "vocab_size": embedding.shape[0], "hidden_size": hidden,
            "intermediate_size": keys.integer("feed_forward_length"), "num_hidden_layers": keys.integer("block_count"),
            "num_attention_heads": heads, "num_key_value_heads": keys.integer("attention.head_count_kv", heads), "head_dim": head_dim,
            "max_position_embeddings": context, "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "lm_head.weight" not in self, "rope_parameters": _rope_mapping(keys, context),
            "bos_token_id": self.header.metadata.get("tokenizer.ggml.bos_token_id"), "eos_token_id": list(dict.fromkeys(stops))}
        window = keys.integer("attention.sliding_window", context)
        if window < context:
            if keys.arch != "llama":
                raise ModelError(f"{self.path}: unsupported '{keys.arch}.attention.sliding_window'", actual=str(window),
                                 remedy="supported: in files of architecture llama")
            mapping.update(architectures=["MistralForCausalLM"], sliding_window=window)
        return mapping


class _Keys:
    """Metadata under the prefix of the architecture, with checks that name the key and the file."""

    def __init__(self, metadata: Mapping[str, Any], arch: str, path: Path) -> None:
        self.metadata, self.arch, self.path = metadata, arch, path

    def __contains__(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.metadata

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; values per layer are accepted where all layers agree."""
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if isinstance(value, np.ndarray) and len(set(value.tolist())) == 1:
            value = value.tolist()[0]
        if isinstance(value, (bool, np.ndarray)) or not isinstance(value, int) or value <= 0:
            raise ModelError(f"{self.path}: metadata '{self.arch}.{key}'", expected="a positive integer, the same in all layers",
                             actual="nothing" if value is None else str(value))
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{self.path}: metadata '{self.arch}.{key}'", expected="a number",
                             actual="nothing" if value is None else str(value))
        return float(value)

    def refuse_unless(self, key: str, supported: float, what: str) -> None:
        value = self.metadata.get(f"{self.arch}.{key}", supported)
        if value != supported:
            raise ModelError(f"{self.path}: unsupported '{self.arch}.{key}'", actual=str(value), remedy=f"supported: {what}")


def _rope_mapping(keys: _Keys, context: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    kind = keys.metadata.get(f"{keys.arch}.rope.scaling.type", "linear" if "rope.scale_linear" in keys else "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1):
        return rope
    if kind == "linear":
        keys.refuse_unless("rope.scaling.attn_factor", 1.0, "1 with linear scaling")
        return {**rope, "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        keys.refuse_unless("rope.scaling.yarn_ext_factor", 1.0, "1")
        keys.refuse_unless("rope.scaling.yarn_log_multiplier", 0.0, "0")
        scale = keys.number("rope.scaling.yarn_attn_factor", 1.0) * keys.number("rope.scaling.attn_factor", 1.0)
        return {**rope, "rope_type": "yarn", "factor": factor,
                "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length", context),
                "beta_fast": keys.number("rope.scaling.yarn_beta_fast", RopeScaling.beta_fast),
                "beta_slow": keys.number("rope.scaling.yarn_beta_slow", RopeScaling.beta_slow),
                "attention_factor": scale * (0.1 * math.log(factor) + 1.0)}
    raise ModelError(f"{keys.path}: unsupported '{keys.arch}.rope.scaling.type'", actual=repr(kind), remedy="supported: none, linear, yarn")


def interleaved_rows(begin: int, end: int, head_dim: int) -> np.ndarray:
    """Where a permuted file holds rows [begin, end) of q or k.

    Row (head, half, i) of transformers, i < head_dim / 2, is stored as row (head, i, half): pairs that rotate together are
    neighbours there.
    """
    row = np.arange(begin, end)
    head, within = np.divmod(row, head_dim)
    half, i = np.divmod(within, head_dim // 2)
    return np.asarray(head * head_dim + 2 * i + half)


def _type_name(number: int) -> str:
    from gguf.constants import GGMLQuantizationType

    try:
        return GGMLQuantizationType(number).name
    except ValueError:
        return f"number {number}"
