"""Emit the program of a graph: C++ source with one template instance a distinct task variant, and the order of tasks as data.

The source depends on the set of (task kind, compile-time constants) only, so a model of 80 layers compiles as fast as one of
two. Streams, waits and signals are numpy arrays in the layout of `mpk.codegen.layout`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import numpy as np

from mpk.codegen import layout
from mpk.errors import InternalError
from mpk.graph.sm_task_graph import SMTaskGraph, Task
from mpk.graph.tensor_graph import Operator, Scalar
from mpk.tasks.base import kind_of
from mpk.tasks.matrices import matrix_bytes, matrix_key

BACKEND = Path(__file__).parent.parent / "targets" / "cpp"
PREFETCH_BYTES = 32 << 10  # of the next task's weights, fetched while a worker waits


@dataclass(frozen=True)
class ProgramSource:
    """What is compiled: the text, and where the headers it includes are found."""

    text: str
    include_dirs: tuple[Path, ...]


@dataclass(frozen=True)
class Tables:
    """The order of tasks as data, in the shared layout.

    `instructions`: Instruction [tasks], worker by worker; `stream_begin`: int32 [workers + 1]; `waits`: Wait; `signals`: Signal;
    `prefetch`: Prefetch [tasks].
    """

    instructions: np.ndarray
    stream_begin: np.ndarray
    waits: np.ndarray
    signals: np.ndarray
    prefetch: np.ndarray


@dataclass(frozen=True)
class _Variant:
    kind: str
    struct: str
    constants: tuple[str, ...]


class ProgramBuilder:
    """Source and tables of one graph."""

    def __init__(self, graph: SMTaskGraph) -> None:
        self.graph = graph
        self.opcodes, self.variants = self._variants()

    def _variants(self) -> tuple[list[int], list[_Variant]]:
        """Opcode of every operator, and the variants that opcodes stand for."""
        tensors = self.graph.tensor_graph
        keys = []
        for op in tensors.operators:
            constants = kind_of(op).variant(op, tensors, self.graph.dtype)
            keys.append((op.kind, tuple(constant(name, value) for name, value in constants.items())))
        number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        variants = [_Variant(kind, f"{kind.title().replace('_', '')}{i}", text) for (kind, text), i in number.items()]
        return [number[key] for key in keys], variants

    def source(self) -> ProgramSource:
        """The program's C++ source."""
        names = sorted({v.kind for v in self.variants})
        folders = {Path(inspect.getfile(type(kind_of(op)))).parent.parent for op in self.graph.tensor_graph.operators}
        environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
        template = environment.from_string((BACKEND / "program.cpp.j2").read_text())
        return ProgramSource(template.render(kinds=names, variants=self.variants), (BACKEND / "include", *sorted(folders)))

    def tables(self) -> Tables:
        """Streams, waits and signals of all workers; needs queues, events, arena and offsets."""
        graph = self.graph
        order = [graph.tasks[t] for queue in graph.queues for t in queue]
        places = [self._placement(op) for op in graph.tensor_graph.operators]
        ops = np.fromiter((t.op for t in order), np.int64, len(order))
        out = np.zeros(len(order), layout.dtype("Instruction"))
        out["task"], out["op"] = [t.id for t in order], ops
        out["tile_begin"], out["tile_end"] = [t.tile_begin for t in order], [t.tile_end for t in order]
        out["opcode"] = np.array(self.opcodes)[ops]
        out["layer"] = np.array([op.layer for op in graph.tensor_graph.operators])[ops]
        out["weights"], out["params"] = np.array([p.weights for p in places])[ops], np.array([p.params for p in places])[ops]
        out["iargs"] = np.array([p.arguments for p in places])[ops]
        out["operand"] = np.array([p.operands + [-1] * (layout.MAX_OPERANDS - len(p.operands)) for p in places])[ops]
        waits, signals = [self.awaited(t) for t in order], [self.counters(t.signals) for t in order]
        out["wait_begin"], out["wait_count"] = _ranges(waits)
        out["signal_begin"], out["signal_count"] = _ranges(signals)
        prefetch = np.array([self._prefetch(t, places[t.op]) for t in order], layout.dtype("Prefetch"))
        begin = np.cumsum([0, *(len(q) for q in graph.queues)], dtype=np.int32)
        return Tables(out, begin, np.array([(e, graph.events[e].threshold) for row in waits for e in row], layout.dtype("Wait")),
                      np.array([(e, 1) for row in signals for e in row], layout.dtype("Signal")), prefetch)

    def awaited(self, task: Task) -> list[int]:
        """Counters that the task's instruction waits for."""
        return self.counters(task.waits)

    def counters(self, events: Sequence[int]) -> list[int]:
        """Those of `events` that are counters; the others stand for data that is its own flag."""
        return [e for e in events if not self.graph.events[e].carried]

    def matrix_offset(self, op: Operator) -> int:
        """Byte offset of the operator's packed matrix."""
        return self.graph.weight_offsets[matrix_key(kind_of(op), op, self.graph)]

    def _placement(self, op: Operator) -> _Placement:
        graph, tensors, kind = self.graph, self.graph.tensor_graph, kind_of(op)
        buffers = kind.buffers(op, tensors)
        if len(kind.operands) > layout.MAX_OPERANDS:
            raise InternalError(f"task kind {kind.name} has {len(kind.operands)} operands, at most {layout.MAX_OPERANDS} fit")
        places = {**graph.arena, **graph.peers}
        operands = [places[buffers[n]].offset if n in buffers and buffers[n] in places else -1 for n in kind.operands]
        packed = matrix_bytes(kind, op, graph)
        tiles = kind.tiles(op, tensors)
        streamed = packed > 0 and kind.cost(op, tensors, 0, tiles, graph.dtype).weight_bytes >= packed
        gathered = kind.gathered(op)
        weights = graph.weight_offsets[gathered] if gathered else self.matrix_offset(op) if packed else -1
        return _Placement(weights, graph.param_offsets.get(op.name, -1), operands, packed // tiles if streamed and not gathered else 0,
                          (1, 0) if gathered else kind.arguments(op))

    def _prefetch(self, task: Task, place: _Placement) -> tuple[int, int]:
        if not place.tile_bytes:
            return 0, 0
        size = (task.tile_end - task.tile_begin) * place.tile_bytes
        return place.weights + task.tile_begin * place.tile_bytes, min(size, PREFETCH_BYTES)


def _ranges(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Where each row begins when all stand one after the other, and how long it is."""
    count = np.fromiter((len(row) for row in rows), np.int64, len(rows))
    return np.cumsum(count) - count, count


@dataclass(frozen=True)
class _Placement:
    """Where an operator's memory is: operands in the arena, or in peer memory where the kind says so. `tile_bytes`: packed weights of a tile, 0
    where tasks do not stream theirs. `arguments`: of the instruction; (1, 0) if `weights` is the matrix whose rows are the input."""

    weights: int
    params: int
    operands: list[int]
    tile_bytes: int
    arguments: tuple[int, int]


def constant(name: str, value: Scalar) -> str:
    """The declaration of a compile-time constant, without `static constexpr`: "int k = 576"."""
    if isinstance(value, bool):
        return f"bool {name} = {str(value).lower()}"
    if isinstance(value, int):
        return f"int {name} = {value}" if -(2**31) < value < 2**31 else f"long long {name} = {value}LL"
    if isinstance(value, float):
        return f"float {name} = static_cast<float>({value.hex()})"
    if isinstance(value, str):
        return f'const char* {name} = "{value}"'
    raise InternalError(f"constant {name} is a {type(value).__name__}, expected bool, int, float or str")
