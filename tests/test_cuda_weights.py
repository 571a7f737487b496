"""Weights on their way to a GPU, with a made-up device that does its work as late as it may: when somebody waits for it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpk.codegen import cuda_weights
from mpk.codegen.cuda_program import CudaProgramBuilder
from mpk.codegen.cuda_weights import WeightLoader
from mpk.models import registry, shapes
from mpk.models.config import DecoderConfig, RopeScaling
from mpk.passes import cut_tiles, pipeline
from mpk.passes.partition import Options, short_name
from mpk.runtime import cuda_device
from mpk.targets import hardware
from mpk.tasks.base import kind_of
from mpk.tasks.matrices import matrix_key
from mpk.tasks.packing import read_bf16
from mpk.tasks.stages import stages_of

CONFIG = DecoderConfig("LlamaForCausalLM", 300, 72, 136, 2, 9, 3, 8, 1e-5, 128, RopeScaling())
HALVED = DecoderConfig("LlamaForCausalLM", 300, 1000, 80, 1, 9, 3, 8, 1e-5, 128, RopeScaling())  # qkv in 7.5 tiles, gate and up in 10


class LateDevice:
    """Memory in numpy; copies and kernels are kept and done, in order, up to the event that is waited for."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], None]] = []
        self.events: dict[int, int] = {}
        self.memories: list[Any] = []
        self.done = 0

    def allocate(self, size: int) -> Any:
        data = np.full(size, 0xEE, np.uint8)
        memory = SimpleNamespace(data=data, address=data.ctypes.data, size=size)
        memory.upload_async = lambda source, n, offset=0: self.later(lambda: ctypes.memmove(memory.address + offset, source, n))
        self.memories.append(memory)
        return memory

    def copy(self, array: np.ndarray) -> Any:
        memory = self.allocate(array.nbytes)
        memory.data[:] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        return memory

    def later(self, work: Callable[[], None]) -> None:
        self.pending.append(work)

    def function(self, module: object, name: str, shared: int) -> str:
        return name

    def event(self) -> int:
        self.events[len(self.events)] = 0
        return len(self.events) - 1

    def record(self, event: int) -> None:
        self.events[event] = self.done + len(self.pending)

    def wait_event(self, event: int) -> None:
        while self.done < self.events[event]:
            self.pending.pop(0)()
            self.done += 1

    def synchronize(self) -> None:
        while self.pending:
            self.pending.pop(0)()
            self.done += 1

    def launch(self, function: str, blocks: int, threads: int, shared: int, argument: np.ndarray, cooperative: bool) -> None:
        given = argument[0].copy()
        self.later(lambda: pack(given))


def pinned(device: LateDevice, shape: tuple[int, ...], dtype: Any) -> Any:
    array = np.zeros(shape, dtype)
    return SimpleNamespace(array=array, address=array.ctypes.data)


def at(address: int, count: int, dtype: Any) -> np.ndarray:
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(int(address)), dtype)


def pack(p: Any) -> None:
    """`mpk_pack` in numpy: stages of 16 or 8 rows in fragment order, written where `place` says."""
    tiles, columns, stages, depth, height = (int(p[n]) for n in ("tiles", "columns", "stages", "depth", "tile_rows"))
    rows = np.zeros((tiles, height, stages * depth), np.uint16)
    rows[:, :, :columns] = at(p["rows"], tiles * height * columns, np.uint16).reshape(tiles, height, columns)
    place = at(p["place"], tiles * stages, np.int64).reshape(tiles, stages)
    parts = depth // 256
    # [tile, half of rows, row, warp, stage, part, quarter, step, half of columns, pair]
    if height == 16:
        split = rows.reshape(tiles, 2, 8, 8, stages, parts, 4, 2, 2, 2)
        fragments = split.transpose(0, 4, 3, 5, 7, 2, 6, 8, 1, 9)  # [tile, stage, warp, part, step, row, quarter, half of columns, half of rows, pair]
    else:
        fragments = rows.reshape(tiles, 8, 8, stages, parts, 4, 8).transpose(0, 3, 2, 4, 1, 5, 6)  # [tile, stage, warp, part, row, quarter, element]
    for tile in range(tiles):
        for stage in range(stages):
            at(p["out"] + place[tile, stage], height * depth, np.uint16)[:] = fragments[tile, stage].reshape(-1)


def fragments_of(memory: np.ndarray, plan: Any, offset: int, columns: int) -> np.ndarray:
    """The matrix [tiles * rows of a tile, columns] that stands in `memory`, by the address of every element."""
    parts, stages, height = plan.shape.depth // 256, plan.shape.count, plan.shape.rows
    out = np.empty((len(plan.place) * height, columns), np.uint16)
    column = np.arange(columns)
    warp, rest = np.divmod(column, stages * parts * 32)
    stage, rest = np.divmod(rest, parts * 32)
    part, rest = np.divmod(rest, 32)
    quarter, rest = np.divmod(rest, 8)
    step, rest = np.divmod(rest, 4)
    half, pair = np.divmod(rest, 2)
    for row in range(len(out)):
        tile, r = divmod(row, height)
        lane = r % 8 * 4 + quarter
        run, word = warp * parts + part, half * 2 + r // 8
        if height == 8:
            fragment, word = run * 32 + lane, step * 2 + half
        else:
            fragment = (run * 2 + step) * 32 + lane
        place = offset + plan.place[tile, stage] + fragment * 16 + word * 4 + pair * 2
        out[row] = memory[place] | memory[place + 1].astype(np.uint16) << 8
    return out


@pytest.mark.parametrize(("block", "config", "workers", "halved"), [
    (16 * 72 * 2, CONFIG, 5, set()), (5000, CONFIG, 5, set()), (1 << 20, CONFIG, 5, set()), (20000, HALVED, 7, {"qkv", "gate_up"}), (1 << 20, HALVED, 7, {"qkv", "gate_up"})])
def test_every_matrix_arrives_whatever_the_size_of_a_buffer(block: int, config: DecoderConfig, workers: int, halved: set[str],
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_tiles, "WORTH_US", 0.0)  # small matrices
    source = shapes.RandomWeights(config, registry.build_graph(config))
    graph = pipeline.lower(registry.build_graph(config), hardware.load("h200").with_workers(workers), Options(16, 16, "bf16"))
    assert {short_name(op) for op in graph.tensor_graph.operators if kind_of(op).halves and stages_of(op).rows == 8} == halved
    monkeypatch.setattr(cuda_weights, "BLOCK_BYTES", block)
    monkeypatch.setattr(cuda_weights, "PART_BYTES", 3000)
    monkeypatch.setattr(cuda_device, "PinnedArray", pinned)
    builder, device = CudaProgramBuilder(graph), LateDevice()
    memory = device.allocate(graph.weight_bytes)
    said: list[tuple[int, int]] = []
    WeightLoader(builder, device, None, memory).load(source, lambda done, total: said.append((done, total)))  # type: ignore[arg-type]
    assert not device.pending and said[-1] == (graph.weight_bytes, graph.weight_bytes)
    checked = 0
    for index, op in enumerate(graph.tensor_graph.operators):
        names = op.weights.get("weight", ())
        if not names or matrix_key(kind_of(op), op, graph) not in graph.weight_offsets:
            continue
        whole = np.concatenate([read_bf16(source, n, 0, source.shape(n)[0]) for n in names])
        offset = builder.matrix_offset(op)
        if index not in builder.plans:
            found = memory.data[offset : offset + whole.nbytes].view(np.uint16).reshape(whole.shape)
        else:
            found = fragments_of(memory.data, builder.plans[index], offset, whole.shape[1])
            if op.attrs["epilogue"] == "swiglu":
                gate_up = found.reshape(-1, 2, stages_of(op).rows // 2, whole.shape[1])
                found = np.concatenate([gate_up[:, half].reshape(-1, whole.shape[1])[: len(whole) // 2] for half in (0, 1)])
        np.testing.assert_array_equal(found[: len(whole)], whole, err_msg=op.name)
        checked += 1
    assert checked == 2 + 4 * config.num_layers  # embedding, head, and qkv, o, gate_up, down of every layer
