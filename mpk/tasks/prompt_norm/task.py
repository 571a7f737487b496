"""Task kind `prompt_norm`: RMS norm of the rows of a prompt step, in the form that products read (mpk/tiles.cuh).

Operator: inputs (x [rows, hidden],), outputs (normed [rows, hidden padded to chunks],), weights {norm: (name,)}, attrs {hidden, eps, shares,
all_logits: only rows of sequences that want the logits of all positions matter}.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import WeightSource
from mpk.tasks.prompt import PromptKind


class PromptNorm(PromptKind):
    name = "prompt_norm"
    operands = ("x", "normed")

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        return {"hidden": int(op.attrs["hidden"]), "eps": float(op.attrs["eps"]), "shares": int(op.attrs["shares"]), "all_logits": bool(op.attrs["all_logits"])}

    def params(self, op: Operator, graph: TensorGraph, source: WeightSource) -> np.ndarray:
        return source.read(op.weights["norm"][0]).reshape(-1).astype(np.float32)


KIND = PromptNorm()
