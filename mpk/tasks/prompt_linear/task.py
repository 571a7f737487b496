"""Task kind `prompt_linear`: a product of a prompt step with the matrix of an operator of the decode graph.

Operator: inputs (input [rows, k padded to chunks],) and for `residual` (x [rows, n],) behind it, outputs (out,): [rows, n], for `swiglu` padded to
chunks; `logits` writes where the host wants logits, so its output [rows, n] has no place in the arena; weights {weight: as `linear`, bias:
optional}, attrs {n, k, epilogue: store | residual | swiglu | logits, shares, tile_columns (of `linear`)}.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpk.graph.sm_task_graph import Cost
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import WeightSource
from mpk.tasks.linear.task import KIND as LINEAR
from mpk.tasks.prompt import PromptKind

EPILOGUES = {"store": 0, "residual": 1, "swiglu": 2, "logits": 3}  # of cuda.cuh
HEAD = 16  # floats of Sizes of cuda.cuh


class PromptLinear(PromptKind):
    name = "prompt_linear"
    operands = ("input", "output", "old")
    cuda_form = "stages"

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        out = {"input": op.inputs[0], "output": op.outputs[0]}
        return {**out, "old": op.inputs[1]} if op.attrs["epilogue"] == "residual" else out

    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        n, k, shares = int(op.attrs["n"]), int(op.attrs["k"]), int(op.attrs["shares"])
        matrices = 2 if op.attrs["epilogue"] == "swiglu" else 1
        return Cost(matrices * n * k * 2 * (end - begin) // shares, 2 * (k + n) * (end - begin) // shares, 2 * matrices * n * k * (end - begin) // shares)

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        return {}

    def params(self, op: Operator, graph: TensorGraph, source: WeightSource) -> np.ndarray:
        """What the product is, then its bias as `linear` has it."""
        a = op.attrs
        sizes = np.zeros(HEAD, np.float32)
        sizes[:5] = int(a["n"]), int(a["k"]), EPILOGUES[str(a["epilogue"])], "bias" in op.weights, int(a["shares"])
        bias = Operator(op.name, "linear", op.inputs, op.outputs, {role: names for role, names in op.weights.items() if role == "bias"}, a, op.layer)
        return np.concatenate([sizes, LINEAR.params(bias, graph, source)])


KIND = PromptLinear()
