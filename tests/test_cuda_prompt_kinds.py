"""Kinds of prompt steps besides products, against numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from mpk.codegen import layout
from mpk.tasks.linear.reference import rms_norm
from mpk.tasks.packing import from_bf16, to_bf16
from mpk.tasks.qkv.reference import rotate
from tests.support.cuda_kinds import Machine, PagedCache, compiled, put_step, require_nvrtc
from tests.support.prompt_layout import unchunked

NAN = 0x7FC5
Segments = Sequence[tuple[int, int, int]]  # slot, position, rows


def step_of(segments: Segments, rng: np.random.Generator) -> tuple[int, int]:
    rows = sum(s[2] for s in segments)
    return rows, -(-rows // 8) * 8


def rope_table(segments: Segments, head_dim: int) -> np.ndarray:
    positions = np.concatenate([np.arange(p, p + n) for _, p, n in segments])
    angles = positions[:, None] * 100.0 ** (-np.arange(head_dim // 2) / head_dim)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "head_dim", "rows", "shares"), [(72, 8, 5, 2), (320, 64, 70, 3)])
def test_embeddings_and_rotations(hidden: int, head_dim: int, rows: int, shares: int) -> None:
    rng = np.random.default_rng(1)
    matrix, tokens = to_bf16(rng.standard_normal((50, hidden), np.float32)), rng.integers(0, 50, rows).astype(np.int32)
    frequencies = (100.0 ** (-np.arange(head_dim // 2) / head_dim)).astype(np.float32)
    m = Machine()
    m.put("weights", matrix.view(np.uint8).reshape(-1))
    m.put("params", np.append(frequencies, np.float32(1.5)).astype(np.float32))
    put_step(m, [(0, 1000, rows)], tokens, np.zeros(0, np.int32), max(rows, 32))
    m.buffers(x=np.full((rows + 1, hidden), NAN, np.uint16), rope=np.full((rows + 1, head_dim), np.nan, np.float32))
    m.run("prompt_embed", {"hidden": hidden, "head_dim": head_dim, "shares": shares}, ("x", "rope"), [(s, s + 1) for s in range(shares)])
    x, rope = m.get("x"), m.get("rope")
    assert (x[:rows] == matrix[tokens]).all() and (x[rows] == NAN).all()
    angles = (np.arange(1000, 1000 + rows, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
    assert np.abs(rope[:rows] - 1.5 * np.concatenate([np.cos(angles), np.sin(angles)], axis=1)).max() < 1e-5
    assert np.isnan(rope[rows]).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "rows", "shares"), [(72, 9, 1), (576, 40, 3), (1024, 17, 2)])
def test_norm(hidden: int, rows: int, shares: int) -> None:
    rng = np.random.default_rng(2)
    x, weight = to_bf16(rng.standard_normal((rows, hidden), np.float32)), rng.standard_normal(hidden).astype(np.float32)
    m = Machine(prompt_room=rows + 3)
    m.put("params", weight)
    put_step(m, [(0, 0, rows)], np.zeros(0, np.int32), np.zeros(0, np.int32), max(rows, 32))
    m.buffers(x=x, out=np.full((-(-hidden // 64), rows + 3, 64), NAN, np.uint16))
    constants = {"hidden": hidden, "eps": 1e-5, "shares": shares, "all_logits": False}
    m.run("prompt_norm", constants, ("x", "out"), [(s, s + 1) for s in range(shares)])
    out = m.get("out")
    found = from_bf16(unchunked(out, rows))
    exact = rms_norm(from_bf16(x), weight, 1e-5)
    assert np.abs(found[:, :hidden] - exact).max() <= 2.0**-8 * np.abs(exact).max()
    assert not found[:, hidden:].any() and (out[:, rows:] == NAN).all()


@pytest.mark.gpu
def test_norm_for_logits_takes_only_rows_of_sequences_that_want_all() -> None:
    rng = np.random.default_rng(3)
    x = to_bf16(rng.standard_normal((20, 64), np.float32))
    m = Machine(prompt_room=24, max_batch=2)
    m.put("params", np.ones(64, np.float32))
    put_step(m, [(0, 0, 12), (1, 0, 8)], np.zeros(0, np.int32), np.zeros(0, np.int32), 32)
    sequences = np.zeros(2, layout.dtype("Sequence"))
    sequences["all_logits"][1] = 1
    m.put("sequences", sequences)
    m.buffers(x=x, out=np.full((1, 24, 64), NAN, np.uint16))
    m.run("prompt_norm", {"hidden": 64, "eps": 1e-5, "shares": 1, "all_logits": True}, ("x", "out"), [(0, 1)])
    out = m.get("out")
    assert (out[:, :12] == NAN).all() and (out[:, 12:20] != NAN).all()


SHAPES = ((4, 2, 128, 0, False), (6, 2, 64, 0, True), (2, 1, 8, 5, False), (3, 1, 40, 70, True), (4, 4, 24, 0, False), (2, 1, 256, 0, True), (14, 2, 80, 64, False))
STEPS: tuple[Segments, ...] = (
    ((0, 0, 70),),
    ((0, 60, 200),),
    ((1, 63, 1), (0, 100, 130), (2, 0, 5)),
)


@pytest.mark.gpu
@pytest.mark.parametrize("segments", STEPS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window", "norm"), SHAPES)
def test_append_and_attention(heads: int, kv_heads: int, head_dim: int, window: int, norm: bool, segments: Segments) -> None:
    rng = np.random.default_rng(heads * head_dim)
    rows, room = step_of(segments, rng)
    context, width = 320, (heads + 2 * kv_heads) * head_dim
    qkv = to_bf16(rng.standard_normal((rows, width), np.float32))
    rope = rope_table(segments, head_dim)
    norms = (1 + 0.1 * rng.standard_normal((2, head_dim))).astype(np.float32)  # of queries, of keys
    cache = PagedCache(3, context, kv_heads, head_dim)
    past = {slot: from_bf16(to_bf16(rng.standard_normal((position, 2 * kv_heads * head_dim), np.float32))) for slot, position, _ in segments}
    for slot, tokens in past.items():
        for position, token in enumerate(tokens):
            cache.put(slot, position, token)
    m = Machine(prompt_room=room, max_batch=3, max_context=context, max_pages=cache.table.shape[1], num_pages=cache.table.size)
    put_step(m, segments, np.zeros(0, np.int32), np.zeros(0, np.int32), max(rows, 32))
    m.put("page_table", cache.table)
    m.put("kv", cache.pages)
    columns = heads * head_dim
    m.buffers(qkv=qkv, rope=rope, out=np.full((-(-columns // 64), room, 64), NAN, np.uint16))
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "eps": 1e-6}
    m.put("params", norms[1])
    m.run("prompt_append", {**sizes, "k_norm": norm, "shares": 3}, ("qkv", "rope"), [(s, s + 1) for s in range(3)])
    cache.pages[...] = m.get("kv")

    turned = from_bf16(qkv).reshape(rows, heads + 2 * kv_heads, head_dim).copy()
    for head in range(heads + kv_heads):
        x = rms_norm(turned[:, head], norms[int(head >= heads)], 1e-6) if norm else turned[:, head]
        turned[:, head] = from_bf16(to_bf16(rotate(x, rope)))
    row = 0
    for slot, position, count in segments:
        for r in range(count):
            exact = turned[row + r, heads:].reshape(-1)
            assert np.abs(cache.get(slot, position + r) - exact).max() <= 2.0**-7 * np.abs(exact).max()
        for p, token in enumerate(past[slot]):
            assert (cache.get(slot, p) == token).all(), "the past has changed"
        row += count

    m.put("params", norms[0])
    m.run("prompt_attention", {**sizes, "window": window, "scale": head_dim**-0.5, "q_norm": norm, "shares": 4}, ("qkv", "rope", "out"),
          [(s, s + 1) for s in range(4)])
    out = m.get("out")
    found = from_bf16(unchunked(out, rows))
    assert not found[:, columns:].any() and (out[:, rows:] == NAN).all()
    row = 0
    for slot, position, count in segments:
        tokens = np.stack([cache.get(slot, p) for p in range(position + count)]).reshape(-1, 2, kv_heads, head_dim)
        for head in range(heads):
            scores = turned[row : row + count, head] @ tokens[:, 0, head // (heads // kv_heads)].T * head_dim**-0.5
            own, at = np.arange(position, position + count)[:, None], np.arange(position + count)[None]
            scores[(at > own) | ((window > 0) & (at <= own - window))] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            exact = weights @ tokens[:, 1, head // (heads // kv_heads)] / weights.sum(axis=1, keepdims=True)
            mine = found[row : row + count, head * head_dim : (head + 1) * head_dim]
            assert np.linalg.norm(mine - exact) <= 1e-2 * np.linalg.norm(exact), f"slot {slot} head {head}"
        row += count


@pytest.mark.parametrize(("head_dim", "norm"), [(64, False), (128, True), (256, True), (40, False)])
def test_attention_stays_asynchronous_and_in_registers(head_dim: int, norm: bool) -> None:
    require_nvrtc()
    cubin = compiled("prompt_attention", {"heads": 8, "kv_heads": 2, "head_dim": head_dim, "window": 0, "scale": 0.1, "eps": 1e-6, "q_norm": norm, "shares": 132})
    assert cubin.losses == ()
    assert cubin.resources["run_kind"].spill_stores <= (0 if head_dim <= 128 else 512)
