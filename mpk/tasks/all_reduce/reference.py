"""The sum over ranks in numpy."""

from __future__ import annotations

import numpy as np

from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Operator
from mpk.tasks.all_reduce.task import own_columns
from mpk.tasks.base import Env


def run(op: Operator, task: Task, env: Env) -> None:
    """x[row, tile columns] (+)= part of rank 0 + part of rank 1 + ..."""
    n, width, rows = int(op.attrs["n"]), int(op.attrs["columns"]), len(env.step.tokens)
    columns = slice(*own_columns(op, task.tile_begin, task.tile_end))
    parts = env.buffers[op.inputs[0]][:rows].reshape(rows, int(op.attrs["ranks"]), width)
    total = parts[:, 0, columns].astype(np.float32)
    for rank in range(1, int(op.attrs["ranks"])):
        total = total + parts[:, rank, columns]
    before = env.buffers[op.inputs[1]][:rows, columns] if op.attrs["residual"] else np.float32(0)
    env.buffers[op.outputs[0]][:rows, columns] = before + total
    if op.attrs["control"] and columns.stop == n:
        env.buffers[op.outputs[1]][0, 0] = parts[0, 0, n]
