"""Put a model's weights on a GPU, packed there: rows go over as they are, a kernel turns them into fragments where they are streamed.

Rows pass through a few buffers of pinned memory: while one is copied to the device and packed, threads fill the next from the source
(a mapped file: this is where the reading happens). bf16 files are copied bit by bit; other types are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpk.codegen import layout
from mpk.codegen.cuda_program import PACK_KERNEL, CudaProgramBuilder
from mpk.graph.tensor_graph import Operator
from mpk.targets.hardware import available_cpus
from mpk.tasks.base import WeightSource, kind_of
from mpk.tasks.matrices import matrix_bytes, matrix_key, matrix_shape
from mpk.tasks.packing import read_bf16, to_bf16
from mpk.tasks.stages import stages_of

if TYPE_CHECKING:
    from mpk.runtime.cuda_device import Device, Memory

Progress = Callable[[int, int], None]
BLOCK_BYTES = 32 << 20  # of rows in one buffer
BUFFERS = 3
PART_BYTES = 2 << 20  # that one thread fills at a time
MAX_THREADS = 8
RANDOM_BYTES = 64 << 20
PACK_THREADS = 256


class Piece(NamedTuple):
    """Tiles [begin, end) of a streamed matrix, or rows of one that is kept row by row."""

    operator: int
    begin: int
    end: int
    streamed: bool


class WeightLoader:
    """Fills the device memory of one program's weights."""

    def __init__(self, builder: CudaProgramBuilder, device: Device, module: object, memory: Memory) -> None:
        self.builder, self.graph, self.device, self.memory = builder, builder.graph, device, memory
        self.pack = device.function(module, PACK_KERNEL, 0)

    def load(self, source: WeightSource, progress: Progress | None = None) -> None:
        """Read, send and pack every matrix; `progress(done bytes, total bytes)`."""
        report = progress or (lambda done, total: None)
        pieces = self._pieces()
        room = max((self._bytes(p) for p in pieces), default=0)
        places = {i: self.device.copy(plan.place) for i, plan in self.builder.plans.items()}
        buffers = [_Buffer(self.device, room) for _ in range(min(BUFFERS, len(pieces)))]
        written = 0
        with ThreadPoolExecutor(min(MAX_THREADS, available_cpus())) as pool:
            for n, piece in enumerate(pieces):
                buffer = buffers[n % len(buffers)]
                buffer.wait()
                self._fill(pool, piece, source, buffer)
                self._send(piece, buffer, places)
                written += self._bytes(piece)
                report(min(written, self.graph.weight_bytes), self.graph.weight_bytes)
        self.device.synchronize()
        report(self.graph.weight_bytes, self.graph.weight_bytes)

    def fill_random(self, seed: int) -> None:
        """Normal values of deviation 0.02 everywhere, one block over and over: for measurements."""
        values = np.random.default_rng(seed).standard_normal(RANDOM_BYTES // 2, np.float32) * np.float32(0.02)
        block = to_bf16(values).view(np.uint8)[: self.memory.size]
        self.memory.upload(block)
        self.memory.repeat(len(block))

    def _pieces(self) -> list[Piece]:
        """All matrices, once each, in pieces that fit a buffer."""
        pieces: list[Piece] = []
        done = set()
        for index, op in enumerate(self.graph.tensor_graph.operators):
            kind = kind_of(op)
            key = matrix_key(kind, op, self.graph)
            if not matrix_bytes(kind, op, self.graph) or key in done:
                continue
            done.add(key)
            streamed = index in self.builder.plans
            rows, columns = (len(self.builder.plans[index].place), stages_of(op).rows * int(op.attrs["k"])) if streamed else matrix_shape(op, self.graph)
            step = max(1, BLOCK_BYTES // (columns * 2))
            pieces += [Piece(index, begin, min(begin + step, rows), streamed) for begin in range(0, rows, step)]
        return pieces

    def _columns(self, piece: Piece) -> int:
        op = self.graph.tensor_graph.operators[piece.operator]
        return int(op.attrs["k"]) if piece.streamed else matrix_shape(op, self.graph)[1]

    def _unit(self, piece: Piece) -> int:
        """Rows of a tile, or 1."""
        return stages_of(self.graph.tensor_graph.operators[piece.operator]).rows if piece.streamed else 1

    def _bytes(self, piece: Piece) -> int:
        return (piece.end - piece.begin) * self._unit(piece) * self._columns(piece) * 2

    def _fill(self, pool: ThreadPoolExecutor, piece: Piece, source: WeightSource, buffer: _Buffer) -> None:
        """All rows of the piece into the buffer, shared among threads."""
        op, columns = self.graph.tensor_graph.operators[piece.operator], self._columns(piece)
        unit = self._unit(piece)
        rows = buffer.rows[: (piece.end - piece.begin) * unit * columns].reshape(-1, columns)
        step = max(1, PART_BYTES // (unit * columns * 2))
        fill = fill_tiles if piece.streamed else fill_rows
        jobs = [pool.submit(fill, op, source, begin, min(begin + step, piece.end), rows[(begin - piece.begin) * unit :])
                for begin in range(piece.begin, piece.end, step)]
        for job in jobs:
            job.result()

    def _send(self, piece: Piece, buffer: _Buffer, places: dict[int, Memory]) -> None:
        """Copy a filled buffer to the device, there to its place or through the packing kernel; returns before that is done."""
        op = self.graph.tensor_graph.operators[piece.operator]
        offset, size = self.builder.matrix_offset(op), self._bytes(piece)
        if not piece.streamed:
            self.memory.upload_async(buffer.pinned.address, size, offset + piece.begin * self._columns(piece) * 2)
            buffer.mark()
            return
        plan = self.builder.plans[piece.operator]
        buffer.staging.upload_async(buffer.pinned.address, size)
        argument = np.zeros(1, layout.dtype("Pack"))
        values = {"rows": buffer.staging.address, "place": places[piece.operator].address + piece.begin * plan.shape.count * 8,
                  "out": self.memory.address + offset, "tiles": piece.end - piece.begin, "columns": self._columns(piece),
                  "stages": plan.shape.count, "depth": plan.shape.depth, "tile_rows": plan.shape.rows}
        for name, value in values.items():
            argument[name] = value
        fragments = (piece.end - piece.begin) * plan.shape.count * plan.shape.bytes // 16
        blocks = min(-(-fragments // PACK_THREADS), 1 << 16)
        self.device.launch(self.pack, blocks, PACK_THREADS, 0, argument, cooperative=False)  # behind the copy, in the same stream
        buffer.mark()


class _Buffer:
    """Pinned memory that threads fill, memory of the device that it is copied to, and an event: when both are free again."""

    def __init__(self, device: Device, size: int) -> None:
        from mpk.runtime.cuda_device import PinnedArray

        self.device = device
        self.pinned, self.staging = PinnedArray(device, (size // 2,), np.uint16), device.allocate(size)
        self.rows: np.ndarray = self.pinned.array
        self.event = device.event()
        self.used = False

    def mark(self) -> None:
        self.device.record(self.event)
        self.used = True

    def wait(self) -> None:
        if self.used:
            self.device.wait_event(self.event)


def fill_rows(op: Operator, source: WeightSource, begin: int, end: int, out: np.ndarray) -> None:
    """Rows [begin, end) of the operator's matrices one below the other, as bf16 bits, to `out` [rows, columns]."""
    for first, rows in _parts(source, op.weights["weight"], begin, end):
        out[first : first + len(rows)] = rows


def fill_tiles(op: Operator, source: WeightSource, begin: int, end: int, out: np.ndarray) -> None:
    """The rows of tiles [begin, end) as bf16 bits: 16 (or 8) of the stacked matrices, or 8 (4) of gate, then of up, a tile; 0 beyond the last."""
    names, n, height = op.weights["weight"], int(op.attrs["n"]), stages_of(op).rows
    count = (end - begin) * height
    if op.attrs["epilogue"] != "swiglu":
        fill_rows(op, source, begin * height, min(end * height, n), out)
        out[min(end * height, n) - begin * height : count] = 0
        return
    width = height // 2
    tiles = out[:count].reshape(end - begin, 2, width, -1)
    for half, name in enumerate(names):
        rows = read_bf16(source, name, begin * width, min(end * width, n))
        whole = len(rows) // width
        tiles[:whole, half] = rows[: whole * width].reshape(whole, width, -1)
        if whole < end - begin:
            tiles[whole:, half] = 0
            tiles[whole, half, : len(rows) - whole * width] = rows[whole * width :]


def _parts(source: WeightSource, names: tuple[str, ...], begin: int, end: int) -> Iterator[tuple[int, np.ndarray]]:
    """Rows [begin, end) of the stacked matrices in parts of one matrix each: (first row, counted from `begin`; bf16 bits)."""
    first = 0
    for name in names:
        last = first + source.shape(name)[0]
        if begin < last and first < end:
            low = max(begin, first)
            yield low - begin, read_bf16(source, name, low - first, min(end, last) - first)
        first = last
