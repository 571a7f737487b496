"""Graphs of GPU targets step by step in emulation: one rank, and all of several, give the logits of the reference, from what their own instructions say."""

from __future__ import annotations

import numpy as np
import pytest

from mpk.models.config import DecoderConfig
from mpk.passes import cut_tiles
from mpk.runtime.interpreter import ReferenceProgram
from mpk.tasks.base import StepView, kind_of
from mpk.tasks.stages import stages_of
from tests.support.cuda_ranks import EmulatedProgram
from tests.test_shard import config, lower, model

CONFIG = config("Qwen3ForCausalLM", heads=8, kv_heads=2, hidden=64, intermediate=128, head_dim=16, vocab=131, tie_embeddings=True, qkv_bias=True,
                output_bias=True, mlp_bias=True)
HALVED = config("LlamaForCausalLM", heads=16, kv_heads=2, hidden=776, intermediate=400, head_dim=128, layers=1)  # on 48 SMs in tiles of 8 rows
# (slot, position, rows): prompts, one of which has no logits yet; then decode beside the rest of a prompt; then decode alone
STEPS: tuple[tuple[tuple[int, int, int], ...], ...] = (((0, 0, 5), (2, 0, 9)), ((0, 5, 1), (2, 9, 4)), ((2, 13, 1),))
LOGIT_ROWS = ((4,), (0, 4), (0,))


def steps() -> list[tuple[StepView, tuple[tuple[int, int, int], ...]]]:
    found = []
    for segments, logit_rows in zip(STEPS, LOGIT_ROWS, strict=True):
        slots, positions = (np.array(column, np.int32) for column in zip(*((s, p + r) for s, p, rows in segments for r in range(rows)), strict=True))
        tokens = np.random.default_rng(len(found)).integers(0, CONFIG.vocab_size, len(slots)).astype(np.int32)
        found.append((StepView(tokens, slots, positions, np.array(logit_rows, np.int32)), segments))
    return found


def logits(ranks: int, c: DecoderConfig = CONFIG, workers: int = 3) -> list[list[np.ndarray]]:
    """Of every step, of every rank."""
    graph = lower(c, ranks, target="h200", dtype="bf16", workers=workers)
    program = EmulatedProgram(graph, model(c).source)
    out = []
    for step, segments in steps():
        program.run(step, segments)
        out.append(program.logits(len(step.logit_rows)))
    return out


@pytest.fixture(scope="module")
def reference() -> list[np.ndarray]:
    return exact(CONFIG)


def exact(c: DecoderConfig) -> list[np.ndarray]:
    program = ReferenceProgram(lower(c, 1, target="h200", dtype="bf16", workers=3), model(c).source, max_batch=4, max_context=64)
    return [program._logits(program.run(program.env(step)))[: len(step.logit_rows)].copy() for step, _ in steps()]


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_steps_give_the_logits_of_the_reference_on_every_rank(ranks: int, reference: list[np.ndarray]) -> None:
    for place, (found, expected) in enumerate(zip(logits(ranks), reference, strict=True)):
        for own in found:
            assert np.array_equal(own.view(np.uint32), found[0].view(np.uint32)), f"step {place}: ranks differ"
        assert relative(found[0], expected) < 0.02, f"step {place}: {relative(found[0], expected)}"


@pytest.mark.parametrize(("ranks", "halved"), [(1, {"l0.qkv", "l0.o", "l0.gate_up"}), (2, {"l0.o", "logits_part"})])
def test_tiles_of_eight_rows_change_nothing(ranks: int, halved: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_tiles, "WORTH_US", 0.0)  # small matrices
    graph = lower(HALVED, ranks, target="h200", dtype="bf16", workers=48)
    assert {op.name for op in graph.tensor_graph.operators if kind_of(op).halves and stages_of(op).rows == 8} == halved
    for place, (found, expected) in enumerate(zip(logits(ranks, HALVED, 48), exact(HALVED), strict=True)):
        for own in found:
            assert np.array_equal(own.view(np.uint32), found[0].view(np.uint32)), f"step {place}: ranks differ"
        assert relative(found[0], expected) < 0.02, f"step {place}: {relative(found[0], expected)}"
