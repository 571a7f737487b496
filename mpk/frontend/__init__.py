"""Sources of models: `load` opens a transformers object, a safetensors folder, a GGUF file or a bundled model."""

from mpk.frontend.bundled import bundled_model_path
from mpk.frontend.load import load
from mpk.frontend.source import LoadedModel, NonFiniteWeightsWarning, TensorSource

__all__ = ["LoadedModel", "NonFiniteWeightsWarning", "TensorSource", "bundled_model_path", "load"]
