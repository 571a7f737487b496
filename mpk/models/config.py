"""`DecoderConfig`: what every supported decoder-only family is reduced to, whatever file it came from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mpk.errors import ModelError


@dataclass(frozen=True)
class RopeScaling:
    """Rotary embedding of one model. `kind` is one of default, linear, llama3, yarn; `factor` and the rest as in transformers.

    `frequency_factors` (one a frequency, head_dim / 2 of them, or none) divide the unscaled frequencies: the form in which
    GGUF files store llama3 scaling.
    Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), transformers' `modeling_rope_utils`.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] = ()

    def inverse_frequencies(self, head_dim: int) -> tuple[np.ndarray, float]:
        """Return (float32 [head_dim / 2] inverse frequencies, factor on cos and sin); `ModelError` for an unknown kind."""
        half = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        base = (1.0 / np.power(np.float32(self.theta), half)).astype(np.float32)
        if self.frequency_factors:
            if len(self.frequency_factors) != head_dim // 2:
                raise ModelError("rope frequency factors", expected=f"{head_dim // 2}, half of the head size",
                                 actual=str(len(self.frequency_factors)))
            base = (base / np.asarray(self.frequency_factors, np.float32)).astype(np.float32)
        if self.kind == "default":
            return base, 1.0
        if self.kind == "linear":
            return (base / np.float32(self.factor)).astype(np.float32), 1.0
        if self.kind == "llama3":
            return self._llama3(base), 1.0
        if self.kind == "yarn":
            return self._yarn(base, head_dim)
        raise ModelError(f"rope scaling '{self.kind}'", remedy="supported: default, linear, llama3, yarn")

    def _llama3(self, base: np.ndarray) -> np.ndarray:
        old = float(self.original_max_position)
        wavelength = 2 * math.pi / base
        smooth = (old / wavelength - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - smooth) * base / self.factor + smooth * base
        out = np.where(wavelength > old / self.low_freq_factor, base / self.factor, base)
        medium = (wavelength >= old / self.high_freq_factor) & (wavelength <= old / self.low_freq_factor)
        return np.where(medium, blended, out).astype(np.float32)

    def _yarn(self, base: np.ndarray, head_dim: int) -> tuple[np.ndarray, float]:
        def scale(factor: float, mscale: float = 1.0) -> float:
            return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

        if self.attention_factor is not None:
            attention = self.attention_factor
        elif self.mscale and self.mscale_all_dim:
            attention = scale(self.factor, self.mscale) / scale(self.factor, self.mscale_all_dim)
        else:
            attention = scale(self.factor)

        def dimension(rotations: float) -> float:
            return head_dim * math.log(self.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001
        ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
        keep = 1 - ramp
        return (base / self.factor * (1 - keep) + base * keep).astype(np.float32), float(attention)


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a decoder-only transformer; hashable, so that caches can be keyed by it."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_context: int
    rope: RopeScaling = field(default_factory=RopeScaling)
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: tuple[int, ...] = ()  # per layer, 0: full attention; empty: full attention everywhere
    bos_token: int | None = None
    eos_tokens: tuple[int, ...] = ()

    def window(self, layer: int) -> int:
        """Sliding window of a layer in tokens (a query sees itself and window - 1 tokens before), 0: unlimited."""
        return self.sliding_window[layer] if self.sliding_window else 0

    def validate(self) -> DecoderConfig:
        """Refuse sizes that no kernel of ours can run; returns self."""
        checks = [
            (self.head_dim % 8 == 0 and 8 <= self.head_dim <= 256, "head size", f"{self.head_dim}", "a multiple of 8 up to 256"),
            (self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads == 0, "query / key-value heads",
             f"{self.num_heads} / {self.num_kv_heads}", "a whole ratio"),
            (self.hidden_size % 8 == 0, "hidden size", f"{self.hidden_size}", "a multiple of 8"),
            (self.intermediate_size % 8 == 0, "intermediate size", f"{self.intermediate_size}", "a multiple of 8"),
            (not self.sliding_window or len(self.sliding_window) == self.num_layers, "sliding windows",
             f"{len(self.sliding_window)}", f"one a layer ({self.num_layers})"),
        ]
        for ok, what, actual, expected in checks:
            if not ok:
                raise ModelError(f"{self.architecture}: {what}", expected=expected, actual=actual)
        return self

    def to_json(self) -> dict[str, Any]:
        from dataclasses import asdict

        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> DecoderConfig:
        data = dict(data)
        data["rope"] = RopeScaling(**{**data["rope"], "frequency_factors": tuple(data["rope"].get("frequency_factors", ()))})
        data["sliding_window"] = tuple(data["sliding_window"])
        data["eos_tokens"] = tuple(data["eos_tokens"])
        return DecoderConfig(**data)


def first_layers(config: DecoderConfig, layers: int) -> DecoderConfig:
    """The same model cut off behind `layers` layers, or whole if it has fewer."""
    count = min(layers, config.num_layers)
    return replace(config, num_layers=count, sliding_window=config.sliding_window[:count])
