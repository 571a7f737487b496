"""Task kind `rope_table`: cosines and sines of every row's position; one tile, the whole.

Operator: inputs (step), outputs (rope [rows, head_dim],), attrs {head_dim}. Columns: head_dim / 2 cosines, then as many sines,
both times the attention factor of the model's rope scaling. The frequencies come from the model's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpk.graph.sm_task_graph import Cost, Region
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import TaskKind, WeightSource


class RopeTable(TaskKind):
    name = "rope_table"
    operands = ("rope",)

    def tiles(self, op: Operator, graph: TensorGraph) -> int:
        return 1

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        return {"rope": op.outputs[0]}

    def reads(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return ()

    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return (Region(op.outputs[0], 0, int(op.attrs["head_dim"])),)

    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        head_dim = int(op.attrs["head_dim"])
        return Cost(0, 4 * head_dim, 50 * head_dim)  # a cosine or sine with argument reduction is some 50 operations

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        return {"head_dim": int(op.attrs["head_dim"])}

    def params(self, op: Operator, graph: TensorGraph, source: WeightSource) -> np.ndarray:
        """Inverse frequencies [head_dim / 2], then the attention factor."""
        frequencies, factor = graph.config.rope.inverse_frequencies(int(op.attrs["head_dim"]))
        return np.append(frequencies, np.float32(factor)).astype(np.float32)


KIND = RopeTable()
