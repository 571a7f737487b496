"""Task kind `prompt_append`: norm and rotation of the keys of a prompt step, append of keys and values to the cache.

Operator: inputs (qkv [rows, (heads + 2 kv_heads) * head_dim], rope [rows, head_dim]), outputs (kv, the cache), weights {k_norm: (name,) optional},
attrs {heads, kv_heads, head_dim, eps, shares}.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import WeightSource
from mpk.tasks.prompt import PromptKind


class PromptAppend(PromptKind):
    name = "prompt_append"
    operands = ("qkv", "rope")

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        sizes: dict[str, Scalar] = {name: int(op.attrs[name]) for name in ("heads", "kv_heads", "head_dim", "shares")}
        return {**sizes, "eps": float(op.attrs["eps"]), "k_norm": "k_norm" in op.weights}

    def params(self, op: Operator, graph: TensorGraph, source: WeightSource) -> np.ndarray:
        names = op.weights.get("k_norm", ())
        return source.read(names[0]).reshape(-1).astype(np.float32) if names else np.zeros(0, np.float32)


KIND = PromptAppend()
