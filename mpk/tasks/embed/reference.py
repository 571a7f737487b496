"""Embeddings in numpy."""

from __future__ import annotations

import numpy as np

from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Operator
from mpk.tasks.base import Env
from mpk.tasks.messages import CONTROL_COLUMNS
from mpk.tasks.packing import PANEL


def run(op: Operator, task: Task, env: Env) -> None:
    """x[row, tile columns] = weight[token of row, tile columns]."""
    columns = slice(task.tile_begin * PANEL, min(task.tile_end * PANEL, int(op.attrs["hidden"])))
    rows = len(env.step.tokens)
    matrix = env.weight(op.weights["weight"][0])
    if "message" not in op.attrs:
        env.buffers[op.outputs[0]][:rows, columns] = matrix[env.step.tokens, columns]
        return
    share = int(op.attrs["vocab"])
    own = env.step.tokens // share == env.rank
    env.send(op, columns, np.where(own[:, None], matrix[np.where(own, env.step.tokens - env.rank * share, 0), columns], np.float32(0)))
    if columns.stop == int(op.attrs["hidden"]):
        env.send(op, slice(columns.stop, columns.stop + CONTROL_COLUMNS), np.zeros((rows, CONTROL_COLUMNS), np.float32))
