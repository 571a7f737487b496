"""Task kind `attention_combine`: merges the partial results of the splits in a fixed order; a tile is one query head.

Operator: inputs (partial results of `attention`,), outputs (attn [rows, heads * head_dim],), attrs as `attention` and
statistics, the columns behind the sums of a partial result (2; 4 behind `rotary_attention`).
"""

from __future__ import annotations

from collections.abc import Mapping

from mpk.graph.sm_task_graph import Cost, Region
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import TaskKind
from mpk.tasks.rotary_attention.sharing import LEAST_BLOCKS


class AttentionCombine(TaskKind):
    name = "attention_combine"
    operands = ("partial", "out")

    def tiles(self, op: Operator, graph: TensorGraph) -> int:
        return int(op.attrs["heads"])

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        return {"partial": op.inputs[0], "out": op.outputs[0]}

    def reads(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        """One region a (key-value head, split): the places of the tiles' heads in its group."""
        splits, columns = int(op.attrs["splits"]), int(op.attrs["head_dim"]) + int(op.attrs.get("statistics", 2))
        group = int(op.attrs["heads"]) // int(op.attrs["kv_heads"])
        regions = []
        for kv in range(begin // group, -(-end // group)):
            first, last = max(begin - kv * group, 0), min(end - kv * group, group)
            for split in range(splits):
                place = (kv * splits + split) * group
                regions.append(Region(op.inputs[0], (place + first) * columns, (place + last) * columns))
        return tuple(regions)

    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        head_dim = int(op.attrs["head_dim"])
        return (Region(op.outputs[0], begin * head_dim, end * head_dim),)

    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        head_dim, splits = int(op.attrs["head_dim"]), int(op.attrs["splits"])
        return Cost(0, (end - begin) * 4 * (splits * (head_dim + 2) + head_dim), (end - begin) * 3 * splits * head_dim)

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        return {**{name: int(op.attrs[name]) for name in ("heads", "kv_heads", "head_dim", "splits", "window")}, "least": LEAST_BLOCKS}


KIND = AttentionCombine()
