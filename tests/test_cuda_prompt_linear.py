"""Products of prompt steps: against numpy, for sizes that do and do not fill tiles."""

from __future__ import annotations

import numpy as np
import pytest

from mpk.codegen import layout
from mpk.tasks.packing import from_bf16, to_bf16
from tests.support.cuda_kinds import Machine, compiled, put_step, require_nvrtc
from tests.support.prompt_layout import chunked, gated_rows, packed, unchunked

STORE, RESIDUAL, SWIGLU, LOGITS = range(4)
NAN = np.uint16(0x7FC5)


def sizes(n: int, k: int, epilogue: int, bias: np.ndarray, shares: int) -> np.ndarray:
    head = np.zeros(16, np.float32)
    head[:5] = n, k, epilogue, bias.size > 0, shares
    return np.concatenate([head, bias])


def test_products_stay_asynchronous_and_in_registers() -> None:
    require_nvrtc()
    cubin = compiled("prompt_linear", {})
    assert cubin.losses == (), "the tensor cores would wait after each product"
    assert cubin.resources["run_kind"].spill_stores == cubin.resources["run_kind"].spill_loads == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k", "rows", "shares"), [(128, 128, 16, 1), (200, 192, 130, 3), (8, 64, 1, 1), (272, 576, 300, 2), (320, 72, 257, 4), (40, 1984, 9, 2), (24, 1096, 5, 1)])
@pytest.mark.parametrize("tile_rows", [16, 8])
@pytest.mark.parametrize("epilogue", [STORE, RESIDUAL, SWIGLU])
@pytest.mark.parametrize("biased", [False, True])
def test_product(n: int, k: int, rows: int, shares: int, tile_rows: int, epilogue: int, biased: bool) -> None:
    rng = np.random.default_rng(n + rows)
    room = -(-rows // 8) * 8 + 8
    matrices = [to_bf16(rng.standard_normal((n, k), np.float32) * np.float32(k**-0.5)) for _ in range(2 if epilogue == SWIGLU else 1)]
    x, old = to_bf16(rng.standard_normal((rows, k), np.float32)), to_bf16(rng.standard_normal((rows, n), np.float32))
    bias = [np.pad(rng.standard_normal(n).astype(np.float32), (0, -n % 16)) if biased else np.zeros(0, np.float32) for _ in matrices]
    fragments = packed(gated_rows(*matrices, turn=tile_rows // 2) if epilogue == SWIGLU else matrices[0], tile_rows)
    order = rng.permutation(fragments.shape[0] * fragments.shape[1])  # stages stand anywhere
    memory = np.empty_like(fragments.reshape(len(order), -1))
    memory[order] = fragments.reshape(len(order), -1)
    m = Machine(prompt_room=room)
    m.put("weights", memory.view(np.uint8).reshape(-1))
    m.put("places", np.concatenate([np.full(5, -1, np.int64), [tile_rows], order.astype(np.int64) * memory.shape[1] * 2]))
    m.put("params", sizes(n, k, epilogue, np.concatenate(bias), shares))
    put_step(m, [(0, 0, rows)], np.zeros(0, np.int32), np.zeros(0, np.int32), max(rows, 32))
    out = np.full((-(-n // 64), room, 64) if epilogue == SWIGLU else (room, n), NAN, np.uint16)
    m.buffers(input=chunked(x, room), output=out, old=old)
    m.run("prompt_linear", {}, ("input", "output", "old"), [(s, s + 1) for s in range(shares)], iargs=(5, 0))
    products = [from_bf16(x) @ from_bf16(w).T + (b[:n] if biased else 0) for w, b in zip(matrices, bias, strict=True)]
    exact = products[0]
    if epilogue == RESIDUAL:
        exact = exact + from_bf16(old)
    if epilogue == SWIGLU:
        exact = products[0] / (1 + np.exp(-products[0])) * products[1]
        found = unchunked(m.get("output"), rows)
        assert not found[:, n:].any(), "columns beyond the matrix"
        found = found[:, :n]
    else:
        found = m.get("output")[:rows]
        assert (m.get("output")[rows:] == NAN).all(), "rows beyond the step"
    assert np.abs(from_bf16(found) - exact).max() <= 2.0**-8 * np.abs(exact).max() + 1e-4


@pytest.mark.gpu
def test_logits_go_to_sequences_that_want_all() -> None:
    n, k, rows, room = 77, 64, 40, 48
    rng = np.random.default_rng(5)
    w, x = to_bf16(rng.standard_normal((n, k), np.float32)), to_bf16(rng.standard_normal((rows, k), np.float32))
    fragments = packed(w)
    m = Machine(prompt_room=room, max_batch=3)
    m.put("weights", fragments.view(np.uint8).reshape(-1))
    m.put("places", np.concatenate([[16], np.arange(fragments.shape[0] * fragments.shape[1], dtype=np.int64) * fragments.shape[2] * 2]))
    m.put("params", sizes(n, k, LOGITS, np.zeros(0, np.float32), 2))
    segments = [(2, 3, 15), (0, 0, 25)]
    put_step(m, segments, np.zeros(0, np.int32), np.zeros(0, np.int32), rows)
    sequences = np.zeros(3, layout.dtype("Sequence"))
    sequences["all_logits"][0] = 1
    m.put("sequences", sequences)
    m.put("logits_out", np.full((3, 30, n), np.nan, np.float32))
    m.launch["logits_out_positions"] = 30
    m.buffers(input=chunked(x, room))
    m.run("prompt_linear", {}, ("input",), [(0, 1), (1, 2)])
    found, exact = m.get("logits_out"), from_bf16(x) @ from_bf16(w).T
    assert np.abs(found[0, :25] - exact[15:]).max() < 1e-4
    assert np.isnan(found[0, 25:]).all() and np.isnan(found[1:]).all()
