"""Task kind `prompt_embed`: embeddings and rotations of the rows of a prompt step.

Operator: inputs (step), outputs (x [rows, hidden], rope [rows, head_dim] float32), weights {weight: (name,)} [vocab, hidden], attrs {hidden,
head_dim, shares}.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import WeightSource
from mpk.tasks.prompt import PromptKind


class PromptEmbed(PromptKind):
    name = "prompt_embed"
    operands = ("x", "rope")
    cuda_form = "rows"

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        return {name: int(op.attrs[name]) for name in ("hidden", "head_dim", "shares")}

    def params(self, op: Operator, graph: TensorGraph, source: WeightSource) -> np.ndarray:
        """Inverse frequencies [head_dim / 2], then the attention factor."""
        frequencies, factor = graph.config.rope.inverse_frequencies(int(op.attrs["head_dim"]))
        return np.append(frequencies, np.float32(factor)).astype(np.float32)


KIND = PromptEmbed()
