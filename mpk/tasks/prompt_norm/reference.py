"""RMS norm in numpy."""

from __future__ import annotations

import numpy as np

from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Operator
from mpk.tasks.base import Env
from mpk.tasks.linear.reference import rms_norm
from mpk.tasks.prompt import own_columns


def run(op: Operator, task: Task, env: Env) -> None:
    """The task's columns; those beyond the row are zero."""
    x, out = env.buffers[op.inputs[0]], env.buffers[op.outputs[0]]
    rows, mine = len(env.step.tokens), own_columns(op, out.shape[1], task.tile_begin, task.tile_end)
    normed = rms_norm(x[:rows], env.weight(op.weights["norm"][0]), float(op.attrs["eps"]))
    out[:rows, mine] = np.pad(normed, ((0, 0), (0, out.shape[1] - normed.shape[1])))[:, mine]
