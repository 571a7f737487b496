"""Mistral: a Llama whose every layer may attend to a sliding window, and whose head size is free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpk.graph.tensor_graph import TensorGraph
from mpk.models.config import DecoderConfig
from mpk.models.decoder import decoder
from mpk.models.hf_config import HFConfig, read_config
from mpk.models.registry import Family

DEFAULT_WINDOW = 4096  # what transformers assumes where the key is missing; null means full attention


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    c = HFConfig(hf, "mistral")
    types = sorted(set(hf.get("layer_types") or ()))
    c.require("layer_types", types, len(types) <= 1, "the same attention in every layer")
    windows: tuple[int, ...] = ()
    if hf.get("sliding_window", DEFAULT_WINDOW) is not None:
        windows = (c.integer("sliding_window", DEFAULT_WINDOW),) * c.layers()
    return read_config(hf, "mistral", max_context=131072, sliding_window=windows)


def build(config: DecoderConfig) -> TensorGraph:
    return decoder(config)


FAMILY = Family("mistral", "MistralForCausalLM", config, build)
