"""The merge of partial softmaxes in numpy, a piece of a head's columns at a time."""

from __future__ import annotations

import numpy as np

from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Operator
from mpk.tasks.attention.reference import segments
from mpk.tasks.attention.sharing import owner_of_row, rows_are_shared
from mpk.tasks.base import Env


def run(op: Operator, task: Task, env: Env) -> None:
    """attn[row, piece of a head] = sum of the splits' sums, each scaled to the common maximum, over the scaled totals."""
    heads, kv_heads, head_dim, splits = (int(op.attrs[n]) for n in ("heads", "kv_heads", "head_dim", "splits"))
    group, pieces = heads // kv_heads, int(op.attrs.get("pieces", 1))
    width = head_dim // pieces
    share_rows = bool(op.attrs.get("share_rows", True))  # whether the attention before gives long segments out by rows (sharing.py)
    out = env.buffers[op.outputs[0]]
    for first, count in segments(env.step):
        shared = share_rows and rows_are_shared(count, splits)
        for row in range(first, first + count):
            partial = env.buffers[op.inputs[0]][row].reshape(kv_heads, splits, group, -1)
            chosen = [owner_of_row(row - first, splits)] if shared else list(range(splits))
            for tile in range(task.tile_begin, task.tile_end):
                head, piece = divmod(tile, pieces)
                parts, statistics = partial[head // group, chosen, head % group], head_dim + 2 * piece
                scale = np.exp(parts[:, statistics] - parts[:, statistics].max())
                total = (scale * parts[:, statistics + 1]).sum()
                sums = (scale[:, None] * parts[:, piece * width : (piece + 1) * width]).sum(axis=0)
                out[row, tile * width : (tile + 1) * width] = sums / total
