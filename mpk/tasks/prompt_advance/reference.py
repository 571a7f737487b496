"""`prompt_advance` in numpy. The reference executor computes one step and plans steps itself, so there is nothing to do."""

from __future__ import annotations

from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Operator
from mpk.tasks.base import Env


def run(op: Operator, task: Task, env: Env) -> None:
    """Nothing."""
