"""What a page of `mpk.simulate.page` holds: a JSON manifest for people's numbers, and packed columns for the spans.

A *column* is an array of unsigned integers of at most 32 bits. It is stored as differences from its predecessor modulo 2^32 (`delta`) or as
it is, split into byte planes (all lowest bytes, then all second bytes, ...), and left out above the highest plane that is not zero. All columns
of a *block* (the tasks of a graph, the spans of one device) follow one another, are deflated together and written as base64. Neighbours
in a schedule resemble each other, so that a span takes 4 to 9 bytes. `page_files/data.js` is the reader.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.simulate import analysis
from mpk.simulate.timeline import CONSUMER, LINK, LOADER, PHASES, ROLES, Timeline
from mpk.targets import hardware

FORMAT = 1
LIMIT = 1 << 32
NO_TASK = LIMIT - 1  # task -1
OVERVIEW_BINS = 1024
LEVEL = 6  # of deflate: 9 takes three times as long for 2 % less


@dataclass
class Block:
    """Columns in order, as the page holds them: `columns` describes each as [name, length, planes, delta], `text` is base64 of deflate."""

    columns: list[tuple[str, int, int, bool]]
    text: str


@dataclass
class PageData:
    """`manifest` is JSON-ready; `blocks` are looked up by the ids it mentions."""

    manifest: dict[str, Any]
    blocks: dict[str, Block] = field(default_factory=dict)


def pack(columns: Mapping[str, tuple[np.ndarray, bool]]) -> Block:
    """A block of columns: name -> (values from 0 to 2^32 - 1, whether neighbours are alike, so that differences are stored)."""
    described, parts = [], []
    for name, (values, delta) in columns.items():
        wide = values.astype(np.uint64)
        if len(wide) and int(wide.max()) >= LIMIT:
            raise ValueError(f"column {name} holds {int(wide.max())}, expected less than 2^32")
        stored = wide.astype(np.uint32)
        if delta:
            stored = np.diff(stored, prepend=np.zeros(1, np.uint32))  # modulo 2^32
            stored = (stored << np.uint32(1)) ^ (np.uint32(0) - (stored >> np.uint32(31)))  # small negative differences become small numbers
        planes = [plane for plane in stored.astype("<u4").view(np.uint8).reshape(len(stored), 4).T]
        while planes and not planes[-1].any():
            planes.pop()
        described.append((name, len(stored), len(planes), delta))
        parts += [np.ascontiguousarray(p).tobytes() for p in planes]
    return Block(described, base64.b64encode(zlib.compress(b"".join(parts), LEVEL)).decode("ascii"))


def build(timelines: Sequence[Timeline], title: str, floor_ms: float | None) -> PageData:
    """Everything a page shows of one or two timelines."""
    data = PageData({"format": FORMAT, "title": title, "floor_ms": floor_ms, "phases": PHASES, "roles": ROLES, "not_traced": analysis.NOT_TRACED,
                     "no_task": NO_TASK})
    graphs: list[SMTaskGraph] = []
    for timeline in timelines:
        if not any(timeline.graph is g for g in graphs):
            graphs.append(timeline.graph)
    data.manifest["graphs"] = [_graph(g, f"g{i}", data.blocks) for i, g in enumerate(graphs)]
    data.manifest["timelines"] = [
        _timeline(t, label, f"t{i}", next(j for j, g in enumerate(graphs) if g is t.graph), data.blocks) for i, (t, label) in enumerate(zip(timelines, labels(timelines), strict=True))]
    data.manifest["operators"] = _operators(timelines)
    return data


def _graph(graph: SMTaskGraph, key: str, blocks: dict[str, Block]) -> dict[str, Any]:
    tasks = graph.tasks
    columns = {
        "op": (np.array([t.op for t in tasks], np.int64), True),
        "tile_begin": (np.array([t.tile_begin for t in tasks], np.int64), True),
        "tile_count": (np.array([t.tile_end - t.tile_begin for t in tasks], np.int64), True),
        "worker": (np.array([max(t.worker, 0) for t in tasks], np.int64), True),
    }
    blocks[key] = pack(columns)
    return {"block": key, "target": graph.target, "model": graph.tensor_graph.config.architecture, "events": len(graph.events),
            "operators": [{"name": op.name, "short": analysis.short_name(op), "kind": op.kind, "layer": op.layer}
                          for op in graph.tensor_graph.operators]}


def labels(timelines: Sequence[Timeline]) -> list[str]:
    """What tells timelines apart: their sources, numbered where these are equal."""
    sources = [t.source for t in timelines]
    return [s if sources.count(s) == 1 else f"{s} {sources[:i].count(s) + 1}" for i, s in enumerate(sources)]


def tick_ns(timeline: Timeline) -> int:
    """Nanoseconds of one unit of time in the page: 1, or as much as makes 32 bits suffice."""
    return timeline.duration_ns // LIMIT + 1


def _timeline(timeline: Timeline, label: str, key: str, graph: int, blocks: dict[str, Block]) -> dict[str, Any]:
    tick = tick_ns(timeline)
    causes = analysis.waited_for(timeline)
    moved, source = analysis.traffic(timeline)
    amounts = np.maximum(timeline.spans["bytes"], moved)
    unit = int(amounts.max(initial=0)) // LIMIT + 1
    devices = []
    for device in range(analysis.devices_shown(timeline)):
        block = f"{key}d{device}"
        chosen = timeline.spans["device"] == device
        tracks, blocks[block] = _spans(timeline.spans[chosen], causes[chosen], amounts[chosen] // unit, tick)
        _, busy, rate = analysis.series(timeline, OVERVIEW_BINS, device)
        devices.append({
            "block": block, "tracks": tracks, "steps": [e // tick for e in analysis.step_ends(timeline, device).tolist()],
            "shares": {k: round(v, 6) for k, v in analysis.shares(timeline, device).items()},
            "overview": {"utilisation": [round(float(b), 4) for b in busy], "gb_s": [round(float(r) / 1e9, 2) for r in rate]}})
    step = timeline.duration_ns / timeline.steps
    brought, sent = analysis.bytes_per_step(timeline)
    return {
        "graph": graph, "source": timeline.source, "label": label, "unit": "SM" if hardware.backend_of(timeline.graph.target) == "cuda" else "worker", "workers": timeline.workers, "steps": timeline.steps, "tick_ns": tick, "byte_unit": unit,
        "duration": timeline.duration_ns // tick, "devices": devices, "spans": len(timeline.spans), "traffic": source,
        "step_ms": step / 1e6, "in_tasks": analysis.in_tasks(timeline),
        "utilisation": analysis.utilisation(timeline) if analysis.knows_waits_inside(timeline) else None, "shares": analysis.shares(timeline),
        "bytes": brought, "sent_bytes": sent, "gb_s": brought / max(step, 1.0), "all_devices": timeline.devices,
        "roles": [r for r in (CONSUMER, LOADER, LINK) if bool((timeline.spans["role"] == r).any())]}


def _spans(spans: np.ndarray, causes: np.ndarray, amounts: np.ndarray, tick: int) -> tuple[list[tuple[int, int, int]], Block]:
    """(tracks as [worker, role, spans], the block with the columns of all spans, track by track in order of time)."""
    order = np.lexsort((spans["begin_ns"], spans["role"], spans["worker"]))
    spans, causes, amounts = spans[order], causes[order], amounts[order]
    begin, end = spans["begin_ns"] // tick, spans["end_ns"] // tick
    at = np.flatnonzero(np.diff(spans["worker"], prepend=-1) | np.diff(spans["role"], prepend=-1)) if len(spans) else np.zeros(0, np.int64)
    counts = np.diff(np.append(at, len(spans)))
    tracks = [(int(spans["worker"][i]), int(spans["role"][i]), int(n)) for i, n in zip(at.tolist(), counts.tolist(), strict=True)]
    gap = begin - np.append([0], end[:-1]) if len(spans) else begin  # from the end of the span before; negative where spans overlap
    gap[at] = begin[at]
    columns = {
        "gap": (gap % LIMIT, False), "length": (end - begin, False), "task": (spans["task"].astype(np.int64) % LIMIT, True),
        "phase": (spans["phase"].astype(np.int64), False), "bytes": (amounts, True), "cause": (causes.astype(np.int64) % LIMIT, True)}
    return tracks, pack(columns)


def _operators(timelines: Sequence[Timeline]) -> list[dict[str, Any]]:
    """The table by operator: one row a short name, longest first, with one column of figures a timeline (None: not there)."""
    tables = [{row.name: row for row in analysis.per_operator(t)} for t in timelines]
    rows = []
    for name in dict.fromkeys(n for table in tables for n in table):
        entries = [table.get(name) for table in tables]
        kind = next(e.kind for e in entries if e is not None)
        figures = [None if e is None else {
            "task_us": round(e.task_us, 3), "run_us": round(e.run_us, 3), "before_us": round(e.before_us, 3), "active_us": round(e.active_us, 3),
            "tasks": e.tasks,
            "bytes": e.bytes, "gb_s": round(e.gb_s, 2), "waits": {PHASES[p]: round(us, 3) for p, us in e.wait_us.items()}} for e in entries]
        rows.append({"name": name, "kind": kind, "figures": figures})
    return sorted(rows, key=lambda r: -sum(f["task_us"] for f in r["figures"] if f is not None))

