"""Llama 2 and 3.x, and models stored as such (SmolLM2): rope default, linear, llama3 or yarn; optional biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpk.graph.tensor_graph import TensorGraph
from mpk.models.config import DecoderConfig
from mpk.models.decoder import decoder
from mpk.models.hf_config import HFConfig, read_config
from mpk.models.registry import Family


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    c = HFConfig(hf, "llama")
    types = sorted(set(hf.get("layer_types") or ()))
    c.require("layer_types", types, types in ([], ["full_attention"]), "full attention in every layer")
    bias = c.flag("attention_bias")
    return read_config(hf, "llama", max_context=2048, qkv_bias=bias, output_bias=bias, mlp_bias=c.flag("mlp_bias"))


def build(config: DecoderConfig) -> TensorGraph:
    return decoder(config)


FAMILY = Family("llama", "LlamaForCausalLM", config, build)
