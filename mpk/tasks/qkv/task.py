"""Task kind `qkv`: queries, keys and values of a layer; a tile is one head: query heads, then key heads, then value heads.

Operator: inputs (x [rows, hidden], rope [rows, head_dim]), outputs (q [rows, heads * head_dim], kv cache [positions,
2 * kv_heads * head_dim]), weights {weight: (q, k, v); norm: (name,) optional; bias: (q, k, v) optional; q_norm, k_norm: (name,)
optional}, attrs {heads, kv_heads, head_dim, hidden, eps}. Every head is padded to whole panels.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpk.graph.sm_task_graph import Cost, Region
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import TaskKind, WeightSource
from mpk.tasks.packing import ELEMENT_BYTES, PANEL, pack_rows, panel_bytes, panel_view, panels_of


class Qkv(TaskKind):
    name = "qkv"
    operands = ("x", "rope", "q")

    def tiles(self, op: Operator, graph: TensorGraph) -> int:
        return sum(self._heads(op))

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        return {"x": op.inputs[0], "rope": op.inputs[1], "q": op.outputs[0]}

    def reads(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        heads, kv_heads, _ = self._heads(op)
        regions = (Region(op.inputs[0], 0, int(op.attrs["hidden"])),)
        rotated = begin < heads + kv_heads
        return (*regions, Region(op.inputs[1], 0, int(op.attrs["head_dim"]))) if rotated else regions

    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        heads, head_dim = int(op.attrs["heads"]), int(op.attrs["head_dim"])
        regions = []
        if begin < heads:
            regions.append(Region(op.outputs[0], begin * head_dim, min(end, heads) * head_dim))
        if end > heads:  # the cache holds key heads, then value heads, as the tiles do
            regions.append(Region(op.outputs[1], max(begin - heads, 0) * head_dim, (end - heads) * head_dim))
        return tuple(regions)

    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        hidden, head_dim, heads = int(op.attrs["hidden"]), int(op.attrs["head_dim"]), int(op.attrs["heads"])
        panels = (end - begin) * panels_of(head_dim)
        queries = max(min(end, heads) - begin, 0)
        written = queries * head_dim * 4 + (end - begin - queries) * head_dim * ELEMENT_BYTES[dtype]
        return Cost(panels * panel_bytes(hidden, dtype), 4 * hidden + written, 2 * panels * PANEL * hidden)

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        sizes: dict[str, Scalar] = {name: int(op.attrs[name]) for name in ("heads", "kv_heads", "head_dim", "hidden")}
        parts: dict[str, Scalar] = {role: role in op.weights for role in ("norm", "bias", "q_norm", "k_norm")}
        return {"bf16": dtype == "bf16", **sizes, "eps": float(op.attrs["eps"]), **parts}

    def scratch_bytes(self, op: Operator, graph: TensorGraph, max_rows: int) -> int:
        """Sums of one head for all rows, and the normalised input."""
        width = panels_of(int(op.attrs["head_dim"])) * PANEL
        return 4 * max_rows * (width + (int(op.attrs["hidden"]) if "norm" in op.weights else 0))

    def packed_bytes(self, op: Operator, graph: TensorGraph, dtype: str) -> int:
        return self.tiles(op, graph) * panels_of(int(op.attrs["head_dim"])) * panel_bytes(int(op.attrs["hidden"]), dtype)

    def pack(self, op: Operator, graph: TensorGraph, source: WeightSource, dtype: str, out: np.ndarray) -> None:
        head_dim, head_panels = int(op.attrs["head_dim"]), panels_of(int(op.attrs["head_dim"]))
        panels, at = panel_view(out, int(op.attrs["hidden"]), dtype), 0
        for name, count in zip(op.weights["weight"], self._heads(op), strict=True):
            for head in range(count):
                pack_rows(source, name, head * head_dim, (head + 1) * head_dim, panels[at : at + head_panels])
                at += head_panels

    def params(self, op: Operator, graph: TensorGraph, source: WeightSource) -> np.ndarray:
        """norm [hidden], bias [heads, whole panels of a head], q_norm, k_norm [head_dim]; as far as the operator has them."""
        head_dim = int(op.attrs["head_dim"])
        parts = [source.read(name).reshape(-1) for name in op.weights.get("norm", ())]
        for name in op.weights.get("bias", ()):
            by_head = source.read(name).reshape(-1, head_dim)
            padded = np.zeros((len(by_head), panels_of(head_dim) * PANEL), np.float32)
            padded[:, :head_dim] = by_head
            parts.append(padded.reshape(-1))
        parts += [source.read(name).reshape(-1) for role in ("q_norm", "k_norm") for name in op.weights.get(role, ())]
        return np.concatenate(parts).astype(np.float32) if parts else np.zeros(0, np.float32)

    @staticmethod
    def _heads(op: Operator) -> tuple[int, int, int]:
        heads, kv_heads = int(op.attrs["heads"]), int(op.attrs["kv_heads"])
        return heads, kv_heads, kv_heads


KIND = Qkv()
