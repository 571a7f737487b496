"""Attention in numpy, with the chains and partial results of the real one."""

from __future__ import annotations

import numpy as np

from mpk.codegen.layout import KV_PAGE_TOKENS
from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Operator
from mpk.tasks.attention.sharing import owner_of_row, rows_are_shared
from mpk.tasks.base import Env, StepView


def segments(step: StepView) -> list[tuple[int, int]]:
    """(first row, rows) of every run of consecutive positions of one sequence."""
    begins = [r for r in range(len(step.slots))
              if r == 0 or step.slots[r] != step.slots[r - 1] or step.positions[r] != step.positions[r - 1] + 1]
    return [(a, b - a) for a, b in zip(begins, [*begins[1:], len(step.slots)], strict=True)]


def partial_softmax(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(sums [group, head_dim], maximum [group], sum of exponentials [group]) of scores [group, tokens], values [tokens, head_dim]."""
    if scores.shape[1] == 0:
        return np.zeros((len(scores), values.shape[1]), np.float32), np.full(len(scores), -np.inf, np.float32), np.zeros(len(scores), np.float32)
    top = scores.max(axis=1)
    weights = np.exp(scores - top[:, None])
    return weights @ values, top, weights.sum(axis=1)


def run(op: Operator, task: Task, env: Env) -> None:
    """Each row's share of the softmax over its context, or all of it where one split has it to itself."""
    a = op.attrs
    heads, kv_heads, head_dim, splits, window = (int(a[n]) for n in ("heads", "kv_heads", "head_dim", "splits", "window"))
    group, step = heads // kv_heads, env.step
    q, cache, out = env.buffers[op.inputs[0]], env.caches[op.inputs[1]], env.buffers[op.outputs[0]]
    for tile in range(task.tile_begin, task.tile_end):
        kv, split = divmod(tile, splits)
        for first, count in segments(step):
            shared = rows_are_shared(count, splits)
            for row in range(first, first + count):
                if shared and owner_of_row(row - first, splits) != split:
                    continue
                position = int(step.positions[row])
                seen = np.arange(max(0, position - window + 1) if window else 0, position + 1)
                if splits > 1 and not shared:
                    seen = seen[seen // KV_PAGE_TOKENS % splits == split]
                tokens = cache[step.slots[row], seen]
                keys, values = (tokens[:, h * head_dim : (h + 1) * head_dim] for h in (kv, kv_heads + kv))
                queries = q[row, kv * group * head_dim : (kv + 1) * group * head_dim].reshape(group, head_dim)
                sums, top, total = partial_softmax(queries @ keys.T * np.float32(a["scale"]), values)
                if splits == 1:
                    out[row, kv * group * head_dim : (kv + 1) * group * head_dim] = (sums / total[:, None]).reshape(-1)
                    continue
                if shared:
                    sums, top, total = sums / total[:, None], np.zeros_like(top), np.ones_like(total)
                columns = group * (head_dim + 2)
                out[row, tile * columns : (tile + 1) * columns] = np.concatenate([sums, top[:, None], total[:, None]], axis=1).reshape(-1)
