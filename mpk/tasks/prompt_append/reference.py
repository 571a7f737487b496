"""Append to the cache in numpy."""

from __future__ import annotations

import numpy as np

from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Operator
from mpk.tasks.base import Env
from mpk.tasks.prompt import own_columns
from mpk.tasks.rotary_attention.reference import turned


def run(op: Operator, task: Task, env: Env) -> None:
    """The task's columns of the cache (key heads, then value heads), at the step's positions."""
    heads, kv_heads, head_dim = (int(op.attrs[n]) for n in ("heads", "kv_heads", "head_dim"))
    step, cache = env.step, env.caches[op.outputs[0]]
    keys = [turned(op, env, heads + head, "k_norm") for head in range(kv_heads)]
    values = env.buffers[op.inputs[0]][: len(step.tokens), (heads + kv_heads) * head_dim :]
    mine = own_columns(op, 2 * kv_heads * head_dim, task.tile_begin, task.tile_end)
    cache[step.slots, step.positions, mine] = np.concatenate([*keys, values], axis=1)[:, mine]
