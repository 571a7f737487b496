"""Logits and the maxima of their slices in numpy (the reference executor has no sampling options)."""

from __future__ import annotations

import numpy as np

from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Operator
from mpk.tasks.base import Env
from mpk.tasks.head.sharing import MESSAGE_COLUMNS
from mpk.tasks.linear import reference as linear
from mpk.tasks.packing import PANEL


def run(op: Operator, task: Task, env: Env) -> None:
    """The product, then tops[row, slice] = (largest logit, its token as the bits of an int32, and zeros); the other outputs are zeros."""
    linear.run(op, task, env)
    size = int(op.attrs["slice"])
    for region in task.writes[2:]:
        env.buffers[region.buffer][:, region.begin : region.end] = 0
    put_tops(op, env, op.outputs[0], op.outputs[1], range(task.tile_begin * PANEL // size, -(-task.tile_end * PANEL // size)))


def put_tops(op: Operator, env: Env, of: str, to: str, parts: range) -> None:
    """The maxima of slices of the logits `of`, in the buffer `to`."""
    logits, tops, size = env.buffers[of], env.buffers[to], int(op.attrs["slice"])
    vocab = logits.shape[1]
    for place in range(len(env.step.logit_rows)):
        for part in parts:
            own = logits[place, part * size : min((part + 1) * size, vocab)]
            first = int(np.argmax(own))
            tops[place, part * MESSAGE_COLUMNS : (part + 1) * MESSAGE_COLUMNS] = 0
            tops[place, part * MESSAGE_COLUMNS : part * MESSAGE_COLUMNS + 2] = own[first], np.array([part * size + first], np.int32).view(np.float32)[0]
