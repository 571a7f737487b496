"""Attention of prompt steps in numpy."""

from __future__ import annotations

import numpy as np

from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Operator
from mpk.tasks.attention.reference import partial_softmax
from mpk.tasks.base import Env
from mpk.tasks.prompt import own_columns
from mpk.tasks.rotary_attention.reference import turned


def run(op: Operator, task: Task, env: Env) -> None:
    """The task's columns of the result; those beyond the heads are zero."""
    heads, kv_heads, head_dim, window = (int(op.attrs[n]) for n in ("heads", "kv_heads", "head_dim", "window"))
    step, cache, out = env.step, env.caches[op.inputs[2]], env.buffers[op.outputs[0]]
    rows, mine = len(step.tokens), own_columns(op, out.shape[1], task.tile_begin, task.tile_end)
    result = np.zeros((rows, out.shape[1]), np.float32)
    for head in range(mine.start // head_dim, min(-(-mine.stop // head_dim), heads)):
        queries, kv = turned(op, env, head, "q_norm"), head // (heads // kv_heads)
        for row in range(rows):
            own = int(step.positions[row])
            seen = cache[step.slots[row], max(own - window + 1, 0) if window else 0 : own + 1]
            keys, values = (seen[:, h * head_dim : (h + 1) * head_dim] for h in (kv, kv_heads + kv))
            sums, _, total = partial_softmax(queries[row : row + 1] @ keys.T * np.float32(op.attrs["scale"]), values)
            result[row, head * head_dim : (head + 1) * head_dim] = sums[0] / total[0]
    out[:rows, mine] = result[:, mine]
