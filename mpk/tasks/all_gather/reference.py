"""The shares of all ranks side by side, in numpy."""

from __future__ import annotations

from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Operator
from mpk.tasks.base import Env
from mpk.tasks.linear.task import tile_columns


def run(op: Operator, task: Task, env: Env) -> None:
    """out[row, share of rank r] = part of rank r, columns of the tiles only."""
    n, width, rows = int(op.attrs["n"]), int(op.attrs["columns"]), len(env.step.logit_rows)
    first, last = task.tile_begin * tile_columns(op), min(task.tile_end * tile_columns(op), width)
    part, out = env.buffers[op.inputs[0]][:rows], env.buffers[op.outputs[0]]
    for rank in range(int(op.attrs["ranks"])):
        begin, end = rank * width + first, min(rank * width + last, n)
        if begin < end:
            out[:rows, begin:end] = part[:, begin:end]
