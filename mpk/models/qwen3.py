"""Qwen3 (dense): an RMS norm over each query and key head, a free head size, optional attention biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpk.graph.tensor_graph import TensorGraph
from mpk.models.config import DecoderConfig
from mpk.models.decoder import decoder, normed_rotary_attention
from mpk.models.hf_config import HFConfig, read_config, read_windows
from mpk.models.registry import Family


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    c = HFConfig(hf, "qwen3")
    bias = c.flag("attention_bias")
    return read_config(hf, "qwen3", max_context=32768, head_dim=c.integer("head_dim", 128), qk_norm=True, qkv_bias=bias,
                       output_bias=bias, sliding_window=read_windows(c, default_first_layer=28))


def build(config: DecoderConfig) -> TensorGraph:
    return decoder(config, normed_rotary_attention)


FAMILY = Family("qwen3", "Qwen3ForCausalLM", config, build)
