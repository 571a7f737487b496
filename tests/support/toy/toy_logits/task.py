"""Logits of the toy model; tiles of one id each."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpk.graph.sm_task_graph import Cost, Region
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import TaskKind, WeightSource


class ToyLogits(TaskKind):
    name = "toy_logits"
    operands = ("x", "logits")

    def tiles(self, op: Operator, graph: TensorGraph) -> int:
        return int(op.attrs["vocab"])

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        return {"x": op.inputs[0], "logits": op.outputs[0]}

    def reads(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return tuple(Region(b, 0, graph.values[b].columns) for b in op.inputs)

    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return (Region(op.outputs[0], begin, end),)

    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        return Cost(64 * (end - begin), 8 * (end - begin), 16 * (end - begin))

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        return {"vocab": int(op.attrs["vocab"]), "scale": 0.125}

    def packed_bytes(self, op: Operator, graph: TensorGraph, dtype: str) -> int:
        return 64 * int(op.attrs["vocab"])

    def pack(self, op: Operator, graph: TensorGraph, source: WeightSource, dtype: str, out: np.ndarray) -> None:
        out.view(np.float32).reshape(-1, 16)[:, 0] = source.read("table")

    def params(self, op: Operator, graph: TensorGraph, source: WeightSource) -> np.ndarray:
        return np.array([31, 17, 101], np.float32)


KIND = ToyLogits()
