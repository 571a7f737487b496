"""Qwen2 and Qwen2.5: biases on q, k and v; a sliding window in the upper layers if asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpk.graph.tensor_graph import TensorGraph
from mpk.models.config import DecoderConfig
from mpk.models.decoder import decoder
from mpk.models.hf_config import HFConfig, read_config, read_windows
from mpk.models.registry import Family


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    windows = read_windows(HFConfig(hf, "qwen2"), default_first_layer=28)
    return read_config(hf, "qwen2", max_context=32768, qkv_bias=True, sliding_window=windows)


def build(config: DecoderConfig) -> TensorGraph:
    return decoder(config)


FAMILY = Family("qwen2", "Qwen2ForCausalLM", config, build)
