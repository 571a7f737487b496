"""What a task kind is: one folder under `mpk/tasks`, found by name, with everything about that kind in it.

A folder holds `task.py` (a module-level `KIND`, an instance of a `TaskKind` subclass), `cpp.hpp` (device code of the C++
back end), `cuda.cuh` (of the CUDA back end; one of the two may be missing), `reference.py` (`run(op, task, env)`: the same work in numpy) and `cases.py` (shapes its test
tries). `load_kinds()` imports them all and fails if a part is missing.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np

from mpk.errors import InternalError
from mpk.graph.sm_task_graph import Buffer, Cost, Region
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph


class WeightSource(Protocol):
    """Where weights come from; tensors are read one at a time, memory-mapped where the file allows it."""

    def names(self) -> list[str]:
        """Names of all tensors, in transformers' naming ("model.layers.0.self_attn.q_proj.weight")."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Rows [begin, end) of the tensor as float32 (dequantised or widened), C-contiguous."""
        ...

    def fingerprint(self) -> str:
        """Hash of what identifies the contents (paths, sizes, times, or the bytes); key of the packed-weights cache."""
        ...


@dataclass
class StepView:
    """What one step computes, for references in numpy: one entry a row."""

    tokens: np.ndarray  # int32 [rows]
    slots: np.ndarray  # int32 [rows], which sequence
    positions: np.ndarray  # int32 [rows], position in its sequence
    logit_rows: np.ndarray  # int32 [logit rows], indices of the rows whose logits are wanted


@dataclass
class Env:
    """Memory of the reference executor. All arrays are float32; every task reads and writes only its regions.

    `buffers[name]`: [rows, columns] (rows as in the buffer). `caches[name]`: [slots, max context, columns], key heads first,
    then value heads. Buffers of kind "peer" hold the parts of all ranks: [rows, ranks * columns]. `weight(name)`: the source's tensor, rounded to the engine's weight type and widened again.
    """

    buffers: dict[str, np.ndarray]
    caches: dict[str, np.ndarray]
    step: StepView
    weight: Callable[[str], np.ndarray]
    graph: TensorGraph
    rank: int = 0
    peers: Sequence[Env] = ()  # of all ranks, this one too, where several share the model

    def send(self, op: Operator, columns: slice, values: np.ndarray) -> None:
        """Put `values` [rows, columns] into this rank's part of the operator's message, in the memory of every rank."""
        width = int(op.attrs["columns"])
        for peer in self.peers:
            peer.buffers[op.outputs[0]][: len(values), self.rank * width + columns.start : self.rank * width + columns.stop] = values


class TaskKind(ABC):
    """Regions, cost, packing and compile-time constants of one kind of task.

    A *tile* is the smallest piece of an operator that can be given to a worker: tile t of an operator covers a fixed range
    of its output columns and a fixed, contiguous range of its packed weights.
    """

    name: str
    operands: tuple[str, ...]  # names of the buffer operands, in the order of the instruction's operand slots
    # How the CUDA back end keeps the operator's matrix: "" (it has none), "rows" (row-major, for gathering) or "stages" (fragments
    # in the order in which the block that computes them streams them, see mpk/codegen/stages.py).
    cuda_form: str = ""
    # Operand whose producer the tasks go with: cut into the same ranges of tiles, and each run by the worker that ran the same range.
    follows: str = ""
    # CUDA back end: whether a block's fast warps may begin a task of this kind while slow ones are in another one of the kind (they share
    # scratch memory, so the device code has to see to it).
    overlaps: bool = False
    # Whether tiles may have half as many output columns (attr `tile_columns`), where that shares an operator better among workers.
    halves: bool = False

    @abstractmethod
    def tiles(self, op: Operator, graph: TensorGraph) -> int:
        """Number of tiles of the operator."""

    @abstractmethod
    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        """Operand name -> buffer name."""

    @abstractmethod
    def reads(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        """Regions that tiles [begin, end) read."""

    @abstractmethod
    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        """Regions that tiles [begin, end) write."""

    @abstractmethod
    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        """Bytes and operations of tiles [begin, end)."""

    @abstractmethod
    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        """Compile-time constants of the device code; operators with equal constants share one instance."""

    def body(self, op: Operator, graph: TensorGraph) -> tuple[Scalar, ...] | None:
        """CUDA back end: what an instance of the device code is compiled for, where it has the rest of a variant's constants as arguments (`product_of`
        of the kind); operators with equal ones share an instance, variants or not. None: every variant has its own."""
        return None

    def arguments(self, op: Operator) -> tuple[int, int]:
        """Numbers that differ among operators of one variant, for the instruction's `iargs`."""
        return 0, 0

    def extra_buffers(self, op: Operator, graph: TensorGraph) -> tuple[Buffer, ...]:
        """Buffers beyond the operator's values that the operator needs (partial sums, caches)."""
        return ()

    def scratch_bytes(self, op: Operator, graph: TensorGraph, max_rows: int) -> int:
        """Private memory of a worker while it runs one task of the operator."""
        return 0

    def max_splits(self, op: Operator, graph: TensorGraph) -> int:
        """Largest number of tasks worth making of this operator (the number of tiles, unless work cannot be shared)."""
        return self.tiles(op, graph)

    def unit(self, op: Operator, graph: TensorGraph) -> int:
        """Tiles that stay together: tasks begin at multiples of so many."""
        return 1

    def unit_a_task(self, op: Operator, graph: TensorGraph) -> bool:
        """Whether every task is one unit."""
        return False

    def packed_bytes(self, op: Operator, graph: TensorGraph, dtype: str) -> int:
        """Bytes of the operator's packed matrix, a multiple of 64 (0: it has none)."""
        return 0

    def packed_key(self, op: Operator) -> str:
        """Operators with the same key share one packed matrix (tied embedding and head)."""
        return "+".join(op.weights.get("weight", ()))

    def gathered(self, op: Operator) -> str:
        """Matrix key (see mpk/tasks/matrices.py) of the row-major matrix whose rows are the operator's input, "": it has an input like others."""
        return ""

    def pack(self, op: Operator, graph: TensorGraph, source: WeightSource, dtype: str, out: np.ndarray) -> None:
        """Write the packed matrix of the operator into `out` (uint8 [packed_bytes], zeroed), reading rows in blocks."""
        raise InternalError(f"task kind {self.name} has no weights to pack")

    def params(self, op: Operator, graph: TensorGraph, source: WeightSource) -> np.ndarray:
        """The operator's small parameters (norm weights, biases, frequencies) as one float32 vector; may be empty."""
        return np.zeros(0, np.float32)


REQUIRED_FILES = ("task.py", "reference.py", "cases.py")
DEVICE_FILES = ("cpp.hpp", "cuda.cuh")  # at least one of them


@cache
def load_kinds() -> Mapping[str, TaskKind]:
    """All task kinds by name; raises `InternalError` naming the folder and the part that is missing."""
    kinds: dict[str, TaskKind] = {}
    root = Path(__file__).parent
    for folder in sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith(("_", "."))):
        for part in REQUIRED_FILES:
            if not (folder / part).is_file():
                raise InternalError(f"task kind {folder.name} has no {part}")
        if not any((folder / part).is_file() for part in DEVICE_FILES):
            raise InternalError(f"task kind {folder.name} has neither {' nor '.join(DEVICE_FILES)}")
        kind = importlib.import_module(f"mpk.tasks.{folder.name}.task").KIND
        if kind.name != folder.name:
            raise InternalError(f"task kind folder {folder.name} defines kind {kind.name}")
        kinds[kind.name] = kind
    return kinds


def kind_of(op: Operator) -> TaskKind:
    """The task kind of a fused operator."""
    kinds = load_kinds()
    if op.kind not in kinds:
        raise InternalError(f"operator {op.name} is of kind {op.kind}, which no task kind implements")
    return kinds[op.kind]
