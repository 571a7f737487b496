"""Embeddings in numpy."""

from __future__ import annotations

from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Operator
from mpk.tasks.base import Env
from mpk.tasks.packing import PANEL


def run(op: Operator, task: Task, env: Env) -> None:
    """x[row, tile columns] = weight[token of row, tile columns]."""
    columns = slice(task.tile_begin * PANEL, min(task.tile_end * PANEL, int(op.attrs["hidden"])))
    rows = len(env.step.tokens)
    env.buffers[op.outputs[0]][:rows, columns] = env.weight(op.weights["weight"][0])[env.step.tokens, columns]
