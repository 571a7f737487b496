"""Embeddings and rotations in numpy."""

from __future__ import annotations

import numpy as np

from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Operator
from mpk.tasks.base import Env
from mpk.tasks.prompt import own_columns


def run(op: Operator, task: Task, env: Env) -> None:
    """The task's columns of x and of the table."""
    x, rope = (env.buffers[name] for name in op.outputs)
    rows = len(env.step.tokens)
    mine = own_columns(op, x.shape[1], task.tile_begin, task.tile_end)
    x[:rows, mine] = env.weight(op.weights["weight"][0])[env.step.tokens, mine]
    frequencies, factor = env.graph.config.rope.inverse_frequencies(int(op.attrs["head_dim"]))
    angles = env.step.positions[:, None].astype(np.float32) * np.asarray(frequencies, np.float32)
    mine = own_columns(op, rope.shape[1], task.tile_begin, task.tile_end)
    rope[:rows, mine] = (np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * np.float32(factor))[:, mine]
