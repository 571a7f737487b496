"""Head norm, rotation, append and attention in numpy, with the shares and partial results of the real one."""

from __future__ import annotations

import numpy as np

from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Operator
from mpk.tasks.attention.reference import partial_softmax, segments
from mpk.tasks.base import Env
from mpk.tasks.linear.reference import rms_norm
from mpk.tasks.qkv.reference import rotate
from mpk.tasks.rotary_attention.sharing import STATISTICS, kv_block, shares


def turned(op: Operator, env: Env, head: int, role: str) -> np.ndarray:
    """Queries or keys [rows, head_dim] of one head of qkv, normalised where the operator says so, and rotated."""
    head_dim, rows = int(op.attrs["head_dim"]), len(env.step.tokens)
    x = env.buffers[op.inputs[0]][:rows, head * head_dim : (head + 1) * head_dim]
    if role in op.weights:
        x = rms_norm(x, env.weight(op.weights[role][0]), float(op.attrs["eps"]))
    return rotate(x, env.buffers[op.inputs[1]][:rows])


def run(op: Operator, task: Task, env: Env) -> None:
    """Each row's share of the softmax over its context; every split appends the step's positions among its own first."""
    a, step = op.attrs, env.step
    heads, kv_heads, head_dim, splits, window = (int(a[n]) for n in ("heads", "kv_heads", "head_dim", "splits", "window"))
    group, rows = heads // kv_heads, len(step.tokens)
    qkv, cache, out = env.buffers[op.inputs[0]], env.caches[op.inputs[2]], env.buffers[op.outputs[0]]
    parts = segments(step)
    shared = shares([(int(step.positions[first]), count) for first, count in parts], group, window, kv_block(head_dim), splits)
    for tile in range(task.tile_begin, task.tile_end):
        kv, split = divmod(tile, splits)
        key, value = (slice(h * head_dim, (h + 1) * head_dim) for h in (kv, kv_heads + kv))
        new_keys, values = turned(op, env, heads + kv, "k_norm"), qkv[:rows, (heads + kv_heads + kv) * head_dim :][:, :head_dim]
        queries = np.stack([turned(op, env, kv * group + g, "q_norm") for g in range(group)], axis=1)
        for (first, count), share in zip(parts, shared, strict=True):
            begin, end = share[split]
            for row in range(first, first + count):
                if begin <= step.positions[row] < end:
                    cache[step.slots[row], step.positions[row], key] = new_keys[row]
                    cache[step.slots[row], step.positions[row], value] = values[row]
            for row in range(first, first + count):
                position = int(step.positions[row])
                seen = np.arange(max(begin, position - window + 1) if window else begin, min(end, position + 1))
                tokens = cache[step.slots[row], seen]
                sums, top, total = partial_softmax(queries[row] @ tokens[:, key].T * np.float32(a["scale"]), tokens[:, value])
                if splits == 1:
                    out[row, kv * group * head_dim : (kv + 1) * group * head_dim] = (sums / total[:, None]).reshape(-1)
                    continue
                place = out[row].reshape(kv_heads, splits, group, head_dim + STATISTICS)[kv, split]
                place[:, :head_dim], place[:, head_dim], place[:, head_dim + 1] = sums, top, total
