"""torch-eager: a transformers model of the same shape on the CPU, operator by operator."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mpk.models.config import DecoderConfig


def transformers_model(config: DecoderConfig, dtype: Any) -> Any:
    """A transformers model of the same shape with its own random weights, on the CPU."""
    import torch
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "rms_norm_eps": config.rms_norm_eps, "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tie_embeddings, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    hf = transformers.AutoConfig.for_model(config.architecture, **settings)
    torch.manual_seed(0)
    with torch.device("cpu"):
        return transformers.AutoModelForCausalLM.from_config(hf, dtype=dtype).eval()  # type: ignore[no-untyped-call]


def system(config: DecoderConfig, dtype: str, steps: int) -> Callable[[int, int], list[float]]:
    """Eager transformers with its dynamic key-value cache: (batch, mean context) -> ms of `steps` single decode steps."""
    import torch

    model = transformers_model(config, torch.bfloat16 if dtype == "bf16" else torch.float32)
    rng = np.random.default_rng(0)

    @torch.inference_mode()
    def measure(batch: int, context: int) -> list[float]:
        ids = torch.from_numpy(rng.integers(0, config.vocab_size, size=(batch, context - steps // 2)))
        out = model(ids, use_cache=True)
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            out = model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
            times.append((time.perf_counter() - started) * 1e3)
        return times

    return measure
