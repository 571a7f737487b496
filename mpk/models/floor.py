"""The bytes that a decode step cannot do without, whatever a program packs, pads or copies."""

from __future__ import annotations

from mpk.models.config import DecoderConfig


def floor_bytes(config: DecoderConfig, dtype: str, batch: int, context: int) -> int:
    """Bytes one decode step must read: every weight of a product once, and the keys and values of every sequence."""
    c, size = config, 2 if dtype == "bf16" else 4
    attention = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim * c.hidden_size
    weights = c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size) + c.vocab_size * c.hidden_size
    cached = sum(min(context, c.window(layer) or context) for layer in range(c.num_layers))
    return size * (weights + batch * cached * 2 * c.num_kv_heads * c.head_dim)
