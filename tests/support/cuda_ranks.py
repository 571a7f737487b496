"""Whole steps of a CUDA graph on the CPU, rank by rank: every task's body in emulation, with the operands, parameters and weights of its instruction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mpk.codegen import layout
from mpk.codegen.cuda_program import CudaProgramBuilder
from mpk.codegen.cuda_weights import fill_rows, fill_tiles
from mpk.codegen.layout import KV_PAGE_TOKENS
from mpk.frontend.shard_source import shard_sources
from mpk.graph.sm_task_graph import SMTaskGraph, Task
from mpk.graph.tensor_graph import Operator
from mpk.passes.memory import lay_out_params
from mpk.runtime.state import page_bytes
from mpk.tasks import stages
from mpk.tasks.base import StepView, WeightSource, kind_of
from mpk.tasks.matrices import matrix_shape
from tests.support import cuda_emulator
from tests.support.cuda_kinds import LAUNCH, SCRATCH_BYTES, SOURCES, THREADS

SLOT = 16 << 10  # bytes of a stage in the emulated ring
HOST = ("sample", "advance")  # kinds that a test does not run: it plans steps itself
SLOTS, PAGES = 4, 2  # sequences, and pages of each


class Rank:
    """Memory of one rank, and the launch through which the emulated kernel sees it."""

    def __init__(self, program: EmulatedProgram, source: WeightSource, rank: int) -> None:
        graph = program.graph
        self.rank, self.launch = rank, np.zeros(1, LAUNCH)
        self.params = np.append(lay_out_params(graph, source), np.zeros(64, np.float32))
        self.weights, self.places = program.packed(source)
        self.arena = aligned(graph.arena_bytes)
        self.arena[graph.flagged_begin :] = 0xFF
        self.kv = aligned(SLOTS * PAGES * page_bytes(graph))
        self.peer_memory = aligned(max(graph.peer_bytes, 16))
        self.page_table = np.random.default_rng(rank).permutation(SLOTS * PAGES).astype(np.int32).reshape(SLOTS, PAGES)
        self.sequences = np.zeros(SLOTS, layout.dtype("Sequence"))
        self.cancel = np.zeros(1, np.int32)
        for name, array in (("weights", self.weights), ("params", self.params), ("arena", self.arena), ("kv", self.kv), ("page_table", self.page_table),
                            ("sequences", self.sequences), ("cancel", self.cancel)):
            self.launch[name] = array.ctypes.data
        sizes = {"max_batch": SLOTS, "max_context": PAGES * KV_PAGE_TOKENS, "max_pages": PAGES, "num_pages": SLOTS * PAGES, "repeats": 1, "layers": 1,
                 "rank": rank, "flagged_stride": graph.flagged_bytes, "flag_base": 77, "max_rows": graph.max_rows}
        for name, value in sizes.items():
            self.launch[name] = value

    def buffer(self, graph: SMTaskGraph, name: str, rows: int) -> np.ndarray:
        """float32 [rows, columns] of a buffer that is not flagged."""
        columns = graph.buffers[name].columns
        return self.arena[graph.arena[name].offset :][: rows * columns * 4].view(np.float32).reshape(rows, columns).copy()


class EmulatedProgram:
    """A graph of any number of ranks, with the weights of `source`."""

    def __init__(self, graph: SMTaskGraph, source: WeightSource) -> None:
        self.graph = graph
        self.by_op: dict[int, list[Task]] = {}
        for task in graph.tasks:
            self.by_op.setdefault(task.op, []).append(task)
        self.ranks = [Rank(self, part, rank) for rank, part in enumerate(shard_sources(graph, source))]
        self.builder = CudaProgramBuilder(graph)  # after parameters have their places
        self.instructions = {int(i["task"]): i for i in self.builder.tables().instructions}
        self.peers = np.array([r.peer_memory.ctypes.data for r in self.ranks], np.uint64)
        self.steps, self.previous_rows = 0, 0
        for rank in self.ranks:
            rank.launch["peers"] = self.peers.ctypes.data

    @cached_property
    def library(self) -> Any:
        """All variants of the program in one emulated kernel, by opcode."""
        variants = [(n, v) for n, v in enumerate(self.builder.variants) if v.kind not in HOST]
        kinds = sorted({v.kind for _, v in variants})
        lines = [f'#include "{kind}/cuda.cuh"' for kind in kinds]
        lines += [f"struct {v.struct} {{ {' '.join(f'static constexpr {text};' for text in v.constants)} }};" for _, v in variants]
        lines += [f"const mpk::{kind}::Product {kind}_products[] = {{ {', '.join(f'mpk::{kind}::product_of<{v.struct}>()' if v.kind == kind else '{}' for v in self.builder.variants)} }};"
                  for kind in sorted({body.kind for body in self.builder.bodies if body.shared})]
        bodies = " ".join("".join(f"case {n}: " for n in body.opcodes) + f"return mpk::{body.kind}::run<{body.struct}>(c, i, b{f', {body.kind}_products[opcode]' * body.shared});"
                          for body in self.builder.bodies if body.kind not in HOST)
        lines.append(f"inline void run_body(int opcode, const mpk::Context& c, const mpk::Instruction& i, mpk::Block& b) {{ switch (opcode) {{ {bodies} }} }}")
        return cuda_emulator.library("\n".join(lines) + "\n" + (SOURCES / "kinds.cuh").read_text(), *kinds)

    def packed(self, source: WeightSource) -> tuple[np.ndarray, dict[int, int]]:
        """The embedding's rows and all matrices as the emulated ring takes them, and by task where its own begin."""
        parts: list[np.ndarray] = []
        places: dict[int, int] = {}
        at = 0
        for index, op in enumerate(self.graph.tensor_graph.operators):
            form = kind_of(op).cuda_form
            if form == "rows":
                matrix = np.zeros(matrix_shape(op, self.graph), np.uint16)
                fill_rows(op, source, 0, len(matrix), matrix)
                self.embedding = at
                parts.append(matrix.reshape(-1).view(np.uint8))
                at += parts[-1].nbytes
            for task in self.by_op[index] if form == "stages" else ():
                places[task.id] = at
                parts.append(stages_of(op, task, source))
                at += parts[-1].nbytes
            parts.append(np.zeros(-at % 256, np.uint8))
            at += parts[-1].nbytes
        out = aligned(at)
        out[:] = np.concatenate(parts)
        return out, places

    def run(self, step: StepView, segments: Sequence[tuple[int, int, int]]) -> None:
        """One step on all ranks, operator by operator; `segments`: (slot, position, rows)."""
        self.steps += 1
        arrays = step_arrays(self.graph.max_rows, self.steps, step, segments)
        for index, op in enumerate(self.graph.tensor_graph.operators):
            if op.kind in HOST:
                continue
            tasks = self.by_op[index]
            for rank in self.ranks:
                instructions = np.array([self.instructions[t.id] for t in tasks], layout.dtype("Instruction"))
                instructions["weights"] = self.embedding  # for `embed`, and for products that read their input there
                stages = np.array([rank.places.get(t.id, 0) for t in tasks], np.int64)
                for name, array in {**arrays, "instructions": instructions, "stages": stages}.items():
                    rank.launch[name] = array.ctypes.data
                rank.launch["opcode"], rank.launch["previous_rows"] = self.builder.opcodes[index], self.previous_rows
                cuda_emulator.EmulatedDevice().launch(self.library, len(tasks), THREADS, SCRATCH_BYTES, rank.launch)
        self.previous_rows = len(step.tokens)

    def logits(self, rows: int) -> list[np.ndarray]:
        """float32 [rows, vocab] of every rank."""
        name = next(op for op in self.graph.tensor_graph.operators if op.kind == "sample").inputs[0]
        return [rank.buffer(self.graph, name, rows) for rank in self.ranks]


def aligned(size: int) -> np.ndarray:
    """Zeroed bytes that begin at a multiple of 256."""
    raw = np.zeros(size + 256, np.uint8)
    return raw[-raw.ctypes.data % 256 :][:size]


def stages_of(op: Operator, task: Task, source: WeightSource) -> np.ndarray:
    """Bytes of a task's stages, in the order in which it takes them."""
    from tests.test_cuda_linear import fragments

    k, tiles, shape = int(op.attrs["k"]), task.tile_end - task.tile_begin, stages.stages_of(op)
    rows = np.zeros((tiles * shape.rows, k), np.uint16)
    fill_tiles(op, source, task.tile_begin, task.tile_end, rows)
    packed = fragments(rows, k, shape.rows)
    ring = np.zeros((tiles * shape.count, SLOT // 2), np.uint16)
    for place, (tile, stage) in enumerate(stages.stage_order(tiles, shape.count)):
        ring[place, : packed.shape[2]] = packed[tile, stage]
    return ring.reshape(-1).view(np.uint8)


def step_arrays(max_rows: int, number: int, step: StepView, segments: Sequence[tuple[int, int, int]]) -> dict[str, np.ndarray]:
    """The step as the device sees it."""
    plan, table = np.zeros(1, layout.dtype("Step")), np.zeros(max_rows, layout.dtype("Segment"))
    row = 0
    for n, (slot, position, rows) in enumerate(segments):
        table[n] = (slot, row, rows, position)
        row += rows
    plan["number"], plan["rows"], plan["logit_rows"], plan["segments"] = number, row, len(step.logit_rows), len(segments)

    def padded(values: np.ndarray) -> np.ndarray:
        return np.pad(values.astype(np.int32), (0, max_rows - len(values)))

    return {"step": plan, "segments": table, "row_token": padded(step.tokens), "row_slot": padded(step.slots), "row_position": padded(step.positions),
            "logit_row": padded(step.logit_rows)}
