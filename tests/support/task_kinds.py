"""Runs one task body of the C++ back end, and its numpy reference, on random memory whose outputs are poisoned."""

from __future__ import annotations

import ctypes
import functools
import importlib
from dataclasses import dataclass, field

import numpy as np

from mpk.codegen import layout
from mpk.codegen.compile import compile_program
from mpk.codegen.layout import KV_PAGE_TOKENS
from mpk.codegen.program import BACKEND, ProgramSource, constant
from mpk.graph.sm_task_graph import Task
from mpk.tasks.attention.sharing import owner_of_row, rows_are_shared
from mpk.tasks.base import Env, StepView, kind_of
from mpk.tasks.case import Case, Segments
from mpk.tasks.packing import PANEL, from_bf16, round_to, to_bf16
from tests.support.library import SOURCES, TASKS

KINDS = ("embed", "rope_table", "qkv", "linear", "attention", "attention_combine")
DTYPES = ("bf16", "f32")
POISON = np.array([0x7FC0DEAD], np.uint32).view(np.float32)[0]  # a NaN: arithmetic on it shows, copies of it are recognised
SLOTS = 4
GUARD = 4096  # bytes behind scratch memory that must stay as they are


def all_cases() -> list[Case]:
    return [c for kind in KINDS for c in importlib.import_module(f"mpk.tasks.{kind}.cases").CASES]


class Bodies:
    """The task bodies of all cases, compiled into one library."""

    def __init__(self, *, portable: bool) -> None:
        self.numbers: dict[tuple[str, tuple[str, ...]], int] = {}
        for c in all_cases():
            for dtype in DTYPES:
                self.numbers.setdefault(self._key(c, dtype), len(self.numbers))
        flags = ("-DMPK_PORTABLE", "-O2") if portable else ()
        source = ProgramSource(self._source(), (BACKEND / "include", TASKS, SOURCES))
        self.library = ctypes.CDLL(str(compile_program(source, portable=portable, extra_flags=(*flags, "-fvisibility=default"))))

    @staticmethod
    def _key(case: Case, dtype: str) -> tuple[str, tuple[str, ...]]:
        constants = kind_of(case.op).variant(case.op, case.graph, dtype)
        return case.op.kind, tuple(constant(n, v) for n, v in constants.items())

    def _source(self) -> str:
        lines = [f'#include "{kind}/cpp.hpp"' for kind in KINDS] + ['#include "task_kinds.hpp"']
        for (_, constants), number in self.numbers.items():
            lines.append(f"struct V{number} {{ " + " ".join(f"static constexpr {text};" for text in constants) + " };")
        bodies = ", ".join(f"mpk::{kind}::run<V{number}>" for (kind, _), number in self.numbers.items())
        return "\n".join(lines) + f"\nconst TaskBody kBodies[] = {{{bodies}}};\n"

    def number(self, case: Case, dtype: str) -> int:
        return self.numbers[self._key(case, dtype)]


@functools.cache
def bodies(portable: bool) -> Bodies:
    return Bodies(portable=portable)


class RandomWeights:
    """A `WeightSource` of seeded random tensors, already rounded to the weight type."""

    def __init__(self, case: Case, dtype: str) -> None:
        rng = np.random.default_rng(7)
        self.tensors = {n: round_to(self._draw(rng, w.shape), dtype) for n, w in case.graph.weights.items()}

    @staticmethod
    def _draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        values = rng.standard_normal(shape, dtype=np.float32)
        return 1 + values / 4 if len(shape) == 1 else values / np.float32(np.sqrt(shape[1]))

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        return np.ascontiguousarray(self.tensors[name][begin:end])

    def fingerprint(self) -> str:
        return "random"


def step_view(segments: Segments, vocab: int) -> StepView:
    rows = [(slot, position + r) for slot, position, count in segments for r in range(count)]
    slots, positions = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    last = np.cumsum([count for _, _, count in segments]) - 1
    tokens = np.random.default_rng(11).integers(0, vocab, len(rows)).astype(np.int32)
    return StepView(tokens, slots, positions, last[::-1].astype(np.int32))  # reversed, so that gathering is seen


# ---- pages of the cache
def page_index(head_dim: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Places of keys and of values [token, d] in a page, by the layouts' own shapes."""
    pairs = dtype == "bf16"
    half = KV_PAGE_TOKENS * head_dim

    def panels(offset: int, count: int, k: int, lanes: int) -> np.ndarray:  # -> [k, count * lanes]
        flat = offset + np.arange(count * k * lanes)
        if pairs:
            return flat.reshape(count, k // 2, lanes, 2).transpose(1, 3, 0, 2).reshape(k, count * lanes)
        return flat.reshape(count, k, lanes).transpose(1, 0, 2).reshape(k, count * lanes)

    keys = panels(0, KV_PAGE_TOKENS // PANEL, head_dim, PANEL).T
    full, rest = divmod(head_dim, PANEL)
    values = [panels(half, full, KV_PAGE_TOKENS, PANEL)] if full else []
    if rest:
        values.append(panels(half + full * PANEL * KV_PAGE_TOKENS, 1, KV_PAGE_TOKENS, rest))
    return keys, np.concatenate(values, axis=1)


@dataclass
class Cache:
    """Paged memory of one layer beside the reference's plain one; unwritten places hold a NaN."""

    kv_heads: int
    head_dim: int
    dtype: str
    context: int
    pages: np.ndarray = field(init=False)  # bits [page, kv head, elements], uint16 or uint32
    table: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        per_slot = -(-self.context // KV_PAGE_TOKENS)
        self.table = np.random.default_rng(3).permutation(SLOTS * per_slot).astype(np.int32).reshape(SLOTS, per_slot)
        shape = (SLOTS * per_slot, self.kv_heads, 2 * KV_PAGE_TOKENS * self.head_dim)
        bits = np.uint16 if self.dtype == "bf16" else np.uint32
        self.pages = np.full(shape, np.array([POISON]).view(np.uint32)[0] >> (16 if self.dtype == "bf16" else 0), bits)
        self.keys, self.values = page_index(self.head_dim, self.dtype)

    def put(self, slot: int, position: int, token: np.ndarray, heads: range) -> None:
        """Write `heads` (key heads, then value heads) of one token [2 * kv_heads * head_dim]."""
        stored = to_bf16(token) if self.dtype == "bf16" else token.view(np.uint32)
        for head in heads:
            page, places = self._places(slot, position, head)
            if head >= self.kv_heads and position % 2 == 0:  # the odd token of the pair is 0 until it comes
                page[self.values[position % KV_PAGE_TOKENS + 1]] = 0
            page[places] = stored[head * self.head_dim : (head + 1) * self.head_dim]

    def get(self, slot: int, position: int, head: int) -> np.ndarray:
        """float32 [head_dim] of a key or value head."""
        page, places = self._places(slot, position, head)
        return from_bf16(page[places]) if self.dtype == "bf16" else page[places].view(np.float32)

    def _places(self, slot: int, position: int, head: int) -> tuple[np.ndarray, np.ndarray]:
        page = self.pages[self.table[slot, position // KV_PAGE_TOKENS], head % self.kv_heads]
        return page, (self.keys if head < self.kv_heads else self.values)[position % KV_PAGE_TOKENS]


@dataclass
class Run:
    """Memory of one case and step: arena of the program and buffers of the reference, filled alike."""

    case: Case
    dtype: str
    segments: Segments
    seed: int = 1
    max_rows: int = 0  # rows of the buffers; 0: those of the step and a few more

    def __post_init__(self) -> None:
        case, op, graph = self.case, self.case.op, self.case.graph
        self.kind = kind_of(op)
        self.weights = RandomWeights(case, self.dtype)
        self.step = step_view(self.segments, graph.config.vocab_size)
        self.rows = len(self.step.tokens)
        self.max_rows = self.max_rows or self.rows + 3
        packed = np.zeros(self.kind.packed_bytes(op, graph, self.dtype), np.uint8)
        if packed.size:
            self.kind.pack(op, graph, self.weights, self.dtype, packed)
        self.packed, self.params = packed, self.kind.params(op, graph, self.weights)
        self.buffers = {name: self._fill(name) for name in dict.fromkeys(self.kind.buffers(op, graph).values())}
        self.cache = self._make_cache()
        self.scratch_bytes = self.kind.scratch_bytes(op, graph, self.max_rows)

    def _fill(self, name: str) -> np.ndarray:
        shape = (self.max_rows, self.case.graph.values[name].columns)
        if name not in self.case.op.inputs:
            return np.full(shape, POISON, np.float32)
        if name == "partial":
            return self._partials(shape)
        rng = np.random.default_rng(self.seed)
        values = np.stack([rng.standard_normal(shape[1], dtype=np.float32) for _ in range(shape[0])])  # row r: the same for any count
        values[self.rows :] = POISON
        return values

    def _partials(self, shape: tuple[int, int]) -> np.ndarray:
        """What `attention` would leave: sums, maximum, total; empty shares, and finished rows whose other splits are poisoned."""
        a, rng = self.case.op.attrs, np.random.default_rng(self.seed)
        splits, group = int(a["splits"]), int(a["heads"]) // int(a["kv_heads"])
        parts = rng.standard_normal((shape[0], int(a["kv_heads"]), splits, group, int(a["head_dim"]) + 2), dtype=np.float32)
        parts[..., -1] = np.abs(parts[..., -1]) + 1
        empty = rng.random(parts.shape[:3]) < 0.3
        empty[:, :, 0] = False
        parts[empty] = np.append(np.zeros(parts.shape[-1] - 2), [-np.inf, 0]).astype(np.float32)
        row = 0
        for _, _, count in self.segments:
            for r in range(count if rows_are_shared(count, splits) else 0):
                finished = parts[row + r, :, 0].copy()
                finished[..., -2:] = 0, 1
                parts[row + r] = POISON
                parts[row + r, :, owner_of_row(r, splits)] = finished
            row += count
        parts[self.rows :] = POISON
        return parts.reshape(shape)

    def _make_cache(self) -> Cache | None:
        a = self.case.op.attrs
        if "kv" not in self.case.graph.values:
            return None
        context = int(self.step.positions.max()) + 2
        cache = Cache(int(a["kv_heads"]), int(a["head_dim"]), self.dtype, context)
        columns = 2 * cache.kv_heads * cache.head_dim
        self.plain = np.full((SLOTS, context, columns), np.nan, np.float32)
        known = {}
        for slot, position, rows in self.segments:
            known[slot] = position + rows if self.case.op.kind == "attention" else position
        for slot, length in known.items():
            rng = np.random.default_rng(100 + slot)
            for t in range(length):
                self.plain[slot, t] = round_to(rng.standard_normal(columns, dtype=np.float32), self.dtype)
                cache.put(slot, t, self.plain[slot, t], range(2 * cache.kv_heads))
        return cache

    def reference(self, begin: int, end: int) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Buffers and plain cache after the reference ran tiles [begin, end)."""
        buffers = {n: b.copy() for n, b in self.buffers.items()}
        plain = None if self.cache is None else self.plain.copy()
        caches = {} if plain is None else {"kv": plain}
        env = Env(buffers, caches, self.step, lambda name: self.weights.tensors[name], self.case.graph)
        module = importlib.import_module(f"mpk.tasks.{self.case.op.kind}.reference")
        module.run(self.case.op, Task(0, 0, self.case.op.kind, begin, end, (), ()), env)
        return buffers, plain

    def execute(self, portable: bool, begin: int, end: int) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Buffers and cache pages after the C++ body ran tiles [begin, end)."""
        b = bodies(portable)
        offsets, total = {}, 64
        for name, buffer in self.buffers.items():
            offsets[name] = total
            total += -(-buffer.nbytes // 64) * 64 + 64
        arena = np.zeros(total, np.uint8)
        for name, buffer in self.buffers.items():
            arena[offsets[name] : offsets[name] + buffer.nbytes] = buffer.reshape(-1).view(np.uint8)
        pages = None if self.cache is None else self.cache.pages.copy()
        instruction = np.zeros(1, layout.dtype("Instruction"))
        instruction["tile_begin"], instruction["tile_end"], instruction["weights"], instruction["params"] = begin, end, 0, 0
        names = self.kind.buffers(self.case.op, self.case.graph)
        instruction["operand"] = [offsets[names[n]] if n in names else -1 for n in self.kind.operands] + [-1] * (layout.MAX_OPERANDS - len(self.kind.operands))
        self._call(b, arena, pages, instruction)
        out = {n: arena[offsets[n] : offsets[n] + x.nbytes].view(np.float32).reshape(x.shape).copy() for n, x in self.buffers.items()}
        return out, pages

    def _call(self, b: Bodies, arena: np.ndarray, pages: np.ndarray | None, instruction: np.ndarray) -> None:
        step, segments = np.zeros(1, layout.dtype("Step")), np.zeros(len(self.segments), layout.dtype("Segment"))
        step["number"], step["rows"], step["logit_rows"], step["segments"] = 1, self.rows, len(self.step.logit_rows), len(self.segments)
        row = 0
        for i, (slot, position, rows) in enumerate(self.segments):
            segments[i] = (slot, row, rows, position)
            row += rows
        scratch = np.full(self.scratch_bytes + GUARD + 64, 0xA5, np.uint8)
        scratch = scratch[-scratch.ctypes.data % 64 :][: self.scratch_bytes + GUARD]
        table = np.zeros((SLOTS, 1), np.int32) if self.cache is None else self.cache.table
        arrays = [self.packed, self.params, arena, pages, step, segments, self.step.tokens, self.step.slots, self.step.positions,
                  self.step.logit_rows, table, scratch]
        memory = (ctypes.c_int64 * 15)(*[0 if a is None else a.ctypes.data for a in arrays], self.max_rows, table.shape[1],
                                       0 if pages is None else len(pages))
        b.library.run_task(b.number(self.case, self.dtype), memory, ctypes.c_void_p(instruction.ctypes.data))
        assert (scratch[self.scratch_bytes :] == 0xA5).all(), f"{self.case.label}: writes beyond its scratch memory"
