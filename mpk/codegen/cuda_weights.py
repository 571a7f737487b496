"""Put a model's weights on a GPU, packed there: rows go over as they are, a kernel turns them into fragments where they are streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from mpk.codegen import layout
from mpk.codegen.cuda_program import PACK_KERNEL, CudaProgramBuilder
from mpk.codegen.stage_plan import StagePlan
from mpk.graph.tensor_graph import Operator
from mpk.tasks.base import WeightSource, kind_of
from mpk.tasks.matrices import matrix_bytes, matrix_key, matrix_shape
from mpk.tasks.packing import to_bf16
from mpk.tasks.stages import TILE_ROWS

if TYPE_CHECKING:
    from mpk.runtime.cuda_device import Device, Memory

Progress = Callable[[int, int], None]
BLOCK_BYTES = 64 << 20  # of rows that are on their way at a time
RANDOM_BYTES = 64 << 20
PACK_THREADS = 256


class WeightLoader:
    """Fills the device memory of one program's weights."""

    def __init__(self, builder: CudaProgramBuilder, device: Device, module: object, memory: Memory) -> None:
        self.builder, self.graph, self.device, self.memory = builder, builder.graph, device, memory
        self.pack = device.function(module, PACK_KERNEL, 0)

    def load(self, source: WeightSource, progress: Progress | None = None) -> None:
        """Read, send and pack every matrix; `progress(done bytes, total bytes)`."""
        report = progress or (lambda done, total: None)
        done, written = set(), 0
        for index, op in enumerate(self.graph.tensor_graph.operators):
            kind = kind_of(op)
            size, key = matrix_bytes(kind, op, self.graph), matrix_key(kind, op, self.graph)
            if not size or key in done:
                continue
            done.add(key)
            offset = self.graph.weight_offsets[key]
            if index in self.builder.plans:
                self._stages(op, self.builder.plans[index], source, offset)
            else:
                self._rows(op, source, offset)
            written += size
            report(written, self.graph.weight_bytes)

    def fill_random(self, seed: int) -> None:
        """Normal values of deviation 0.02 everywhere, one block over and over: for measurements."""
        values = np.random.default_rng(seed).standard_normal(RANDOM_BYTES // 2, np.float32) * np.float32(0.02)
        block = to_bf16(values).view(np.uint8)
        for offset in range(0, self.memory.size, RANDOM_BYTES):
            self.memory.upload(block[: min(RANDOM_BYTES, self.memory.size - offset)], offset)

    def _rows(self, op: Operator, source: WeightSource, offset: int) -> None:
        rows, columns = matrix_shape(op, self.graph)
        step = max(1, BLOCK_BYTES // (columns * 2))
        for begin in range(0, rows, step):
            self.memory.upload(to_bf16(stacked_rows(source, op.weights["weight"], begin, min(begin + step, rows))), offset + begin * columns * 2)

    def _stages(self, op: Operator, plan: StagePlan, source: WeightSource, offset: int) -> None:
        columns = int(op.attrs["k"])
        step = max(1, BLOCK_BYTES // (TILE_ROWS * columns * 2))
        tiles = len(plan.place)
        staging = self.device.allocate(min(step, tiles) * TILE_ROWS * columns * 2)
        places = self.device.allocate(plan.place.nbytes)
        places.upload(plan.place)
        for begin in range(0, tiles, step):
            end = min(begin + step, tiles)
            staging.upload(to_bf16(tile_rows(op, source, begin, end)))
            argument = np.zeros(1, layout.dtype("Pack"))
            values = {"rows": staging.address, "place": places.address + begin * plan.shape.count * 8, "out": self.memory.address + offset,
                      "tiles": end - begin, "columns": columns, "stages": plan.shape.count, "depth": plan.shape.depth}
            for name, value in values.items():
                argument[name] = value
            fragments = (end - begin) * plan.shape.count * plan.shape.depth * 2
            blocks = min(-(-fragments // PACK_THREADS), 1 << 16)
            self.device.launch(self.pack, blocks, PACK_THREADS, 0, argument, cooperative=False)
            self.device.synchronize()
        staging.free()
        places.free()


def tile_rows(op: Operator, source: WeightSource, begin: int, end: int) -> np.ndarray:
    """The rows of tiles [begin, end), float32 [tiles * 16, k]: 16 of the stacked matrices, or 8 of gate, then 8 of up, a tile."""
    names = op.weights["weight"]
    if op.attrs["epilogue"] != "swiglu":
        return _padded(stacked_rows(source, names, begin * TILE_ROWS, min(end * TILE_ROWS, int(op.attrs["n"]))), (end - begin) * TILE_ROWS)
    width = TILE_ROWS // 2
    parts = [_padded(source.read(n, begin * width, min(end * width, int(op.attrs["n"]))), (end - begin) * width) for n in names]
    return np.stack([p.reshape(end - begin, width, -1) for p in parts], axis=1).reshape((end - begin) * TILE_ROWS, -1)


def stacked_rows(source: WeightSource, names: tuple[str, ...], begin: int, end: int) -> np.ndarray:
    """Rows [begin, end) of the matrices one below the other, float32."""
    parts = list(_parts(source, names, begin, end))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _parts(source: WeightSource, names: tuple[str, ...], begin: int, end: int) -> Iterator[np.ndarray]:
    first = 0
    for name in names:
        last = first + source.shape(name)[0]
        if begin < last and first < end:
            yield source.read(name, max(begin - first, 0), min(end, last) - first)
        first = last


def _padded(rows: np.ndarray, count: int) -> np.ndarray:
    return rows if len(rows) == count else np.pad(rows, ((0, count - len(rows)), (0, 0)))
