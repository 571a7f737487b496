"""The supported families, by the name of their architecture ("LlamaForCausalLM") or model type ("llama")."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from mpk.errors import ModelError
from mpk.graph.tensor_graph import TensorGraph
from mpk.models.config import DecoderConfig

MODULES = ("llama", "mistral", "qwen2", "qwen3")  # each defines FAMILY


@dataclass(frozen=True)
class Family:
    """`config` reads a mapping spelled as in config.json, `build` writes the model as a `TensorGraph`."""

    model_type: str
    architecture: str
    config: Callable[[Mapping[str, Any]], DecoderConfig]
    build: Callable[[DecoderConfig], TensorGraph]


@cache
def families() -> Mapping[str, Family]:
    """All families by model type."""
    found = [importlib.import_module(f"mpk.models.{name}").FAMILY for name in MODULES]
    return {f.model_type: f for f in found}


def family(architecture: str) -> Family:
    """The family of an architecture or model type; `ModelError` with the supported names if there is none."""
    for f in families().values():
        if architecture in (f.architecture, f.model_type):
            return f
    names = ", ".join(f.architecture for f in families().values())
    raise ModelError(f"unsupported architecture '{architecture}'", remedy=f"supported: {names}")


def family_of(hf: Mapping[str, Any]) -> Family:
    """The family that a config.json names in `architectures`, else in `model_type`."""
    architectures = hf.get("architectures")
    if architectures and not isinstance(architectures, (list, tuple)):
        raise ModelError("config key 'architectures'", expected='a list, e.g. ["LlamaForCausalLM"]', actual=repr(architectures))
    if architectures:
        return family(str(architectures[0]))
    if not hf.get("model_type"):
        raise ModelError("configuration without 'architectures' and 'model_type'", remedy="name the architecture, e.g. LlamaForCausalLM")
    return family(str(hf["model_type"]))


def config_from_mapping(hf: Mapping[str, Any]) -> DecoderConfig:
    """`DecoderConfig` of a mapping spelled as in config.json; `ModelError` for what is not supported."""
    return family_of(hf).config(hf)


def build_graph(config: DecoderConfig) -> TensorGraph:
    """The model as a `TensorGraph`."""
    return family(config.architecture).build(config)
