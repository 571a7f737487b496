"""The merge of partial softmaxes in numpy."""

from __future__ import annotations

import numpy as np

from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Operator
from mpk.tasks.attention.reference import segments
from mpk.tasks.attention.sharing import owner_of_row, rows_are_shared
from mpk.tasks.base import Env


def run(op: Operator, task: Task, env: Env) -> None:
    """attn[row, head] = sum of the splits' sums, each scaled to the common maximum, over the scaled totals."""
    heads, kv_heads, head_dim, splits = (int(op.attrs[n]) for n in ("heads", "kv_heads", "head_dim", "splits"))
    group = heads // kv_heads
    share_rows = bool(op.attrs.get("share_rows", True))  # whether the attention before gives long segments out by rows (sharing.py)
    out = env.buffers[op.outputs[0]]
    for first, count in segments(env.step):
        shared = share_rows and rows_are_shared(count, splits)
        for row in range(first, first + count):
            partial = env.buffers[op.inputs[0]][row].reshape(kv_heads, splits, group, -1)
            chosen = [owner_of_row(row - first, splits)] if shared else list(range(splits))
            for head in range(task.tile_begin, task.tile_end):
                parts = partial[head // group, chosen, head % group]
                scale = np.exp(parts[:, head_dim] - parts[:, head_dim].max())
                total = (scale * parts[:, head_dim + 1]).sum()
                out[row, head * head_dim : (head + 1) * head_dim] = (scale[:, None] * parts[:, :head_dim]).sum(axis=0) / total
