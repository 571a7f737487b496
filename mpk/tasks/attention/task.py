"""Task kind `attention`: causal softmax over the cache; tile = key-value head * splits + split.

Operator: inputs (q [rows, heads * head_dim], kv cache), outputs (attn [rows, heads * head_dim],), or for splits > 1 the partial
results (see `sharing.py`), attrs {heads, kv_heads, head_dim, window, scale, splits}. A tile serves all query heads of its
key-value head, so keys and values are read once. `window` 0: unlimited.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpk.codegen.layout import KV_PAGE_TOKENS
from mpk.graph.sm_task_graph import Cost, Region
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.attention.sharing import QUERY_ROWS
from mpk.tasks.base import TaskKind
from mpk.tasks.packing import ELEMENT_BYTES

NOMINAL_CONTEXT = 512  # tokens that costs assume a row to see; the real number is known at run time only


class Attention(TaskKind):
    name = "attention"
    operands = ("q", "out")

    def tiles(self, op: Operator, graph: TensorGraph) -> int:
        return int(op.attrs["kv_heads"]) * int(op.attrs["splits"])

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        return {"q": op.inputs[0], "out": op.outputs[0]}

    def reads(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        kv_heads, head_dim = int(op.attrs["kv_heads"]), int(op.attrs["head_dim"])
        group, first, last = self._kv_range(op, begin, end)
        return (Region(op.inputs[0], first * group * head_dim, last * group * head_dim),
                Region(op.inputs[1], first * head_dim, last * head_dim),
                Region(op.inputs[1], (kv_heads + first) * head_dim, (kv_heads + last) * head_dim))

    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        splits, head_dim = int(op.attrs["splits"]), int(op.attrs["head_dim"])
        group, _, _ = self._kv_range(op, begin, end)
        columns = group * (head_dim if splits == 1 else head_dim + 2)
        return (Region(op.outputs[0], begin * columns, end * columns),)

    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        window, head_dim, splits = int(op.attrs["window"]), int(op.attrs["head_dim"]), int(op.attrs["splits"])
        group, _, _ = self._kv_range(op, begin, end)
        seen = min(window or NOMINAL_CONTEXT, NOMINAL_CONTEXT, graph.config.max_context)
        share = (end - begin) * seen // splits  # tokens times key-value heads
        return Cost(0, share * 2 * head_dim * ELEMENT_BYTES[dtype] + (end - begin) * group * head_dim * 8, share * group * 4 * head_dim)

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        sizes: dict[str, Scalar] = {name: int(op.attrs[name]) for name in ("heads", "kv_heads", "head_dim", "window", "splits")}
        return {"bf16": dtype == "bf16", **sizes, "scale": float(op.attrs["scale"])}

    def scratch_bytes(self, op: Operator, graph: TensorGraph, max_rows: int) -> int:
        """A block of queries: themselves, scores of a page, two sets of sums, and maxima and totals of both (`Memory` of cpp.hpp)."""
        queries = QUERY_ROWS * int(op.attrs["heads"]) // int(op.attrs["kv_heads"])
        return 4 * queries * (3 * int(op.attrs["head_dim"]) + KV_PAGE_TOKENS + 4)

    @staticmethod
    def _kv_range(op: Operator, begin: int, end: int) -> tuple[int, int, int]:
        """Query heads a group, first and one past the last key-value head of the tiles."""
        splits = int(op.attrs["splits"])
        return int(op.attrs["heads"]) // int(op.attrs["kv_heads"]), begin // splits, -(-end // splits)


KIND = Attention()
