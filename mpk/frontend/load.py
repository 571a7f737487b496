"""`load`: whatever names or is a model -> its configuration, weights and tokenizer, checked against each other."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpk.errors import ModelError
from mpk.frontend.bundled import BUNDLED, bundled_model_path
from mpk.frontend.files import read_json
from mpk.frontend.source import LoadedModel, TensorSource, check_weights, resolve_tied_head
from mpk.models.config import DecoderConfig
from mpk.models.registry import build_graph, config_from_mapping

if TYPE_CHECKING:
    from mpk.frontend.tokenizer import Tokenizer

SOURCES = "a transformers model object, a folder with config.json and safetensors, a .gguf file, or one of: " + ", ".join(BUNDLED)


def load(model: Any, shapes: bool = False) -> LoadedModel:
    """Open `model` (see `SOURCES`) without reading its weights; they are read block by block later.

    shapes: accept a model without weights too, the name of a known shape ("Llama-3.2-1B"), a config.json or a folder with
    one, and give it random weights. Raises `ModelError` for what is not there, damaged or not supported, and for weights
    that do not fit the configuration.
    """
    if isinstance(model, (str, os.PathLike)):
        return _load_path(str(model), shapes)
    from mpk.frontend.transformers_model import TransformersModel, config_mapping, is_transformers_model

    if not is_transformers_model(model):
        raise ModelError(f"cannot load an object of type {type(model).__name__}", expected=SOURCES)
    config = config_from_mapping(config_mapping(model))
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    return _checked(config, TransformersModel(model), None, name)


def _load_path(text: str, shapes: bool) -> LoadedModel:
    path = Path(text).expanduser()
    if shapes and not path.is_dir() and (not path.is_file() or path.suffix == ".json") and text.lower() not in BUNDLED:
        return _load_shape(text)
    if path.is_dir():
        return _load_shape(text) if shapes and not _has_weights(path) else _load_folder(path)
    if path.is_file():
        if path.suffix == ".safetensors" or path.name == "config.json":
            return _load_folder(path.parent)
        return _load_gguf(path, path.stem)
    if text.lower() in BUNDLED:
        return _load_gguf(bundled_model_path(text.lower()), text.lower())
    raise ModelError(f"no model '{text}'", expected=SOURCES, remedy=_without_weights(text))


def _without_weights(text: str) -> str:
    from mpk.models import shapes

    known = text.lower() in {name.lower() for name in shapes.SHAPES}
    return f"{text} is known as a shape without weights, for mpk bench, inspect, simulate, trace and tune" if known else ""


def _has_weights(folder: Path) -> bool:
    """Whether the folder holds weights, or says by an index that it should."""
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json"))


def _load_shape(text: str) -> LoadedModel:
    from mpk.models.shapes import RandomWeights, shape

    config = _possible_stops(shape(text), text)
    return LoadedModel(config, RandomWeights(config, build_graph(config)), None, text)


def _load_folder(folder: Path) -> LoadedModel:
    from mpk.frontend.safetensors_folder import SafetensorsFolder
    from mpk.frontend.tokenizer import load_tokenizer

    if not (folder / "config.json").is_file():
        raise ModelError(f"no config.json in {folder}", expected=SOURCES)
    mapping = read_json(folder / "config.json")
    if (folder / "generation_config.json").is_file():
        stop = read_json(folder / "generation_config.json").get("eos_token_id")
        mapping = mapping if stop is None else {**mapping, "eos_token_id": stop}
    config = config_from_mapping(mapping)
    return _checked(config, SafetensorsFolder(folder), load_tokenizer(folder), folder.resolve().name)


def _load_gguf(path: Path, name: str) -> LoadedModel:
    from mpk.frontend.gguf_file import GGUFFile
    from mpk.frontend.gguf_tokenizer import gguf_tokenizer

    source = GGUFFile(path)
    return _checked(source.config, source, gguf_tokenizer(source.header.metadata, path, source.config.eos_tokens), name)


def _possible_stops(config: DecoderConfig, name: str) -> DecoderConfig:
    """Without stop tokens beyond the vocabulary, which can never be produced; warns about them."""
    beyond = [token for token in config.eos_tokens if not 0 <= token < config.vocab_size]
    if not beyond:
        return config
    warnings.warn(f"{name}: stop tokens {beyond} are ignored, the vocabulary has ids 0 to {config.vocab_size - 1}", UserWarning, stacklevel=2)
    return replace(config, eos_tokens=tuple(token for token in config.eos_tokens if token not in beyond))


def _checked(config: DecoderConfig, source: TensorSource, tokenizer: Tokenizer | None, name: str) -> LoadedModel:
    config = resolve_tied_head(_possible_stops(config, name), source)
    if tokenizer is not None:
        if tokenizer.vocab_size > config.vocab_size:
            raise ModelError(f"tokenizer of {name} with {tokenizer.vocab_size} tokens", expected=f"at most the model's {config.vocab_size}")
        if config.eos_tokens:  # the model's own list is the complete one
            tokenizer.eos_tokens = config.eos_tokens
        else:
            config = replace(config, eos_tokens=tokenizer.eos_tokens)
    check_weights(config, source)
    return LoadedModel(config, source, tokenizer, name)
