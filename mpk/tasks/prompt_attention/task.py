"""Task kind `prompt_attention`: causal softmax of the queries of a prompt step over the whole context, which is in the cache by then.

Operator: inputs (qkv, rope, kv, the cache), outputs (attn [rows, heads * head_dim padded to chunks],), weights {q_norm: (name,) optional}, attrs
{heads, kv_heads, head_dim, window (0: unlimited), scale, eps, shares}.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import WeightSource
from mpk.tasks.prompt import PromptKind


class PromptAttention(PromptKind):
    name = "prompt_attention"
    operands = ("qkv", "rope", "out")

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        sizes: dict[str, Scalar] = {name: int(op.attrs[name]) for name in ("heads", "kv_heads", "head_dim", "window", "shares")}
        return {**sizes, "scale": float(op.attrs["scale"]), "eps": float(op.attrs["eps"]), "q_norm": "q_norm" in op.weights}

    def params(self, op: Operator, graph: TensorGraph, source: WeightSource) -> np.ndarray:
        names = op.weights.get("q_norm", ())
        return source.read(names[0]).reshape(-1).astype(np.float32) if names else np.zeros(0, np.float32)


KIND = PromptAttention()
