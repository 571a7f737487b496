"""`linear` of the CUDA back end, emulated: products of 1 to 16 rows against the reference, flagged buffers, stages in the order of the plan."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpk.codegen.cuda_weights import fill_tiles
from mpk.codegen.program import constant
from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Scalar
from mpk.tasks.base import Env, kind_of
from mpk.tasks.case import Case, Segments
from mpk.tasks.linear import reference
from mpk.tasks.linear.cases import CASES
from mpk.tasks.packing import from_bf16, round_to, to_bf16
from mpk.tasks.stages import HALF_ROWS, TILE_ROWS, WARPS, stage_order, stage_shape, stages_of
from tests.support import cuda_emulator
from tests.support.cuda_kinds import SOURCES, Machine, put_step, spread
from tests.support.task_kinds import RandomWeights, step_view

SLOT = 16 << 10  # of a stage in the ring
STEPS: tuple[Segments, ...] = (((0, 3, 1),), ((0, 3, 2),), ((0, 3, 8),), ((1, 4, 9),), ((0, 0, 5), (2, 9, 11)))


def cuda_case(case: Case, rows: int = TILE_ROWS) -> Case:
    """The case as the CUDA back end has it: in tiles of so many rows of weights, half of them gate and half up for `swiglu`."""
    attrs: dict[str, Scalar] = {**case.op.attrs, "tile_columns": rows // (2 if case.op.attrs["epilogue"] == "swiglu" else 1)}
    return replace(case, label=f"{case.label} tiles of {rows}", op=replace(case.op, attrs=attrs))


def supported(case: Case) -> bool:
    return bool(case.op.attrs["gather_logit_rows"]) or int(case.op.attrs["n"]) % 2 == 0


WHOLE = [cuda_case(c, rows) for c in CASES if supported(c) for rows in (TILE_ROWS, HALF_ROWS)]


@functools.cache
def library() -> Any:
    """All variants of the cases in one kernel, by their place; as in a program, those that may share a body do."""
    lines, shared = ['#include "linear/cuda.cuh"'], dict[object, list[int]]()
    for number, case in enumerate(WHOLE):
        constants = kind_of(case.op).variant(case.op, case.graph, "bf16")
        lines.append(f"struct V{number} {{ {' '.join(f'static constexpr {constant(n, v)};' for n, v in constants.items())} }};")
        shared.setdefault(kind_of(case.op).body(case.op, case.graph), []).append(number)
    assert len(shared) < len(WHOLE) / 3
    lines.append(f"const mpk::linear::Product products[] = {{ {', '.join(f'mpk::linear::product_of<V{n}>()' for n in range(len(WHOLE)))} }};")
    bodies = " ".join("".join(f"case {n}: " for n in numbers) + f"return mpk::linear::run<V{numbers[0]}>(c, i, b, products[opcode]);" for numbers in shared.values())
    lines.append(f"inline void run_body(int opcode, const mpk::Context& c, const mpk::Instruction& i, mpk::Block& b) {{ switch (opcode) {{ {bodies} }} }}")
    return cuda_emulator.library("\n".join(lines) + "\n" + (SOURCES / "kinds.cuh").read_text(), "linear")


def fragments(rows: np.ndarray, columns: int, tile_rows: int = TILE_ROWS) -> np.ndarray:
    """Stages [tiles, stages, bytes / 2] of tiles [tiles * tile_rows, columns] of bits, as `mpk_pack` leaves them."""
    shape = stage_shape(columns, tile_rows)
    tiles, parts = len(rows) // tile_rows, shape.depth // WARPS // 32
    padded = np.zeros((tiles, tile_rows, shape.padded_columns), np.uint16)
    padded[:, :, :columns] = rows.reshape(tiles, tile_rows, columns)
    if tile_rows == HALF_ROWS:  # tile, row, warp, stage, part, quad, element
        cut = padded.reshape(tiles, 8, WARPS, shape.count, parts, 4, 8)
        return np.ascontiguousarray(cut.transpose(0, 3, 2, 4, 1, 5, 6)).reshape(tiles, shape.count, -1)
    # column = warp, stage, part, quad, step, pair, element; row = half, group
    cut = padded.reshape(tiles, 2, 8, WARPS, shape.count, parts, 4, 2, 2, 2)
    t, half, group, warp, stage, part, quad, step, pair, element = range(10)
    return np.ascontiguousarray(cut.transpose(t, stage, warp, part, step, group, quad, pair, half, element)).reshape(tiles, shape.count, -1)


class Product:
    """One case and step with random memory."""

    def __init__(self, case: Case, segments: Segments, embeds: bool = False) -> None:
        self.case, self.op, self.step = case, case.op, step_view(segments, 33)
        self.segments, self.rows = segments, len(self.step.tokens)
        self.n, self.k, self.wide = int(self.op.attrs["n"]), int(self.op.attrs["k"]), bool(self.op.attrs["gather_logit_rows"])
        self.out_rows = len(self.step.logit_rows) if self.wide else self.rows
        self.weights = RandomWeights(case, "bf16")
        rng = np.random.default_rng(5)
        self.x = round_to(rng.standard_normal((self.rows, self.k), dtype=np.float32), "bf16")
        self.embeddings = round_to(rng.standard_normal((33, self.k), dtype=np.float32), "bf16") if embeds else np.zeros((0, self.k), np.float32)
        if embeds:
            self.x = self.embeddings[self.step.tokens]
        self.residual = round_to(rng.standard_normal((self.rows, self.n), dtype=np.float32), "bf16")

    def reference(self) -> np.ndarray:
        """Output in float32, from input that is rounded where the kernel rounds it."""
        names = (*self.op.inputs[:1], "before")
        op = SimpleNamespace(**{**vars(self.op), "inputs": names, "outputs": ("result",)})
        env = Env({names[0]: self.x, "before": self.residual, "result": np.zeros((self.out_rows, self.n), np.float32)}, {}, self.step,
                  lambda name: self.weights.tensors[name], self.case.graph)
        reference.run(op, Task(0, 0, "linear", 0, kind_of(self.op).tiles(self.op, self.case.graph), (), ()), env)  # type: ignore[arg-type]
        return env.buffers["result"]

    def execute(self, blocks: int, previous_rows: int, late: bool = False) -> np.ndarray:
        """Output as the blocks left it; `late`: of inputs that come while they are polled."""
        kind, shape = kind_of(self.op), stages_of(self.op)
        tiles = kind.tiles(self.op, self.case.graph)
        rows = np.zeros((tiles * shape.rows, self.k), np.uint16)
        fill_tiles(self.op, self.weights, 0, tiles, rows)
        packed, ranges = fragments(rows, self.k, shape.rows), spread(tiles, blocks)
        ring = np.zeros((tiles * shape.count, SLOT // 2), np.uint16)
        begin = 0
        for first, last in ranges:
            for tile, stage in stage_order(last - first, shape.count):
                ring[begin, : packed.shape[2]] = packed[first + tile, stage]
                begin += 1
        m = Machine(emulated=True, max_batch=4)
        put_step(m, self.segments, self.step.tokens, self.step.logit_rows, self.rows)
        embeddings = np.zeros(-(-self.embeddings.size // 8) * 8, np.uint16)
        embeddings[: self.embeddings.size] = to_bf16(self.embeddings).reshape(-1)
        m.put("weights", np.concatenate([embeddings, ring.reshape(-1)]))
        m.put("params", np.append(kind.params(self.op, self.case.graph, self.weights), np.zeros(16, np.float32)))
        out = np.full((self.out_rows, self.n), 7, np.float32 if self.wide else np.uint16)
        m.buffers(("input", "residual") if self.wide else ("input", "output", "residual"), previous_rows, input=to_bf16(self.x), output=out,
                  residual=to_bf16(self.residual))
        m.launch["opcode"] = WHOLE.index(self.case)
        if late:
            m.hold_back("input", "residual")
        m.run_library(library(), kind.operands, ranges, [first * shape.count * SLOT for first, _ in ranges], embeddings.nbytes)
        assert self.wide or m.is_cleared("output")
        return m.get("output") if self.wide else from_bf16(m.get("output"))


@pytest.mark.parametrize("case", WHOLE, ids=lambda c: c.label)
def test_products_of_any_number_of_rows_are_those_of_the_reference(case: Case) -> None:
    for segments in STEPS:
        run = Product(case, segments)
        expected = run.reference()
        tiles = kind_of(case.op).tiles(case.op, case.graph)
        whole, parts = run.execute(1, min(3, run.rows)), run.execute(min(tiles, 3), 0)
        assert np.array_equal(whole, parts), f"{segments}: bits depend on the distribution of tiles"
        distance = np.linalg.norm(whole - expected) / np.linalg.norm(expected)
        assert distance < 6e-3, f"{segments}: {distance}"


@pytest.mark.parametrize("case", WHOLE, ids=lambda c: c.label)
def test_inputs_may_come_late_and_in_any_order(case: Case) -> None:
    for segments in STEPS:
        run = Product(case, segments)
        assert np.array_equal(run.execute(2, 0, late=True), run.execute(2, 0)), f"{segments}"


@pytest.mark.parametrize("case", [c for c in WHOLE if "norm" in c.op.weights and not c.op.attrs["gather_logit_rows"]][:2], ids=lambda c: c.label)
def test_an_input_of_embeddings_is_gathered(case: Case) -> None:
    for segments in STEPS:
        run = Product(case, segments, embeds=True)
        assert np.linalg.norm(run.execute(2, 1) - run.reference()) < 6e-3 * np.linalg.norm(run.reference())


def test_fragments_are_what_lanes_multiply() -> None:
    """Lane 4 g + q of step s holds W[g][8 q + 4 s + 0, 1], W[g + 8][same], W[g][8 q + 4 s + 2, 3], W[g + 8][same]."""
    rows = np.arange(16 * 256, dtype=np.uint16).reshape(16, 256)
    out = fragments(rows, 256)[0, 0].reshape(WARPS, 2, 8, 4, 4, 2)
    for warp, step, group, quad in ((0, 0, 0, 0), (3, 1, 5, 2), (7, 1, 7, 3)):
        at = warp * 32 + 8 * quad + 4 * step
        expected = [rows[group, at : at + 2], rows[group + 8, at : at + 2], rows[group, at + 2 : at + 4], rows[group + 8, at + 2 : at + 4]]
        assert np.array_equal(out[warp, step, group, quad], expected)
