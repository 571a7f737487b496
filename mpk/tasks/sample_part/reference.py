"""Maxima of slices in numpy (the reference executor has no sampling options)."""

from __future__ import annotations

import numpy as np

from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Operator
from mpk.tasks.base import Env
from mpk.tasks.sample_part.sharing import PART_COLUMNS


def run(op: Operator, task: Task, env: Env) -> None:
    """parts[row, tile] = (largest logit, its token as the bits of an int32, and zeros) of the tile's slice."""
    size, vocab = int(op.attrs["slice"]), int(op.attrs["vocab"])
    logits, parts = env.buffers[op.inputs[0]], env.buffers[op.outputs[0]]
    for place in range(len(env.step.logit_rows)):
        for tile in range(task.tile_begin, task.tile_end):
            own = logits[place, tile * size : min((tile + 1) * size, vocab)]
            first = int(np.argmax(own))
            columns = slice(tile * PART_COLUMNS, (tile + 1) * PART_COLUMNS)
            parts[place, columns] = 0
            parts[place, columns][:2] = own[first], np.array([tile * size + first], np.int32).view(np.float32)[0]
