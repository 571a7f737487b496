"""Task kind `attention_combine`: merges the partial results of the splits in a fixed order; a tile is one piece of a query head's columns.

Operator: inputs (partial results of `attention`,), outputs (attn [rows, heads * head_dim],), attrs as `attention` and
pieces, of the columns of a head (1; on GPU targets as `split_attention` chooses), and
statistics, the columns behind the sums of a partial result: maximum and sum of exponentials for each piece, and perhaps padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from mpk.graph.sm_task_graph import Cost, Region
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import TaskKind
from mpk.tasks.rotary_attention.sharing import LEAST_BLOCKS


class AttentionCombine(TaskKind):
    name = "attention_combine"
    operands = ("partial", "out")

    def tiles(self, op: Operator, graph: TensorGraph) -> int:
        return int(op.attrs["heads"]) * self._pieces(op)

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        return {"partial": op.inputs[0], "out": op.outputs[0]}

    def reads(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        """Of every split the tiles' columns of their heads' partial results, and their copies of the statistics."""
        splits, head_dim, pieces = int(op.attrs["splits"]), int(op.attrs["head_dim"]), self._pieces(op)
        group, width, columns = int(op.attrs["heads"]) // int(op.attrs["kv_heads"]), head_dim // pieces, head_dim + int(op.attrs.get("statistics", 2))
        spans: list[list[int]] = []
        for kv in range(begin // (group * pieces), -(-end // (group * pieces))):
            heads = range(max(begin // pieces, kv * group), min(-(-end // pieces), (kv + 1) * group))
            for split, head in product(range(splits), heads):
                place = ((kv * splits + split) * group + head % group) * columns
                first, last = max(begin - head * pieces, 0), min(end - head * pieces, pieces)
                for low, high in ((first * width, last * width), (head_dim + 2 * first, head_dim + 2 * last if last < pieces else columns)):
                    if spans and spans[-1][1] == place + low:
                        spans[-1][1] = place + high
                    else:
                        spans.append([place + low, place + high])
        return tuple(Region(op.inputs[0], low, high) for low, high in spans)

    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        width = int(op.attrs["head_dim"]) // self._pieces(op)
        return (Region(op.outputs[0], begin * width, end * width),)

    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        width, splits = int(op.attrs["head_dim"]) // self._pieces(op), int(op.attrs["splits"])
        return Cost(0, (end - begin) * 4 * (splits * (width + 2) + width), (end - begin) * 3 * splits * width)

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        sizes = {name: int(op.attrs[name]) for name in ("heads", "kv_heads", "head_dim", "splits", "window")}
        return {**sizes, "pieces": self._pieces(op), "least": LEAST_BLOCKS}

    @staticmethod
    def _pieces(op: Operator) -> int:
        return int(op.attrs.get("pieces", 1))


KIND = AttentionCombine()
