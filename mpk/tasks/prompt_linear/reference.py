"""Products with their epilogues in numpy."""

from __future__ import annotations

import numpy as np

from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Operator
from mpk.tasks.base import Env
from mpk.tasks.prompt import own_columns


def run(op: Operator, task: Task, env: Env) -> None:
    """The task's columns of the output."""
    epilogue, k, rows = op.attrs["epilogue"], int(op.attrs["k"]), len(env.step.tokens)
    x, out = env.buffers[op.inputs[0]][:rows, :k], env.buffers[op.outputs[0]]
    mine = own_columns(op, out.shape[1], task.tile_begin, task.tile_end)
    weights, biases = ([env.weight(name) for name in op.weights.get(role, ())] for role in ("weight", "bias"))
    if epilogue != "swiglu":
        weights, biases = [np.concatenate(weights)], [np.concatenate(biases)] if biases else []
    products = [x @ weight[mine].T for weight in weights]
    for place, bias in enumerate(biases):
        products[place] = products[place] + bias[mine]
    y = products[0]
    if epilogue == "swiglu":
        with np.errstate(over="ignore"):
            y = y / (1 + np.exp(-y)) * products[1]
    if epilogue == "residual":
        y = y + env.buffers[op.inputs[1]][:rows, mine]
    out[:rows, mine.start : mine.start + y.shape[1]] = y
    out[:rows, mine.start + y.shape[1] : mine.stop] = 0
