"""Pack a model's weights into one file in the cache, in the order and form in which the program reads them.

Matrices are read from the source a block of rows at a time and written into the mapped file, so that memory holds no second
copy; later starts map the file read-only and verify its checksum.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpk.codegen.cache import Entry, Store, digest
from mpk.errors import TargetError
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.passes.memory import align, lay_out_params
from mpk.tasks import base
from mpk.tasks.base import TaskKind, WeightSource, kind_of

TASKS = Path(base.__file__).parent
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class PackedWeights:
    """Read-only views of the packed file: `weights` uint8 [weight bytes], `params` uint8 [parameter bytes], both 64-byte aligned."""

    weights: np.ndarray
    params: np.ndarray
    path: Path


def load_weights(graph: SMTaskGraph, source: WeightSource, progress: Progress | None = None) -> PackedWeights:
    """Packed weights of `graph` from the cache, packed first where they are not there; fills `graph.param_offsets`.

    `progress(done bytes, total bytes)` is called while packing. What the source warned about while it was read (values that are
    not finite, say) is kept with the entry and warned about at every load.
    """
    store = Store("weights", ".bin")
    key = weights_key(graph, source)
    entry = store.find(key)
    if entry is None:
        entry = _pack(graph, source, store, key, progress or (lambda done, total: None))
    for text in entry.notes["warnings"]:
        warnings.warn(text, stacklevel=2)
    graph.param_offsets = dict(entry.notes["param_offsets"])
    try:
        data = np.memmap(entry.path, np.uint8, "r") if entry.path.stat().st_size else np.zeros(0, np.uint8)
    except OSError as error:  # a limit of the process: a map takes no memory by itself
        raise TargetError(f"{entry.path} cannot be mapped", actual=error.strerror or str(error),
                          remedy="a smaller model, or a larger limit of this process (ulimit -v)") from error
    return PackedWeights(data[: graph.weight_bytes], data[align(graph.weight_bytes) :], entry.path)


def weights_key(graph: SMTaskGraph, source: WeightSource) -> str:
    """Hash of the source's contents, of the place and form of every packed matrix, and of the code that packs them."""
    tensors = graph.tensor_graph
    holders = [op for op in tensors.operators if op.weights or _has_params(kind_of(op))]  # how work is shared changes only the others
    operators = [(op.name, op.kind, kind_of(op).packed_key(op), {r: list(w) for r, w in op.weights.items()},
                  dict(op.attrs) if op.weights else {}) for op in holders]
    plan = json.dumps([graph.dtype, graph.weight_offsets, graph.weight_bytes, operators, tensors.config.to_json()], sort_keys=True)
    files = {inspect.getfile(type(kind_of(op))) for op in holders}
    code = [path.read_bytes() for path in (*map(Path, sorted(files)), *sorted(TASKS.glob("*.py")))]
    return digest(source.fingerprint(), plan, *code)


def _has_params(kind: TaskKind) -> bool:
    return type(kind).params is not TaskKind.params


def _reserve(path: Path, size: int) -> None:
    """A zeroed file of `size` bytes that the disk surely has room for: a mapped write to a full disk would end the process."""
    with path.open("wb") as file:
        file.truncate(size)
        if size and hasattr(os, "posix_fallocate"):
            with _unless(errno.EOPNOTSUPP, errno.EINVAL):
                os.posix_fallocate(file.fileno(), 0, size)


@contextlib.contextmanager
def _unless(*numbers: int) -> Iterator[None]:
    """Ignore an `OSError` of these numbers."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


def _pack(graph: SMTaskGraph, source: WeightSource, store: Store, key: str, progress: Progress) -> Entry:
    made = store.temporary(key)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            params = lay_out_params(graph, source)
            begin = align(graph.weight_bytes)
            total = begin + params.nbytes
            store.require_space(total)
            with store.writing():
                _reserve(made, total)
            if total:
                out = np.memmap(made, np.uint8, "r+")
                out[begin:] = params.view(np.uint8)
                _matrices(graph, source, out, progress)
                with store.writing():
                    out.flush()
                del out
        texts = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
        return store.commit(key, made, {"param_offsets": graph.param_offsets, "warnings": texts})
    finally:
        made.unlink(missing_ok=True)


def _matrices(graph: SMTaskGraph, source: WeightSource, out: np.ndarray, progress: Progress) -> None:
    tensors = graph.tensor_graph
    done: set[str] = set()
    written = 0
    progress(0, graph.weight_bytes)
    for op in tensors.operators:
        kind = kind_of(op)
        size, packed = kind.packed_bytes(op, tensors, graph.dtype), kind.packed_key(op)
        if not size or packed in done:
            continue
        done.add(packed)
        offset = graph.weight_offsets[packed]
        kind.pack(op, tensors, source, graph.dtype, out[offset : offset + size])
        written += size
        progress(written, graph.weight_bytes)
