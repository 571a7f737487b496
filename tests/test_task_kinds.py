"""Every task body of the C++ back end against its numpy reference, alone: values, regions, and bits that do not depend on company."""

from __future__ import annotations

import copy
import ctypes
from dataclasses import replace

import numpy as np
import pytest

from mpk.codegen.layout import KV_PAGE_TOKENS
from mpk.graph.tensor_graph import TensorGraph, Value
from mpk.tasks.attention.cases import CASES as ATTENTION
from mpk.tasks.attention_combine.cases import CASES as COMBINE
from mpk.tasks.base import kind_of
from mpk.tasks.case import Case, Segments
from mpk.tasks.linear.cases import CASES as LINEAR
from mpk.tasks.packing import from_bf16, panel_view, round_to, to_bf16
from mpk.tasks.qkv.cases import CASES as QKV
from tests.support.task_kinds import DTYPES, POISON, Run, all_cases, bodies

CASES = all_cases()
PATHS = pytest.mark.parametrize("portable", [False, True], ids=["native", "portable"])
TOLERANCE = 3e-6  # relative L2: float32 sums of up to 1048 terms in another order


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint32)


def distance(actual: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 distance over entries where the expected one is finite; infinite where the others differ."""
    finite = np.isfinite(expected)
    if not np.array_equal(actual[~finite], expected[~finite]):
        return float("inf")
    return float(np.linalg.norm(actual[finite] - expected[finite]) / max(np.linalg.norm(expected[finite]), 1e-30))


def ranges(tiles: int) -> list[tuple[int, int]]:
    """All tiles; and an inner range, whose surroundings must stay as they are."""
    return [(0, tiles)] if tiles < 3 else [(0, tiles), (tiles // 3, tiles - 1)]


def check_buffers(run: Run, begin: int, end: int, actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    case, kind = run.case, run.kind
    rows = len(run.step.logit_rows) if case.op.attrs.get("gather_logit_rows") else run.rows
    for name, before in run.buffers.items():
        written = np.zeros(before.shape, bool)
        for region in kind.writes(case.op, case.graph, begin, end):
            if region.buffer == name:
                written[:rows, region.begin : region.end] = True
        assert np.array_equal(bits(actual[name])[~written], bits(before)[~written]), f"{case.label}: {name} changed outside its region"
        own = actual[name][written], expected[name][written]
        if case.op.kind == "attention" and int(case.op.attrs["splits"]) > 1:  # places of splits that do not own a row stay poisoned
            unowned = bits(own[1]) == bits(np.array([POISON]))[0]
            assert np.array_equal(bits(own[0])[unowned], bits(own[1])[unowned])
            own = own[0][~unowned], own[1][~unowned]
        assert distance(*own) < TOLERANCE, f"{case.label} {run.dtype} {run.segments} tiles {begin}:{end}: {name}"


def plain_end(run: Run, slot: int) -> int:
    """The last position of a sequence in the step."""
    return int(run.step.positions[run.step.slots == slot].max())


def check_cache(run: Run, begin: int, end: int, pages: np.ndarray, plain: np.ndarray) -> None:
    """The pages hold what the reference wrote, within the cache's rounding; everything else is bit for bit as before."""
    expected = copy.deepcopy(run.cache)
    assert expected is not None and run.cache is not None
    actual = replace(expected)
    actual.pages = pages
    heads = int(run.case.op.attrs["heads"])
    own = range(max(begin - heads, 0), max(end - heads, 0)) if run.case.op.kind == "qkv" else range(0)
    rounding = 2.0**-7 if run.dtype == "bf16" else 1e-5
    for slot, position in zip(run.step.slots.tolist(), run.step.positions.tolist(), strict=True):
        for head in own:
            wanted = plain[slot, position, head * expected.head_dim : (head + 1) * expected.head_dim]
            np.testing.assert_allclose(actual.get(slot, position, head), wanted, rounding, 2e-5)
            if head >= expected.kv_heads and position == plain_end(run, slot) and position % 2 == 0:
                assert not actual.get(slot, position + 1, head).any(), "the odd token of the last pair must be 0 until it comes"
        expected.put(slot, position, plain[slot, position], own)
    untouched = expected.pages == run.cache.pages
    assert np.array_equal(pages[untouched], run.cache.pages[untouched]), f"{run.case.label}: cache changed outside its region"


@PATHS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.label)
def test_body_computes_what_its_reference_does_and_writes_only_its_regions(case: Case, dtype: str, portable: bool) -> None:
    for segments in case.steps:
        run = Run(case, dtype, segments)
        for begin, end in ranges(run.kind.tiles(case.op, case.graph)):
            actual, pages = run.execute(portable, begin, end)
            expected, plain = run.reference(begin, end)
            check_buffers(run, begin, end, actual, expected)
            if pages is not None and plain is not None:
                check_cache(run, begin, end, pages, plain)


# ---- bits do not depend on the other rows of the step
@PATHS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [c for c in (*LINEAR, *QKV) if not c.op.attrs.get("gather_logit_rows")], ids=lambda c: c.label)
def test_a_row_of_a_product_has_the_same_bits_for_any_number_of_rows(case: Case, dtype: str, portable: bool) -> None:
    most = 33
    tiles = kind_of(case.op).tiles(case.op, case.graph)
    out = case.op.outputs[0]
    whole, whole_pages = Run(case, dtype, ((0, 3, most),), max_rows=most).execute(portable, 0, tiles)
    for rows in (1, 2, 3, 4, 5, 6, 7, 12, 16, 20):
        part, pages = Run(case, dtype, ((0, 3, rows),), max_rows=most).execute(portable, 0, tiles)
        assert np.array_equal(bits(part[out][:rows]), bits(whole[out][:rows])), f"{rows} rows"
        if pages is not None and whole_pages is not None:
            cache = replace(Run(case, dtype, ((0, 3, most),), max_rows=most).cache)
            kv = [(0, 3 + r, head) for r in range(rows) for head in range(2 * cache.kv_heads)]
            cache.pages = whole_pages
            wanted = [cache.get(*place) for place in kv]
            cache.pages = pages
            assert np.array_equal([cache.get(*place) for place in kv], wanted), f"cache, {rows} rows"


def attention_result(case: Case, dtype: str, segments: Segments, portable: bool) -> np.ndarray:
    """attn [rows, heads * head_dim], through `attention_combine` where there are splits; queries depend on the position only."""
    a = case.op.attrs
    run = Run(case, dtype, segments)
    for row in range(run.rows):
        rng = np.random.default_rng(int(1000 * run.step.slots[row] + run.step.positions[row]))
        run.buffers["q"][row] = rng.standard_normal(run.buffers["q"].shape[1], dtype=np.float32)
    out, _ = run.execute(portable, 0, run.kind.tiles(case.op, case.graph))
    if int(a["splits"]) == 1:
        return out["out"][: run.rows]
    combine = next(c for c in COMBINE if all(c.op.attrs[n] == a[n] for n in ("heads", "kv_heads", "head_dim", "splits")))
    merge = Run(combine, dtype, segments)
    merge.buffers["partial"] = out["out"]
    return merge.execute(portable, 0, merge.kind.tiles(combine.op, combine.graph))[0]["out"][: run.rows]


def whole_attention(case: Case, dtype: str, segments: Segments) -> np.ndarray:
    """The same by the references without splits."""
    width = int(case.op.attrs["heads"]) * int(case.op.attrs["head_dim"])
    values = {**case.graph.values, "out": Value("out", width)}
    op = replace(case.op, attrs={**case.op.attrs, "splits": 1})
    run = Run(replace(case, op=op, graph=TensorGraph(case.graph.config, values, {}, [op])), dtype, segments)
    for row in range(run.rows):
        rng = np.random.default_rng(int(1000 * run.step.slots[row] + run.step.positions[row]))
        run.buffers["q"][row] = rng.standard_normal(run.buffers["q"].shape[1], dtype=np.float32)
    return run.reference(0, run.kind.tiles(op, case.graph))[0]["out"][: run.rows]


@PATHS
@pytest.mark.parametrize("case", ATTENTION, ids=lambda c: c.label)
def test_attention_of_a_row_has_the_same_bits_in_a_chunk_alone_and_in_a_batch(case: Case, portable: bool) -> None:
    chunk = attention_result(case, "bf16", ((0, 50, 100),), portable)
    assert distance(chunk, whole_attention(case, "bf16", ((0, 50, 100),))) < TOLERANCE
    for row in (0, 13, 14, 40, 78, 99):
        alone = attention_result(case, "bf16", ((0, 50 + row, 1),), portable)
        assert np.array_equal(bits(alone[0]), bits(chunk[row])), f"position {50 + row}"
    batch = attention_result(case, "bf16", ((1, 7, 1), (0, 90, 40), (2, 64, 20)), portable)
    assert np.array_equal(bits(batch[1:41]), bits(chunk[40:80]))


# ---- parts
@PATHS
def test_exp_is_accurate_to_float32_and_exact_where_softmax_needs_it(portable: bool) -> None:
    special = [0.0, -0.0, -88.0, -1e30, -np.inf, np.nan, 1000.0, *[0.0] * 6]
    x = np.concatenate([np.linspace(-87.2, 87.9, 100_003), special]).astype(np.float32)
    x = np.ascontiguousarray(x[: len(x) // 16 * 16])
    out = np.empty_like(x)
    bodies(portable).library.run_exp(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(out.ctypes.data), len(x))
    expected = np.exp(x[:100_003].astype(np.float64))
    assert np.max(np.abs(out[:100_003] - expected) / expected) < 2e-7
    assert out[100_003:100_008].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert np.isnan(out[100_008]) and out[100_009] == pytest.approx(np.exp(88.0), rel=1e-6)


def test_bf16_rounding_is_to_nearest_even_and_keeps_nan_and_infinity() -> None:
    from ml_dtypes import bfloat16

    rng = np.random.default_rng(5)
    values = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    values = np.concatenate([values[np.isfinite(values)], np.array([0.0, -0.0, np.inf, -np.inf, 3.4e38], np.float32)])
    with np.errstate(over="ignore"):
        assert np.array_equal(to_bf16(values), values.astype(bfloat16).view(np.uint16))
    assert np.isnan(round_to(np.array([np.nan], np.float32), "bf16"))[0]


def test_packed_panels_hold_pairs_of_k_side_by_side() -> None:
    case = next(c for c in LINEAR if c.label == "linear 24x16 swiglu norm bias")
    run = Run(case, "bf16", ((0, 0, 1),))
    panels = panel_view(run.packed, 16, "bf16")
    gate, up = run.weights.tensors["gate"], run.weights.tensors["up"]
    assert panels.shape == (4, 8, 16, 2)
    assert from_bf16(panels[0, 3, 5]).tolist() == gate[5, 6:8].tolist()
    assert from_bf16(panels[3, 0, 7]).tolist() == up[23, 0:2].tolist()
    assert not panels[2, :, 8:].any()  # rows beyond the matrix


def test_tiles_cover_every_output_column_once() -> None:
    for case in CASES:
        kind = kind_of(case.op)
        tiles = kind.tiles(case.op, case.graph)
        for name in (n for n in case.op.outputs if n != "step"):
            seen = np.zeros(case.graph.values[name].columns, int)
            for tile in range(tiles):
                for region in kind.writes(case.op, case.graph, tile, tile + 1):
                    if region.buffer == name:
                        seen[region.begin : region.end] += 1
            assert (seen == 1).all(), f"{case.label}: {name}"


def test_costs_count_packed_weights_once() -> None:
    for case in (*LINEAR, *QKV):
        kind = kind_of(case.op)
        tiles = kind.tiles(case.op, case.graph)
        for dtype in DTYPES:
            costs = [kind.cost(case.op, case.graph, t, t + 1, dtype) for t in range(tiles)]
            assert sum(c.weight_bytes for c in costs) == kind.packed_bytes(case.op, case.graph, dtype)
    assert KV_PAGE_TOKENS % 16 == 0  # pages hold whole panels of keys
