"""Weights of a transformers model object, read in place (no copy of the model is made)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash

from mpk.errors import ModelError
from mpk.frontend.source import TensorSource

DTYPES = ("torch.float32", "torch.float16", "torch.bfloat16")


def is_transformers_model(model: object) -> bool:
    """Whether `model` looks like a transformers model, told without importing transformers."""
    return hasattr(model, "state_dict") and hasattr(getattr(model, "config", None), "to_dict")


def config_mapping(model: Any) -> Mapping[str, Any]:
    """The configuration of the object as in config.json, with its class as architecture and its generation's stop tokens."""
    data = dict(model.config.to_dict())
    data["architectures"] = [type(model).__name__]
    stop = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if stop is not None:
        data["eos_token_id"] = stop
    return data


class TransformersModel(TensorSource):
    """The state of a model object: parameters on any device, in float32, float16 or bfloat16."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.name = type(model).__name__
        self._tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}

    def names(self) -> list[str]:
        return list(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def where(self, name: str) -> str:
        return f"the {self.name} object"

    def _shape(self, name: str) -> tuple[int, ...]:
        tensor = self._tensors[name]
        if str(tensor.dtype) not in DTYPES:
            raise ModelError(f"tensor {name} of {self.where(name)} is of type {tensor.dtype}", remedy=f"supported: {', '.join(DTYPES)}")
        if tensor.is_meta:
            raise ModelError(f"tensor {name} of {self.where(name)} has no data (device 'meta')", remedy="load the weights first")
        return tuple(tensor.shape)

    def _rows(self, name: str, begin: int, end: int) -> np.ndarray:
        return np.asarray(self._tensors[name][begin:end].float().cpu().numpy())

    def _bf16_rows(self, name: str, begin: int, end: int) -> np.ndarray | None:
        import torch

        rows = self._tensors[name][begin:end]
        return np.asarray(rows.contiguous().cpu().view(torch.int16).numpy().view(np.uint16)) if rows.dtype == torch.bfloat16 else None

    def same_contents(self, first: str, second: str) -> bool:
        a, b = self._tensors[first], self._tensors[second]
        return a.data_ptr() == b.data_ptr() or super().same_contents(first, second)

    def fingerprint(self) -> str:
        """Hash of the names, shapes and bytes of all parameters (tied ones once)."""
        import torch

        h = xxhash.xxh3_128()
        seen: set[int] = set()
        for name in sorted(self._tensors):
            tensor = self._tensors[name]
            h.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                h.update(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy())
        return h.hexdigest()
