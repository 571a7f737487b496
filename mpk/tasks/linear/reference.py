"""Products with their norm and epilogue in numpy."""

from __future__ import annotations

import numpy as np

from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Operator
from mpk.tasks.base import Env
from mpk.tasks.linear.task import tile_columns


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight


def _matrices(op: Operator, env: Env, role: str) -> list[np.ndarray]:
    """Gate and up for `swiglu`, else all of a role stacked."""
    found = [env.weight(name) for name in op.weights.get(role, ())]
    return found if op.attrs["epilogue"] == "swiglu" or len(found) < 2 else [np.concatenate(found)]


def run(op: Operator, task: Task, env: Env) -> None:
    """Tile columns of the output: product, bias, then the epilogue."""
    rows = env.step.logit_rows if op.attrs["gather_logit_rows"] else np.arange(len(env.step.tokens))
    x = env.weight(op.weights["embedding"][0])[env.step.tokens[rows]] if "embedding" in op.weights else env.buffers[op.inputs[0]][rows]
    if "norm" in op.weights:
        x = rms_norm(x, env.weight(op.weights["norm"][0]), float(op.attrs["eps"]))
    width = tile_columns(op)
    columns = slice(task.tile_begin * width, min(task.tile_end * width, int(op.attrs["n"])))
    products = [x @ weight[columns].T for weight in _matrices(op, env, "weight")]
    for place, bias in enumerate(_matrices(op, env, "bias")):
        products[place] = products[place] + bias[columns]
    out = env.buffers[op.outputs[0]]
    if op.attrs["epilogue"] == "swiglu":
        gate, up = products
        with np.errstate(over="ignore"):
            out[: len(rows), columns] = gate / (1 + np.exp(-gate)) * up
    elif op.attrs["epilogue"] == "residual":
        out[: len(rows), columns] = env.buffers[op.inputs[1]][: len(rows), columns] + products[0]
    elif op.attrs["epilogue"] == "send":
        env.send(op, columns, products[0])
    else:
        out[: len(rows), columns] = products[0]
