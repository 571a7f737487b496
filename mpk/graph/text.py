"""The text form of an `SMTaskGraph`, one line a thing, every line `word name key=value ...`.

Names and values without blanks stand as they are, everything else as JSON. Tasks stand in sequential order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from mpk.errors import GraphError
from mpk.graph.sm_task_graph import Cost, Event, Region, SMTaskGraph, Task

SCALARS = ("target", "num_workers", "max_rows", "dtype", "ranks", "arena_bytes", "flagged_begin", "flagged_bytes", "peer_bytes", "weight_bytes",
           "events_before_fusion")
_PLAIN = re.compile(r"[A-Za-z_][\w.+/-]*")
_RESERVED = ("true", "false", "null")
_REGION = re.compile(r'(?:("(?:[^"\\]|\\.)*")|([^\[\],"]+))\[(-?\d+):(-?\d+)\](?:,|$)')

_SHARD = ("axis", "starts", "whole")  # of a weight that ranks share
Fill = Callable[[SMTaskGraph], None]


def _word(value: Any) -> str:
    """A value without blanks: a plain name as it is, everything else as compact JSON."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value not in _RESERVED:
        return value
    return json.dumps(value, separators=(",", ":")).replace(" ", "\\u0020")


def _value(word: str) -> Any:
    return word if _PLAIN.fullmatch(word) and word not in _RESERVED else json.loads(word)


def _line(kind: str, name: Any, /, **fields: Any) -> str:
    return " ".join([kind, name if name == "-" else _word(name), *(f"{k}={v if k in _READY else _word(v)}" for k, v in fields.items())])


_READY = ("tiles", "reads", "writes", "waits", "signals", "producers", "cost", "tasks", "needs")  # fields that are formatted already


def _ids(ids: Iterable[int]) -> str:
    return ",".join(map(str, ids)) or "-"


def _regions(regions: Iterable[Region]) -> str:
    return ",".join(f"{_word(r.buffer)}[{r.begin}:{r.end}]" for r in regions) or "-"


def write(graph: SMTaskGraph, header: dict[str, Any]) -> str:
    """The text of `graph`, whose `header` is that of its file."""
    lines = [f"{header['format']} version {header['version']}"]
    lines += [_line("set", key, value=header[key]) for key in SCALARS]
    lines += [_line("limits", "-", value=header["limits"]), _line("config", "-", value=header["config"])]
    lines += [_line("value", n, columns=c, rows=r, kind=k, element_bytes=e, flagged=f) for n, c, r, k, e, f in header["values"]]
    lines += [_line("weight", n, shape=s, **dict(zip(_SHARD, shard, strict=False))) for n, s, *shard in header["weights"]]
    lines += [_line("operator", n, kind=k, inputs=list(i), outputs=list(o), weights=w, attrs=a, layer=layer)
              for n, k, i, o, w, a, layer in header["operators"]]
    lines += [_line("buffer", n, columns=c, rows=r, kind=k, element_bytes=e, flagged=f) for n, c, r, k, e, f in header["buffers"]]
    lines += [_line("place", n, offset=o, size=s) for n, o, s in header["arena"]]
    lines += [_line("peer", n, offset=o, size=s) for n, o, s in header["peers"]]
    lines += [_line("matrix", n, offset=o) for n, o in header["weight_offsets"].items()]
    lines += [_line("params", n, offset=o) for n, o in header["param_offsets"].items()]
    for t in graph.tasks:
        lines.append(_line("task", t.id, kind=t.kind, op=t.op, tiles=f"{t.tile_begin}:{t.tile_end}", worker=t.worker, reads=_regions(t.reads),
                           writes=_regions(t.writes), waits=_ids(t.waits), signals=_ids(t.signals), cost="/".join(map(str, t.cost))))
    lines += [_line("event", e.id, threshold=e.threshold, carried=e.carried, producers=_ids(e.producers)) for e in graph.events]
    lines += [_line("queue", w, tasks=_ids(q)) for w, q in enumerate(graph.queues)]
    sets: dict[frozenset[int], int] = {}
    for word, all_needs in (("need", graph.dependencies), ("carry", graph.carried)):
        for task, needs in all_needs.items():
            for s in needs:
                if s not in sets:
                    sets[s] = len(sets)
                    lines.append(_line("needset", sets[s], tasks=_ids(sorted(s))))
            lines.append(_line(word, task, needs=_ids(sets[s] for s in needs)))
    lines += [f"note {json.dumps(note, ensure_ascii=False)}" for note in graph.notes]
    return "\n".join(lines) + "\n"


class _Reader:
    """Collects the header and the tasks, events and queues line by line."""

    def __init__(self) -> None:
        self.header: dict[str, Any] = {"values": [], "weights": [], "operators": [], "buffers": [], "arena": [], "peers": [], "weight_offsets": {},
                                       "param_offsets": {}, "notes": []}
        self.tasks: list[Task] = []
        self.events: list[Event] = []
        self.queues: list[list[int]] = []
        self.sets: list[frozenset[int]] = []
        self.needs: dict[int, list[frozenset[int]]] = {}
        self.carried: dict[int, list[frozenset[int]]] = {}

    def line(self, line: str) -> None:
        kind, rest = line.split(" ", 1)
        if kind == "note":
            self.header["notes"].append(json.loads(rest))
            return
        name, *words = rest.split(" ")
        fields = dict(w.split("=", 1) for w in words)
        handler = getattr(self, f"_{kind}", None)
        if handler is None:
            raise ValueError(f"unknown word '{kind}'")
        handler(_value(name) if name != "-" else "-", fields)

    def _set(self, name: str, f: dict[str, str]) -> None:
        self.header[name] = _value(f["value"])

    def _limits(self, name: str, f: dict[str, str]) -> None:
        self.header["limits"] = _value(f["value"])

    def _config(self, name: str, f: dict[str, str]) -> None:
        self.header["config"] = _value(f["value"])

    def _row(self, name: Any, f: dict[str, str], *keys: str) -> list[Any]:
        return [name, *(_value(f[k]) for k in keys)]

    def _value(self, name: str, f: dict[str, str]) -> None:
        self.header["values"].append(self._row(name, f, "columns", "rows", "kind", "element_bytes", "flagged"))

    def _weight(self, name: str, f: dict[str, str]) -> None:
        self.header["weights"].append(self._row(name, f, "shape", *(k for k in _SHARD if k in f)))

    def _operator(self, name: str, f: dict[str, str]) -> None:
        self.header["operators"].append(self._row(name, f, "kind", "inputs", "outputs", "weights", "attrs", "layer"))

    def _buffer(self, name: str, f: dict[str, str]) -> None:
        self.header["buffers"].append(self._row(name, f, "columns", "rows", "kind", "element_bytes", "flagged"))

    def _place(self, name: str, f: dict[str, str]) -> None:
        self.header["arena"].append(self._row(name, f, "offset", "size"))

    def _peer(self, name: str, f: dict[str, str]) -> None:
        self.header["peers"].append(self._row(name, f, "offset", "size"))

    def _matrix(self, name: str, f: dict[str, str]) -> None:
        self.header["weight_offsets"][name] = int(f["offset"])

    def _params(self, name: str, f: dict[str, str]) -> None:
        self.header["param_offsets"][name] = int(f["offset"])

    def _task(self, name: int, f: dict[str, str]) -> None:
        begin, end = map(int, f["tiles"].split(":"))
        cost = Cost(*map(int, f["cost"].split("/")))
        self.tasks.append(Task(name, int(f["op"]), _value(f["kind"]), begin, end, _read_regions(f["reads"]), _read_regions(f["writes"]), cost,
                               int(f["worker"]), tuple(_read_ids(f["waits"])), tuple(_read_ids(f["signals"]))))

    def _event(self, name: int, f: dict[str, str]) -> None:
        self.events.append(Event(name, tuple(_read_ids(f["producers"])), int(f["threshold"]), bool(_value(f["carried"]))))

    def _queue(self, name: int, f: dict[str, str]) -> None:
        self.queues.append(_read_ids(f["tasks"]))

    def _needset(self, name: int, f: dict[str, str]) -> None:
        self.sets.append(frozenset(_read_ids(f["tasks"])))

    def _need(self, name: int, f: dict[str, str]) -> None:
        self.needs[name] = [self.sets[i] for i in _read_ids(f["needs"])]

    def _carry(self, name: int, f: dict[str, str]) -> None:
        self.carried[name] = [self.sets[i] for i in _read_ids(f["needs"])]

    def fill(self, graph: SMTaskGraph) -> None:
        graph.tasks, graph.events, graph.queues, graph.dependencies, graph.carried = self.tasks, self.events, self.queues, self.needs, self.carried


def _read_ids(word: str) -> list[int]:
    return [] if word == "-" else [int(i) for i in word.split(",")]


def _read_regions(word: str) -> tuple[Region, ...]:
    if word == "-":
        return ()
    found, place = [], 0
    while place < len(word):
        match = _REGION.match(word, place)
        if match is None:
            raise ValueError(f"'{word[place:]}' is no region, expected buffer[begin:end]")
        quoted, plain, begin, end = match.groups()
        found.append(Region(json.loads(quoted) if quoted else plain, int(begin), int(end)))
        place = match.end()
    return tuple(found)


def read(text: str) -> tuple[dict[str, Any], Fill]:
    """(header of a file, function that puts tasks, events, queues and dependencies into a graph)."""
    lines = text.split("\n")
    reader = _Reader()
    for number, line in enumerate(lines, 1):
        try:
            if number == 1:
                name, _, version = line.split(" ")
                reader.header.update(format=name, version=int(version))
            elif line:
                reader.line(line)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise GraphError(f"text of a graph, line {number}: '{line[:60]}' cannot be read ({error})",
                             remedy="write the text again with to_text") from error
    return reader.header, reader.fill
