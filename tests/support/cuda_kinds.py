"""Compiles task bodies of the CUDA back end into a small kernel and runs them on memory of the test's own."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpk.codegen import cuda_source, layout, nvrtc
from mpk.codegen.layout import KV_PAGE_TOKENS
from mpk.codegen.program import constant
from mpk.errors import TargetError
from mpk.graph.tensor_graph import Scalar
from mpk.runtime.cuda_device import Device, device_count
from mpk.tasks.packing import from_bf16, to_bf16
from mpk.tasks.rotary_attention.sharing import kv_block
from tests.support.cuda_emulator import EmulatedDevice, library

SOURCES = Path(__file__).parent.parent / "cuda"
ARCHITECTURE = "sm_90a"
THREADS, SCRATCH_BYTES = 256, 64 * 1024  # of block.cuh
BLOCK_THREADS, POOL_BYTES = 384, 224 * 1024  # with loaders; all memory of a block, for kinds of prompt steps
POINTERS = ("weights", "params", "arena", "kv", "step", "segments", "row_token", "row_slot", "row_position", "logit_row", "sequences", "tokens",
            "page_table", "free_pages", "free_page_count", "chosen_logprob", "top_logprob", "top_token", "logits_out", "token_ns", "cancel", "messages")
SIZES = ("max_batch", "max_rows", "max_context", "max_pages", "num_pages", "opcode", "repeats", "layers", "previous_rows", "drawn_rows", "special_rows",
         "rank", "prompt_room")
LAUNCH = np.dtype([*((n, "<u8") for n in POINTERS), ("logits_out_positions", "<i8"), ("flagged_stride", "<i8"), ("instructions", "<u8"), ("times", "<u8"),
                   ("arrivals", "<u8"), ("places", "<u8"), ("stages", "<u8"), ("peers", "<u8"), *((n, "<i4") for n in SIZES), ("flag_base", "<u4")], align=True)


def source_of(kind: str, constants: Mapping[str, Scalar]) -> str:
    """A kernel around one variant of a kind; of `head` only what comes behind the product."""
    lines = " ".join(f"static constexpr {constant(n, v)};" for n, v in constants.items())
    body = (SOURCES / "head.cuh").read_text() if kind == "head" else f'#include "{kind}/cuda.cuh"\n'
    prompt = "#define MPK_PROMPT_KIND\n" if kind.startswith("prompt_") else ""
    return (f"{prompt}{body}struct V {{ {lines} }};\n"
            "__device__ __forceinline__ void run_body(int, const mpk::Context& c, const mpk::Instruction& i, mpk::Block& b) "
            f"{{ mpk::{kind}::run<V>(c, i, b); }}\n{(SOURCES / 'kinds.cuh').read_text()}")


@functools.cache
def _compiled(kind: str, constants: tuple[tuple[str, Scalar], ...]) -> nvrtc.Cubin:
    """The kernel of a variant; MPK_TEST_CUBINS names a folder that keeps machine code between runs."""
    text, headers = source_of(kind, dict(constants)), cuda_source.headers([kind])
    folder = os.environ.get("MPK_TEST_CUBINS")
    if not folder:
        return nvrtc.compile_cubin(text, headers, ARCHITECTURE, cuda_source.OPTIONS)
    path = Path(folder) / (hashlib.sha256(repr((text, sorted(headers.items()))).encode()).hexdigest()[:32] + ".cubin")
    if path.is_file():
        return nvrtc.Cubin(path.read_bytes(), ARCHITECTURE, {})
    cubin = nvrtc.compile_cubin(text, headers, ARCHITECTURE, cuda_source.OPTIONS)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(cubin.image)
    return cubin


def compiled(kind: str, constants: Mapping[str, Scalar]) -> nvrtc.Cubin:
    return _compiled(kind, tuple(constants.items()))


def compiled_within(kind: str, constants: Mapping[str, Scalar], registers: int) -> nvrtc.Cubin:
    """Machine code for threads that have so many registers."""
    text = f"#define TEST_LIMIT __maxnreg__({registers})\n{source_of(kind, constants)}"
    return nvrtc.compile_cubin(text, cuda_source.headers([kind]), ARCHITECTURE, cuda_source.OPTIONS)


def require_nvrtc() -> None:
    """Skip the test where CUDA source cannot be compiled."""
    try:
        nvrtc.version()
    except TargetError:
        pytest.skip("NVRTC is not installed")


EMULATE = os.environ.get("MPK_EMULATE_CUDA", "") == "1"  # run on the CPU what tests would run on a GPU


@functools.cache
def device() -> Any:
    """The first GPU, or its stand-in; skips the test where there is neither."""
    if EMULATE:
        return EmulatedDevice()
    if device_count() == 0:
        pytest.skip("no GPU; MPK_EMULATE_CUDA=1 runs the test on the CPU")
    return Device(0)


@functools.cache
def _function(kind: str, constants: tuple[tuple[str, Scalar], ...], emulated: bool) -> Any:
    if emulated:
        return library(source_of(kind, dict(constants)), kind)
    return device().function(device().load(_compiled(kind, constants).image), "run_kind", shared_bytes(kind))


def shared_bytes(kind: str) -> int:
    """Shared memory of a block that runs the kind."""
    return POOL_BYTES + 1024 if kind.startswith("prompt_") else SCRATCH_BYTES


EMPTY = 0xFF  # bytes of flagged words that have not been written
STEP = 1  # number of the step that tests run, so flagged buffers are in their second copy


class Machine:
    """Device memory by the names of the context's fields, and buffers in an arena; everything is downloaded by name."""

    def __init__(self, emulated: bool = False, **sizes: int) -> None:
        self.device = EmulatedDevice() if emulated else device()
        self.launch = np.zeros(1, LAUNCH)
        self.launch["repeats"] = self.launch["layers"] = 1
        for name, value in sizes.items():
            self.launch[name] = value
        self.memory: dict[str, Any] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self.offsets: dict[str, int] = {}
        self.flagged: set[str] = set()
        self.late: np.ndarray = np.zeros(0, np.uint8)  # see hold_back()

    def put(self, name: str, array: np.ndarray, field: bool = True) -> None:
        """Upload `array` as field `name` of the context (or as none)."""
        self.arrays[name] = array
        self.memory[name] = self.device.allocate(array.nbytes + 256)
        self.memory[name].upload(array)
        if field:
            self.launch[name] = self.memory[name].address

    def buffers(self, flagged: Collection[str] = (), previous_rows: int = 0, **buffers: np.ndarray) -> None:
        """Upload buffers into one arena; `flagged`: names of those that are. Their other copy is empty but for `previous_rows` rows."""
        total, self.flagged = 0, set(flagged)
        for name, array in buffers.items():
            self.offsets[name] = total
            total += -(-array.nbytes // 256) * 256
        self.launch["flagged_stride"], self.launch["previous_rows"] = total, previous_rows
        arena = np.full(2 * total, EMPTY, np.uint8)
        for name, array in buffers.items():
            begin = self._place(name, 0)
            arena[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            if name in self.flagged:
                begin = self._place(name, 1)
                arena[begin : begin + array[:previous_rows].nbytes] = 0x5A
            self.arrays[name] = array
        self.put("arena", arena)

    def _place(self, name: str, step: int) -> int:
        """Byte offset of a buffer in the copy of this step (0) or of the one before (1)."""
        return int(self.offsets[name] + (int(self.launch["flagged_stride"][0]) if name in self.flagged and (STEP + step) % 2 else 0))

    def get(self, name: str) -> np.ndarray:
        """The present contents of a field or buffer, in the shape that was uploaded."""
        array = self.arrays[name]
        if name in self.offsets:
            data: np.ndarray = self.memory["arena"].download(np.uint8, array.nbytes, self._place(name, 0))
        else:
            data = self.memory[name].download(np.uint8, array.nbytes)
        return data.view(array.dtype).reshape(array.shape)

    def is_cleared(self, name: str) -> bool:
        """Whether the other copy of a flagged buffer is empty."""
        return bool((self.memory["arena"].download(np.uint8, self.arrays[name].nbytes, self._place(name, 1)) == EMPTY).all())

    def run(self, kind: str, constants: Mapping[str, Scalar], operands: Sequence[str], ranges: Iterable[tuple[int, int]], repeats: int = 1,
            layers: int = 1, iargs: tuple[int, int] = (0, 0)) -> np.ndarray:
        """Run tiles ranges[b] on block b; returns nanoseconds [repeats, blocks] of the body on each block."""
        threads = BLOCK_THREADS if kind.startswith("prompt_") else THREADS
        function = _function(kind, tuple(constants.items()), isinstance(self.device, EmulatedDevice))
        return self._launch(function, operands, list(ranges), repeats, layers, iargs=iargs, threads=threads,
                            shared=shared_bytes(kind))

    def run_library(self, library: Any, operands: Sequence[str], ranges: Sequence[tuple[int, int]], weights: Sequence[int], gathered: int = 0) -> None:
        """Run tiles ranges[b] on block b of an emulated kernel, whose weights begin at byte weights[b] behind `gathered` bytes of a matrix whose rows
        are the input (0: there is none)."""
        self._launch(library, operands, ranges, 1, 1, weights, gathered)

    def hold_back(self, *names: str) -> None:
        """In emulation: let the words of flagged buffers be empty at first and come one after the other while they are polled, in random order."""
        begins = [(self._place(name, 0) // 4, self.arrays[name].nbytes // 4) for name in names]
        places = np.concatenate([np.arange(begin, begin + count) for begin, count in begins])
        arena = self.memory["arena"].bytes.view(np.uint32)
        self.late = np.zeros(len(places), [("at", "<u8"), ("value", "<u8")])
        np.random.default_rng(4).shuffle(places)
        self.late["at"], self.late["value"] = self.memory["arena"].address + 4 * places, arena[places]
        arena[places] = 0xFFFFFFFF

    def _launch(self, function: Any, operands: Sequence[str], ranges: Sequence[tuple[int, int]], repeats: int, layers: int,
                weights: Sequence[int] = (), gathered: int = 0, iargs: tuple[int, int] = (0, 0), threads: int = THREADS,
                shared: int = SCRATCH_BYTES) -> np.ndarray:
        instructions = np.zeros(len(ranges), layout.dtype("Instruction"))
        instructions["operand"], instructions["iargs"] = -1, iargs
        for slot, name in enumerate(operands):
            instructions["operand"][:, slot] = self.offsets.get(name, -1)
        stages = np.array(weights, np.int64) + gathered
        if gathered:
            instructions["iargs"] = 1, 0
            self.launch["stages"] = stages.ctypes.data
        elif weights:
            instructions["weights"] = weights
        instructions["tile_begin"], instructions["tile_end"] = [r[0] for r in ranges], [r[1] for r in ranges]
        own = {n: self.device.allocate(size) for n, size in (("instructions", instructions.nbytes), ("times", 8 * repeats * len(ranges)), ("arrivals", 8))}
        own["instructions"].upload(instructions)
        own["arrivals"].fill(0)
        for name, memory in own.items():
            self.launch[name] = memory.address
        self.launch["repeats"], self.launch["layers"] = repeats, layers
        if isinstance(self.device, EmulatedDevice):
            function.hold_back(ctypes.c_void_p(self.late.ctypes.data), ctypes.c_int64(len(self.late)))
        self.device.launch(function, len(ranges), threads, shared, self.launch)
        self.device.synchronize()
        times: np.ndarray = own["times"].download(np.int64, repeats * len(ranges))
        return times.reshape(repeats, len(ranges))


def spread(tiles: int, blocks: int) -> list[tuple[int, int]]:
    """Equal contiguous ranges of tiles, one a block."""
    edges = [tiles * b // blocks for b in range(blocks + 1)]
    return list(itertools.pairwise(edges))


def put_step(m: Machine, segments: Sequence[tuple[int, int, int]], tokens: np.ndarray, logit_rows: np.ndarray, max_rows: int) -> None:
    """The step, its segments (slot, position, rows) and rows."""
    step, table = np.zeros(1, layout.dtype("Step")), np.zeros(max(max_rows, 32), layout.dtype("Segment"))
    row = 0
    slots, positions = np.zeros(max(max_rows, 32), np.int32), np.zeros(max(max_rows, 32), np.int32)
    for n, (slot, position, rows) in enumerate(segments):
        table[n] = (slot, row, rows, position)
        slots[row : row + rows], positions[row : row + rows] = slot, np.arange(position, position + rows)
        row += rows
    step["number"], step["rows"], step["logit_rows"], step["segments"] = STEP, row, len(logit_rows), len(segments)
    padded = np.zeros(max(max_rows, 32), np.int32)
    padded[: len(tokens)] = tokens
    logit = np.zeros(max(max_rows, 32), np.int32)
    logit[: len(logit_rows)] = logit_rows
    for name, array in (("step", step), ("segments", table), ("row_token", padded), ("row_slot", slots), ("row_position", positions), ("logit_row", logit)):
        m.put(name, array)
    m.launch["max_rows"] = max_rows


def page_places(head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Elements of keys and of values [token, d] in a page, as `Page` of rotary_attention/attend.cuh has them."""
    block, fragments, lane_dims = kv_block(head_dim), kv_block(head_dim) // 16, head_dim // 8
    own = 4 * fragments  # positions of a lane
    token, d = np.arange(KV_PAGE_TOKENS)[:, None], np.arange(head_dim)[None]
    at, begin = token % block, token // block * block * head_dim
    row, fragment, half, piece = at // own * 2 + at % 2, at % own // 4, at % 4 // 2, d // 32
    pairs = np.minimum(4, (head_dim - piece * 32) // 8)
    keys = begin + (fragment * 2 + half) * 8 * head_dim + piece * 256 + (row * pairs + d % 32 // 8) * 8 + d % 8
    j, lane = d % lane_dims, d // lane_dims * 4 + at // own
    if fragments == 2:
        values = (j * 32 + lane) * 8 + at % own
    else:
        values = np.where(j // 2 * 2 + 1 < lane_dims, (j // 2 * 32 + lane) * 8 + j % 2 * 4 + at % own, j // 2 * 256 + lane * 4 + at % own)
    return keys, KV_PAGE_TOKENS * head_dim + begin + values


class PagedCache:
    """One layer's cache in pages of the CUDA layout, bits uint16; places that were never written hold a NaN."""

    POISON = 0x7FC5

    def __init__(self, slots: int, context: int, kv_heads: int, head_dim: int) -> None:
        per_slot = -(-context // KV_PAGE_TOKENS)
        self.kv_heads, self.head_dim, self.places = kv_heads, head_dim, page_places(head_dim)
        self.table = np.random.default_rng(3).permutation(slots * per_slot).astype(np.int32).reshape(slots, per_slot)
        self.pages = np.full((slots * per_slot, kv_heads, 2 * KV_PAGE_TOKENS * head_dim), self.POISON, np.uint16)

    def put(self, slot: int, position: int, token: np.ndarray) -> None:
        """Write a token [2 * kv_heads * head_dim], key heads first."""
        bits = to_bf16(token).reshape(2, self.kv_heads, self.head_dim)
        page, at = divmod(position, KV_PAGE_TOKENS)
        for kind in range(2):
            self.pages[self.table[slot, page]][:, self.places[kind][at]] = bits[kind]

    def get(self, slot: int, position: int) -> np.ndarray:
        page, at = divmod(position, KV_PAGE_TOKENS)
        own = self.pages[self.table[slot, page]]
        return from_bf16(np.stack([own[:, self.places[kind][at]] for kind in range(2)])).reshape(-1)
