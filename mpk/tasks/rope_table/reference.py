"""The rotation table in numpy."""

from __future__ import annotations

import numpy as np

from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Operator
from mpk.tasks.base import Env


def run(op: Operator, task: Task, env: Env) -> None:
    """rope[row] = (cos, sin)(position * frequencies) * attention factor, the angle rounded to float32 as transformers does."""
    frequencies, factor = env.graph.config.rope.inverse_frequencies(int(op.attrs["head_dim"]))
    angles = env.step.positions.astype(np.float32)[:, None] * frequencies[None, :]
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * np.float32(factor)
    env.buffers[op.outputs[0]][: len(angles)] = table
