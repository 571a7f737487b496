"""Files and text of an `SMTaskGraph`: `save` / `load` (one compressed file) and `to_text` / `from_text` (for people and diffs).

The file is a zip archive of numpy columns ("npz"): a JSON header with everything that is small, and one array a column for tasks,
regions, events, queues and dependencies, ragged rows as values plus lengths. Both forms give back an equal graph; `model`, where the
weights come from, is not part of either. A graph that reads back is well formed, not proven: `mpk.passes.verify` does that.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from mpk.errors import GraphError, ModelError
from mpk.graph.sm_task_graph import Allocation, Buffer, Cost, Event, MachineLimits, Region, SMTaskGraph, Task
from mpk.graph.tensor_graph import Operator, Shard, TensorGraph, Value, Weight
from mpk.models.config import DecoderConfig

FORMAT = "mpk.SMTaskGraph"
VERSION = 3
REMEDY = "lower the model again and save its graph"

Columns = dict[str, NDArray[Any]]


def save(graph: SMTaskGraph, path: str | Path) -> None:
    """Write `graph` to `path`; raises `GraphError` where that cannot be written."""
    columns = _columns(graph)
    columns["header"] = np.frombuffer(json.dumps(_header(graph)).encode(), np.uint8)
    packed = io.BytesIO()
    np.savez_compressed(packed, **columns)  # type: ignore[arg-type]
    try:
        Path(path).write_bytes(packed.getvalue())
    except OSError as error:
        raise GraphError(f"graph file {path} cannot be written ({error.strerror})", remedy="choose a folder that can be written") from error


def fingerprint(graph: SMTaskGraph) -> str:
    """Hash of all that a proof of the graph speaks of: equal graphs have equal ones."""
    header = {key: value for key, value in _header(graph).items() if key not in ("notes", "param_offsets")}
    h = xxhash.xxh3_128(json.dumps(header).encode())
    for name, column in sorted(_columns(graph).items()):
        h.update(f"{name}{column.shape}".encode())
        h.update(column.tobytes())
    return h.hexdigest()


def load(path: str | Path) -> SMTaskGraph:
    """Read what `save` wrote; raises `GraphError` for a file that is missing, damaged, of another kind or version."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise GraphError(f"graph file {path} cannot be read ({error.strerror})", remedy=REMEDY) from error
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if archive.testzip() is not None:
                raise ValueError(f"checksum of {archive.testzip()}")
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            header = json.loads(bytes(arrays["header"]))
            _check_header(header, path)
            graph = _graph(header)
            _fill(graph, {name: arrays[name] for name in arrays.files})
    except GraphError:
        raise
    except Exception as error:  # whatever zip, numpy and JSON raise for arbitrary bytes
        raise GraphError(f"graph file {path} is damaged or no graph file ({type(error).__name__}: {error})", remedy=REMEDY) from error
    return graph


def _check_header(header: dict[str, Any], where: str | Path) -> None:
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise GraphError(f"{where} is no graph file", remedy=REMEDY)
    if header.get("version") != VERSION:
        raise GraphError(f"graph file {where} has another version", expected=str(VERSION), actual=str(header.get("version")), remedy=REMEDY)


# ---- header: what is small
def _header(graph: SMTaskGraph) -> dict[str, Any]:
    tensors = graph.tensor_graph
    return {
        "format": FORMAT, "version": VERSION, "target": graph.target, "num_workers": graph.num_workers, "max_rows": graph.max_rows,
        "dtype": graph.dtype, "ranks": graph.ranks, "config": tensors.config.to_json(),
        "values": [[v.name, v.columns, v.rows, v.kind, v.element_bytes, v.flagged] for v in tensors.values.values()],
        "weights": [_weight_row(w) for w in tensors.weights.values()],
        "operators": [_operator_row(op) for op in tensors.operators],
        "buffers": [[b.name, b.columns, b.rows, b.kind, b.element_bytes, b.flagged] for b in graph.buffers.values()],
        "arena": [[name, *place] for name, place in graph.arena.items()], "arena_bytes": graph.arena_bytes,
        "peers": [[name, *place] for name, place in graph.peers.items()], "peer_bytes": graph.peer_bytes,
        "flagged_begin": graph.flagged_begin, "flagged_bytes": graph.flagged_bytes,
        "weight_offsets": graph.weight_offsets, "weight_bytes": graph.weight_bytes, "param_offsets": graph.param_offsets,
        "limits": asdict(graph.limits) if graph.limits else None, "notes": graph.notes,
        "events_before_fusion": graph.events_before_fusion, "flight": graph.flight,
    }


def _weight_row(weight: Weight) -> list[Any]:
    """Name and shape; axis, starts and whole shape of what a rank holds, where ranks share the tensor."""
    shard = weight.shard
    return [weight.name, list(weight.shape), *([shard.axis, list(shard.starts), list(shard.whole)] if shard else [])]


def _weight(name: str, shape: list[int], *shard: Any) -> Weight:
    axis, starts, whole = shard or (0, (), ())
    return Weight(name, tuple(shape), Shard(axis, tuple(starts), tuple(whole)) if shard else None)


def _operator_row(op: Operator) -> list[Any]:
    attrs = {k: v.item() if isinstance(v, np.generic) else v for k, v in op.attrs.items()}
    return [op.name, op.kind, op.inputs, op.outputs, {role: list(names) for role, names in op.weights.items()}, attrs, op.layer]


def _graph(header: dict[str, Any]) -> SMTaskGraph:
    """The graph without tasks, events and queues."""
    tensors = TensorGraph(DecoderConfig.from_json(header["config"]))
    tensors.values = {row[0]: Value(*row) for row in header["values"]}
    tensors.weights = {row[0]: _weight(*row) for row in header["weights"]}
    tensors.operators = [_operator(*row) for row in header["operators"]]
    graph = SMTaskGraph(tensors, header["target"], header["num_workers"], header["max_rows"], header["dtype"],
                        header["ranks"])
    graph.buffers = {row[0]: Buffer(*row) for row in header["buffers"]}
    graph.arena = {name: Allocation(offset, size) for name, offset, size in header["arena"]}
    graph.arena_bytes, graph.flagged_begin, graph.flagged_bytes = header["arena_bytes"], header["flagged_begin"], header["flagged_bytes"]
    graph.peers = {name: Allocation(offset, size) for name, offset, size in header["peers"]}
    graph.peer_bytes = header["peer_bytes"]
    graph.weight_offsets, graph.weight_bytes = dict(header["weight_offsets"]), header["weight_bytes"]
    graph.param_offsets = dict(header["param_offsets"])
    graph.limits = MachineLimits(**header["limits"]) if header["limits"] else None
    graph.events_before_fusion = header["events_before_fusion"]
    graph.notes = list(header["notes"])
    graph.flight = tuple(header["flight"]) if header.get("flight") else None
    return graph


def _operator(name: str, kind: str, inputs: list[str], outputs: list[str], weights: dict[str, list[str]], attrs: dict[str, Any],
              layer: int) -> Operator:
    return Operator(name, kind, tuple(inputs), tuple(outputs), {role: tuple(names) for role, names in weights.items()}, attrs, layer)


# ---- columns: what grows with the number of tasks
def _ragged(rows: Iterable[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rows = list(rows)
    lengths = np.fromiter((len(r) for r in rows), np.int64, len(rows))
    return np.fromiter((v for r in rows for v in r), np.int64, int(lengths.sum())), lengths


def _unragged(columns: Columns, name: str) -> list[list[int]]:
    values, lengths = columns[name].tolist(), columns[f"{name}_length"].tolist()
    if any(n < 0 for n in lengths) or sum(lengths) != len(values):
        raise ValueError(f"lengths of column {name} do not add up")
    rows, begin = [], 0
    for n in lengths:
        rows.append(values[begin:begin + n])
        begin += n
    return rows


def _columns(graph: SMTaskGraph) -> Columns:
    buffer_names = sorted({r.buffer for t in graph.tasks for r in (*t.reads, *t.writes)})
    kind_names = sorted({t.kind for t in graph.tasks})
    buffer, kind = ({n: i for i, n in enumerate(names)} for names in (buffer_names, kind_names))
    regions: dict[Region, int] = {}  # tasks share regions
    for t in graph.tasks:
        for r in (*t.reads, *t.writes):
            regions.setdefault(r, len(regions))
    sets: dict[frozenset[int], int] = {}
    for needs in (*graph.dependencies.values(), *graph.carried.values()):
        for s in needs:
            sets.setdefault(s, len(sets))
    columns: Columns = {
        "names": np.frombuffer(json.dumps([buffer_names, kind_names]).encode(), np.uint8),
        "tasks": np.array([(t.id, t.op, kind[t.kind], t.tile_begin, t.tile_end, t.worker, *t.cost) for t in graph.tasks], np.int64).reshape(-1, 9),
        "regions": np.array([(buffer[r.buffer], r.begin, r.end) for r in regions], np.int64).reshape(-1, 3),
        "events": np.array([(e.id, e.threshold, e.carried) for e in graph.events], np.int64).reshape(-1, 3),
        "needing": np.fromiter(graph.dependencies, np.int64, len(graph.dependencies)),
        "carrying": np.fromiter(graph.carried, np.int64, len(graph.carried)),
    }
    ragged: dict[str, Iterable[Sequence[int]]] = {
        "reads": ([regions[r] for r in t.reads] for t in graph.tasks), "writes": ([regions[r] for r in t.writes] for t in graph.tasks),
        "waits": (t.waits for t in graph.tasks), "signals": (t.signals for t in graph.tasks),
        "producers": (e.producers for e in graph.events), "queues": graph.queues,
        "need_sets": (sorted(s) for s in sets), "needs": ([sets[s] for s in needs] for needs in graph.dependencies.values()),
        "carried": ([sets[s] for s in needs] for needs in graph.carried.values()),
    }
    for name, rows in ragged.items():
        columns[name], columns[f"{name}_length"] = _ragged(rows)
    return columns


def _fill(graph: SMTaskGraph, columns: Columns) -> None:
    buffer_names, kind_names = json.loads(bytes(columns["names"]))
    regions = [Region(buffer_names[_index(b, buffer_names)], begin, end) for b, begin, end in columns["regions"].tolist()]
    touched = {name: [tuple(regions[_index(i, regions)] for i in row) for row in _unragged(columns, name)] for name in ("reads", "writes")}
    waits, signals = _unragged(columns, "waits"), _unragged(columns, "signals")
    for row, reads, writes, wait, signal in zip(columns["tasks"].tolist(), touched["reads"], touched["writes"], waits, signals, strict=True):
        i, op, kind, begin, end, worker, *cost = row
        graph.tasks.append(Task(i, op, kind_names[_index(kind, kind_names)], begin, end, reads, writes, Cost(*cost), worker, tuple(wait),
                                tuple(signal)))
    for (i, threshold, carried), producers in zip(columns["events"].tolist(), _unragged(columns, "producers"), strict=True):
        graph.events.append(Event(i, tuple(producers), threshold, bool(carried)))
    graph.queues = _unragged(columns, "queues")
    sets = [frozenset(s) for s in _unragged(columns, "need_sets")]
    for tasks, rows, out in (("needing", "needs", graph.dependencies), ("carrying", "carried", graph.carried)):
        for task, needs in zip(columns[tasks].tolist(), _unragged(columns, rows), strict=True):
            out[task] = [sets[_index(i, sets)] for i in needs]


def _index(i: int, items: Sequence[Any]) -> int:
    if not 0 <= i < len(items):
        raise ValueError(f"index {i} of {len(items)}")
    return i


# ---- text
def to_text(graph: SMTaskGraph) -> str:
    """A stable text, one line an operator, buffer, task, event and queue; `from_text` reads it back."""
    from mpk.graph.text import write

    return write(graph, _header(graph))


def from_text(text: str) -> SMTaskGraph:
    """Read what `to_text` wrote; raises `GraphError` naming the line that cannot be read."""
    from mpk.graph.text import read

    header, fill = read(text)
    _check_header(header, "text")
    try:
        graph = _graph(header)
    except (KeyError, TypeError, ValueError, ModelError) as error:
        raise GraphError(f"text of a graph is incomplete ({type(error).__name__}: {error})", remedy=REMEDY) from error
    fill(graph)
    return graph
