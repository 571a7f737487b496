"""Task kind `rotary_attention`: head norm, rotation, cache append and causal softmax; tile = key-value head * splits + split.

Operator: inputs (qkv [rows, (heads + 2 kv_heads) * head_dim]: queries, keys, values as the product left them; rope [rows, head_dim];
kv, the past of the cache), outputs (attn [rows, heads * head_dim], or for splits > 1 partial results [rows, kv_heads * splits *
group * (head_dim + 4)]; kv_new, the step's positions of the cache), weights {q_norm, k_norm: (name,) optional}, attrs {heads,
kv_heads, head_dim, window, scale, eps, splits, share_rows: False}. `window` 0: unlimited. kv and kv_new are the same memory: what a
step reads as the past no task of the step writes, so tiles are independent, and the past may be fetched at any time.

A position of the step is appended by the split that has it (sharing.py). Regions are columns and cannot say that splits have
different rows, so in them each split stands for a part of its head's columns of kv_new, which nothing reads in the same step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpk.graph.sm_task_graph import Cost, Region
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.attention.task import NOMINAL_CONTEXT
from mpk.tasks.base import TaskKind, WeightSource
from mpk.tasks.packing import ELEMENT_BYTES
from mpk.tasks.rotary_attention.sharing import LEAST_BLOCKS, STATISTICS


class RotaryAttention(TaskKind):
    name = "rotary_attention"
    operands = ("qkv", "rope", "out")

    def tiles(self, op: Operator, graph: TensorGraph) -> int:
        return int(op.attrs["kv_heads"]) * int(op.attrs["splits"])

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        return {"qkv": op.inputs[0], "rope": op.inputs[1], "out": op.outputs[0]}

    def reads(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        qkv, rope, past = op.inputs
        heads, kv_heads, head_dim, splits = self._sizes(op)
        group, first, last = heads // kv_heads, begin // splits, -(-end // splits)
        regions = [Region(qkv, first * group * head_dim, last * group * head_dim), Region(rope, 0, head_dim)]
        regions += [Region(past, (at + first) * head_dim, (at + last) * head_dim) for at in (0, kv_heads)]
        regions += [Region(qkv, (heads + at + first) * head_dim, (heads + at + last) * head_dim) for at in (0, kv_heads)]
        return tuple(regions)

    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        heads, kv_heads, head_dim, splits = self._sizes(op)
        columns = heads // kv_heads * (head_dim if splits == 1 else head_dim + STATISTICS)
        regions = [Region(op.outputs[0], begin * columns, end * columns)]
        for at in (0, kv_heads * head_dim):
            first, last = (at + tile * head_dim // splits for tile in (begin, end))
            if first < last:
                regions.append(Region(op.outputs[1], first, last))
        return tuple(regions)

    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        heads, kv_heads, head_dim, splits = self._sizes(op)
        window, group = int(op.attrs["window"]), heads // kv_heads
        seen = min(window or NOMINAL_CONTEXT, NOMINAL_CONTEXT, graph.config.max_context)
        share = (end - begin) * seen // splits  # positions times key-value heads
        return Cost(0, share * 2 * head_dim * ELEMENT_BYTES[dtype] + (end - begin) * group * head_dim * 6, share * group * 4 * head_dim)

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        sizes: dict[str, Scalar] = {name: int(op.attrs[name]) for name in ("heads", "kv_heads", "head_dim", "window", "splits")}
        norms: dict[str, Scalar] = {role: role in op.weights for role in ("q_norm", "k_norm")}
        return {**sizes, "least": LEAST_BLOCKS, "scale": float(op.attrs["scale"]), "eps": float(op.attrs["eps"]), **norms}

    def params(self, op: Operator, graph: TensorGraph, source: WeightSource) -> np.ndarray:
        """q_norm, k_norm [head_dim], as far as the operator has them."""
        parts = [source.read(name).reshape(-1) for role in ("q_norm", "k_norm") for name in op.weights.get(role, ())]
        return np.concatenate(parts).astype(np.float32) if parts else np.zeros(0, np.float32)

    @staticmethod
    def _sizes(op: Operator) -> tuple[int, int, int, int]:
        return int(op.attrs["heads"]), int(op.attrs["kv_heads"]), int(op.attrs["head_dim"]), int(op.attrs["splits"])


KIND = RotaryAttention()
