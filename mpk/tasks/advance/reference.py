"""`advance` in numpy. The reference executor computes one step and does not feed back, so there is nothing to write."""

from __future__ import annotations

from dataclasses import dataclass

from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Operator
from mpk.tasks.base import Env
from mpk.tasks.head.sharing import MESSAGE_COLUMNS


def run(op: Operator, task: Task, env: Env) -> None:
    """Check that every sampled token belongs to the step; the caller plans steps itself."""
    choice = env.buffers[op.inputs[0]]
    sampled = {int(env.step.slots[r]) for r in env.step.logit_rows}
    width = MESSAGE_COLUMNS if "parts" in op.attrs else 1
    if any(choice[0, slot * width] < 0 for slot in sampled):
        raise ValueError(f"operator {op.name}: a slot with logits has no token")


@dataclass
class PlannedSequence:
    """What planning needs to know of a sequence: tokens known, positions computed, whether all logits are wanted."""

    length: int
    computed: int = 0
    all_logits: bool = False
    running: bool = True


def plan(sequences: list[PlannedSequence], max_rows: int) -> tuple[list[tuple[int, int, int, int]], list[int]]:
    """Segments (slot, first row, rows, position) of the next step and its logit rows: decode rows first, then prompts."""
    segments: list[tuple[int, int, int, int]] = []
    logit_rows: list[int] = []
    row = 0
    decoding = [i for i, s in enumerate(sequences) if s.running and s.length - s.computed == 1]
    prompts = [i for i, s in enumerate(sequences) if s.running and s.length - s.computed > 1]
    for slot in decoding + prompts:
        s = sequences[slot]
        rows = min(s.length - s.computed, max_rows - row)
        if rows == 0:
            break
        segments.append((slot, row, rows, s.computed))
        logit_rows += [row + r for r in range(rows) if s.all_logits or s.computed + r + 1 == s.length]
        row += rows
    return segments, logit_rows
