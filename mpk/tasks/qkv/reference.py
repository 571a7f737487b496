"""Queries, keys and values in numpy."""

from __future__ import annotations

import numpy as np

from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Operator
from mpk.tasks.base import Env
from mpk.tasks.linear.reference import rms_norm


def rotate(head: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Turn the halves of head [rows, head_dim] against each other by the angles of table [rows, head_dim] (cosines, sines)."""
    half = head.shape[1] // 2
    a, b, cosine, sine = head[:, :half], head[:, half:], table[:, :half], table[:, half:]
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=1)


def run(op: Operator, task: Task, env: Env) -> None:
    """The heads of the task: query heads to q, keys and values to their position in the cache."""
    heads, kv_heads, head_dim = int(op.attrs["heads"]), int(op.attrs["kv_heads"]), int(op.attrs["head_dim"])
    eps, step, rows = float(op.attrs["eps"]), env.step, len(env.step.tokens)
    x, table = env.buffers[op.inputs[0]][:rows], env.buffers[op.inputs[1]][:rows]
    if "norm" in op.weights:
        x = rms_norm(x, env.weight(op.weights["norm"][0]), eps)
    q, cache = env.buffers[op.outputs[0]], env.caches[op.outputs[1]]
    for tile in range(task.tile_begin, task.tile_end):
        part = 0 if tile < heads else 1 if tile < heads + kv_heads else 2
        own = tile - (0, heads, heads + kv_heads)[part]
        columns = slice(own * head_dim, (own + 1) * head_dim)
        head = x @ env.weight(op.weights["weight"][part])[columns].T
        if "bias" in op.weights:
            head = head + env.weight(op.weights["bias"][part])[columns]
        norm = op.weights.get(("q_norm", "k_norm", "")[part])
        if norm:
            head = rms_norm(head, env.weight(norm[0]), eps)
        if part < 2:
            head = rotate(head, table)
        if part == 0:
            q[:rows, columns] = head
        else:
            cache[step.slots, step.positions, (tile - heads) * head_dim : (tile - heads + 1) * head_dim] = head
