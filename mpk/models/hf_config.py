"""Reading configurations spelled as in transformers' `config.json` into `DecoderConfig`, refusing what we do not compute.

Accepts both the older spelling (`rope_theta`, `rope_scaling`) and that of transformers 5 (`rope_parameters`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mpk.errors import ModelError
from mpk.models.config import DecoderConfig, RopeScaling

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ACTIVATIONS = ("silu", "swish")
MAX_LAYERS = 10_000  # a damaged configuration must not make us build a graph without end
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")

# Keys of each rope type that have no default in transformers.
REQUIRED_ROPE_KEYS = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ()}


class HFConfig:
    """A configuration mapping with the checks on single entries; `family` names the model in errors."""

    def __init__(self, data: Mapping[str, Any], family: str) -> None:
        self.data, self.family = data, family

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; `default` where the key is missing or null, `ModelError` if that is None too."""
        value = self.data.get(key)
        value = default if value is None else value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ModelError(f"{self.family}: config key '{key}'", expected="a positive integer",
                             actual="nothing" if value is None else repr(value))
        return value

    def layers(self) -> int:
        """The number of layers."""
        layers = self.integer("num_hidden_layers")
        if layers > MAX_LAYERS:
            raise ModelError(f"{self.family}: config key 'num_hidden_layers'", expected=f"at most {MAX_LAYERS}", actual=str(layers))
        return layers

    def number(self, key: str, default: float) -> float:
        """A positive finite number."""
        return positive(self.data.get(key), default, f"{self.family}: config key '{key}'")

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.data.get(key)
        if value is not None and not isinstance(value, (bool, int)):
            raise ModelError(f"{self.family}: config key '{key}'", expected="true or false", actual=repr(value))
        return default if value is None else bool(value)

    def require(self, key: str, actual: Any, supported: bool, what: str) -> None:
        """Refuse the option `key` by name unless `supported`; `what` says what would work."""
        if not supported:
            raise ModelError(f"{self.family}: unsupported '{key}'", actual=repr(actual), remedy=f"supported: {what}")


def positive(value: Any, default: float | None, subject: str) -> float:
    """A positive finite number, or `default` where the value is None; `ModelError` naming `subject` otherwise."""
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ModelError(subject, expected="a positive number", actual="nothing" if value is None else repr(value))
    return float(value)


def read_config(hf: Mapping[str, Any], family: str, *, max_context: int, **options: Any) -> DecoderConfig:
    """The entries that all families share.

    `max_context` is the family's default for `max_position_embeddings`; `options` are fields of `DecoderConfig` that the
    family decides (biases, norms, windows, head_dim). Raises `ModelError` naming the first entry that is not supported.
    """
    c = HFConfig(hf, family)
    _refuse_unsupported(c)
    heads = c.integer("num_attention_heads")
    hidden = c.integer("hidden_size")
    if "head_dim" not in options:
        options["head_dim"] = c.integer("head_dim", _head_dim(c, hidden, heads))
    context = c.integer("max_position_embeddings", max_context)
    rope = read_rope(c, context)
    if rope.kind == "yarn":  # files keep the trained length in max_position_embeddings and state the extension here
        context = max(context, int(rope.original_max_position * rope.factor))
    bos = hf.get("bos_token_id")
    return DecoderConfig(
        architecture=family,
        vocab_size=c.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=c.integer("intermediate_size"),
        num_layers=c.layers(),
        num_heads=heads,
        num_kv_heads=c.integer("num_key_value_heads", heads),
        rms_norm_eps=c.number("rms_norm_eps", 1e-6),
        max_context=context,
        rope=rope,
        tie_embeddings=c.flag("tie_word_embeddings"),
        bos_token=bos if isinstance(bos, int) else None,
        eos_tokens=token_ids(hf.get("eos_token_id")),
        **options,
    ).validate()


def _head_dim(c: HFConfig, hidden: int, heads: int) -> int:
    if c.data.get("head_dim") is None and hidden % heads:
        raise ModelError(f"{c.family}: hidden_size {hidden} with {heads} heads", expected="a multiple, or 'head_dim' in the config")
    return hidden // heads


def _refuse_unsupported(c: HFConfig) -> None:
    hf = c.data
    activation = hf.get("hidden_act") or "silu"
    c.require("hidden_act", activation, activation in ACTIVATIONS, "silu")
    for key in EXPERT_KEYS:
        experts = hf.get(key) or 0
        c.require(key, experts, experts == 0, "dense models (no mixture of experts)")
    quantised = hf.get("quantization_config")
    method = quantised.get("quant_method", "unnamed") if isinstance(quantised, Mapping) else quantised
    c.require("quantization_config", method, not quantised, "f32, f16 and bf16 weights, or a GGUF file")


def read_rope(c: HFConfig, max_position: int) -> RopeScaling:
    """Rotary embedding from `rope_scaling` (which wins as a whole, as in transformers) or `rope_parameters`, and `rope_theta`."""
    hf = c.data
    raw = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(raw, Mapping) or any(isinstance(v, Mapping) for v in raw.values()):
        raise ModelError(f"{c.family}: rope parameters per layer type", remedy="supported: one set of rope parameters for all layers")
    kind = raw.get("rope_type") or raw.get("type") or "default"
    c.require("rope_type", kind, kind in ROPE_TYPES, ", ".join(ROPE_TYPES))
    partial = raw.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    c.require("partial_rotary_factor", partial, partial in (None, 1, 1.0), "rotation of the whole head (1.0)")

    def number(key: str, default: float | None = None) -> float:
        return positive(raw.get(key), default, f"{c.family}: rope parameter '{key}'")

    theta = number("rope_theta", c.number("rope_theta", 10000.0))
    number("factor", 1.0)
    if kind == "default":
        return RopeScaling(theta=theta)
    for key in REQUIRED_ROPE_KEYS[kind]:
        number(key)
    if kind == "linear":
        return RopeScaling(theta=theta, kind=kind, factor=number("factor"))
    # A length beside the rope parameters wins over one inside them, as in transformers.
    original = int(c.number("original_max_position_embeddings", number("original_max_position_embeddings", max_position)))
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if high <= low:
            raise ModelError(f"{c.family}: rope parameter 'high_freq_factor'", expected=f"more than low_freq_factor {low}", actual=str(high))
        return RopeScaling(theta=theta, kind=kind, factor=number("factor"), low_freq_factor=low, high_freq_factor=high,
                           original_max_position=original)
    return RopeScaling(
        theta=theta, kind=kind, factor=number("factor", max_position / original), original_max_position=original,
        beta_fast=raw.get("beta_fast") or 32.0, beta_slow=raw.get("beta_slow") or 1.0, attention_factor=raw.get("attention_factor"),
        mscale=raw.get("mscale"), mscale_all_dim=raw.get("mscale_all_dim"), truncate=bool(raw.get("truncate", True)))


def read_windows(c: HFConfig, default_first_layer: int) -> tuple[int, ...]:
    """Windows per layer as the Qwen families spell them: `layer_types`, or `max_window_layers` full layers at the bottom."""
    layers = c.layers()
    window = c.data.get("sliding_window")
    if not c.flag("use_sliding_window"):
        window = None
    types = c.data.get("layer_types")
    if types is None:
        if window is None:
            return ()
        first = c.data.get("max_window_layers")
        first = default_first_layer if first is None else first
        types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    for kind in types:
        c.require("layer_types", kind, kind in ("full_attention", "sliding_attention"), "full_attention, sliding_attention")
    if "sliding_attention" not in types:
        return ()
    size = c.integer("sliding_window") if window is not None else 0  # without use_sliding_window such layers see everything
    return tuple(size if kind == "sliding_attention" else 0 for kind in types) if size else ()


def token_ids(value: Any) -> tuple[int, ...]:
    """One id, a list of ids or nothing, as a tuple."""
    if value is None:
        return ()
    if isinstance(value, int):
        return (value,)
    if isinstance(value, (list, tuple)) and all(isinstance(v, int) for v in value):
        return tuple(value)
    raise ModelError("config key 'eos_token_id'", expected="an integer or a list of integers", actual=repr(value))
