"""The sampling rules in numpy, written for reading: every filter sorts, nothing is fused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Operator
from mpk.tasks.base import Env
from mpk.tasks.sample.options import TokenOptions
from mpk.tasks.sample.task import choice_column


def run(op: Operator, task: Task, env: Env) -> None:
    """Greedy choice (the reference executor has no sampling options): the slot's column of choice = argmax of its logits, or -1."""
    logits, choice = env.buffers[op.inputs[0]], env.buffers[op.outputs[0]]
    choice[0, choice_column(op, task.tile_begin) : choice_column(op, task.tile_end)] = -1
    for place, row in enumerate(env.step.logit_rows):
        slot = int(env.step.slots[row])
        if task.tile_begin <= slot < task.tile_end:
            choice[0, choice_column(op, slot)] = np.argmax(logits[place])


def penalized(logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], o: TokenOptions) -> np.ndarray:
    """Logits float64 [vocab] after repetition, presence and frequency penalties."""
    x = logits.astype(np.float64)
    seen = np.unique(np.asarray([*prompt, *output], np.int64))
    x[seen] = np.where(x[seen] < 0, x[seen] * o.repetition_penalty, x[seen] / o.repetition_penalty)
    counts = np.bincount(np.asarray(output, np.int64), minlength=len(x))
    return x - o.frequency_penalty * counts - o.presence_penalty * (counts > 0)


def distribution(logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], o: TokenOptions) -> np.ndarray:
    """Probabilities float64 [vocab] from which the token is drawn (temperature > 0)."""
    x = penalized(logits, prompt, output, o) / o.temperature
    if 0 < o.top_k < len(x):
        x = np.where(x >= np.sort(x)[-o.top_k], x, -np.inf)
    p = np.exp(x - x.max())
    p /= p.sum()
    if o.top_p < 1:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= o.top_p]] = 0
    p = np.where(p >= o.min_p * p.max(), p, 0)
    return p / p.sum()


def choose(logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], o: TokenOptions) -> int:
    """The token that the program chooses."""
    if o.temperature == 0:
        return int(np.argmax(penalized(logits, prompt, output, o)))
    cumulative = np.cumsum(distribution(logits, prompt, output, o))
    u = philox_uniform(o.seed, len(prompt) + len(output))
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Ten rounds of Philox4x32 (Salmon et al., SC 2011): four 32-bit words from a counter of four and a key of two."""
    c, k, mask = list(counter), list(key), 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & mask, (a >> 32) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def philox_uniform(seed: int, position: int) -> float:
    """Uniform in [0, 1), 53 bits, from the seed of a sequence and the position of the token that is drawn."""
    r = philox4x32([position & 0xFFFFFFFF, position >> 32, 0, 0], [seed & 0xFFFFFFFF, seed >> 32])
    return float((r[0] << 32 | r[1]) >> 11) * 2.0**-53
