"""Timelines in Perfetto's own format, for https://ui.perfetto.dev: one process a device, one track for each worker and role.

Tasks are slices named by their operator ("l12.down"), waits "wait for an event: l12.down", loads "load l12.down"; task, layer, tiles and bytes
stand in each slice's arguments. Two counters a device tell how many of its workers run and what comes from memory.
The messages are those of the package `perfetto` (protobuf); names are interned, so that a slice takes some 40 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from mpk.simulate import analysis
from mpk.simulate.timeline import CONSUMER, LINK, LOADER, PHASES, ROLES, RUN, Timeline
from mpk.targets import hardware

if TYPE_CHECKING:
    from mpk.graph.tensor_graph import Operator

SEQUENCE = 1  # all packets are of one writer
STATE_CLEARED, NEEDS_STATE = 1, 2  # sequence_flags: this packet begins the interned names, this one uses them
SLICE_BEGIN, SLICE_END, COUNTER = 1, 2, 4  # TrackEvent.Type
EXPLICIT_ORDER = 3  # TrackDescriptor.ChildTracksOrdering: tracks stand in the order of their rank
COUNTER_BINS = 2000  # samples of a counter over the whole timeline
ANNOTATIONS = {"task": 1, "layer": 2, "first tile": 3, "last tile": 4, "bytes": 5, "waited for": 6}  # interned: name -> id
PREFIX = {CONSUMER: "", LOADER: "load ", LINK: "send "}


def write(timelines: Sequence[Timeline], path: Path | str) -> None:
    """Write all timelines to one file, each device of each as a process of its own. Raises OSError where `path` cannot be written."""
    with open(path, "wb") as file:
        writer = _Writer(file)
        for index, timeline in enumerate(timelines):
            causes = analysis.waited_for(timeline)
            for device in range(analysis.devices_shown(timeline)):
                _device(writer, timeline, causes, device, index)


class _Writer:
    """Appends packets to a file: each is a field 1 of the `Trace` message, so that no more than one is in memory."""

    def __init__(self, file: IO[bytes]) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

        self.file = file
        self.protos: Any = protos
        self.tracks = 0
        self.names: dict[str, int] = {}
        first = self._packet()
        first.sequence_flags = STATE_CLEARED
        for name, iid in ANNOTATIONS.items():
            entry = first.interned_data.debug_annotation_names.add()
            entry.iid, entry.name = iid, name
        self._append(first)
        self.begin, self.end, self.counter = self._packet(), self._packet(), self._packet()  # reused: making messages costs more than filling them
        self.begin.track_event.type, self.end.track_event.type, self.counter.track_event.type = SLICE_BEGIN, SLICE_END, COUNTER

    def _packet(self) -> Any:
        packet = self.protos.TracePacket()
        packet.trusted_packet_sequence_id, packet.sequence_flags = SEQUENCE, NEEDS_STATE
        return packet

    def _append(self, packet: Any) -> None:
        data = packet.SerializeToString()
        head, size = bytearray(b"\x0a"), len(data)
        while size > 0x7F:
            head.append(size & 0x7F | 0x80)
            size >>= 7
        head.append(size)
        self.file.write(bytes(head) + data)

    def track(self, name: str, parent: int = 0, rank: int = 0, pid: int = 0, unit: str = "") -> int:
        """Describe a track (with `pid`: a process, with `unit`: a counter) and return its id."""
        self.tracks += 1
        packet = self._packet()
        track = packet.track_descriptor
        track.uuid = self.tracks
        if pid:
            track.process.pid, track.process.process_name = pid, name
            track.child_ordering = EXPLICIT_ORDER
        else:
            track.parent_uuid, track.name, track.sibling_order_rank = parent, name, rank
        if unit:
            track.counter.unit_name = unit
        self._append(packet)
        return self.tracks

    def intern(self, name: str) -> int:
        """The id of a slice's name, which the file holds once."""
        if name not in self.names:
            self.names[name] = len(self.names) + 1
            packet = self._packet()
            entry = packet.interned_data.event_names.add()
            entry.iid, entry.name = self.names[name], name
            self._append(packet)
        return self.names[name]

    def slice(self, track: int, name: int, category: str, begin: int, end: int, arguments: Iterable[tuple[int, int | str]]) -> None:
        event = self.begin.track_event
        self.begin.timestamp, event.track_uuid, event.name_iid = begin, track, name
        del event.categories[:], event.debug_annotations[:]
        event.categories.append(category)
        for iid, value in arguments:
            note = event.debug_annotations.add()
            note.name_iid = iid
            if isinstance(value, str):
                note.string_value = value
            else:
                note.int_value = value
        self._append(self.begin)
        self.end.timestamp, self.end.track_event.track_uuid = end, track
        self._append(self.end)

    def sample(self, track: int, time: int, value: float) -> None:
        self.counter.timestamp = time
        self.counter.track_event.track_uuid, self.counter.track_event.double_counter_value = track, value
        self._append(self.counter)


def _device(writer: _Writer, timeline: Timeline, causes: np.ndarray, device: int, index: int) -> None:
    unit = "SM" if hardware.backend_of(timeline.graph.target) == "cuda" else "worker"
    process = writer.track(f"{timeline.source} {timeline.graph.target} device {device}", pid=1000 * (index + 1) + device)
    edges, busy, rate = analysis.series(timeline, COUNTER_BINS, device)
    for rank, (name, label, values) in enumerate((("utilisation", "%", 100 * busy), ("memory", "GB/s", rate / 1e9))):
        counter = writer.track(name, process, rank, unit=label)
        for time, value in zip(edges[:-1].tolist(), values.tolist(), strict=True):
            writer.sample(counter, int(time), round(value, 3))
        writer.sample(counter, int(edges[-1]), 0.0)
    chosen = np.flatnonzero(timeline.spans["device"] == device)
    chosen = chosen[np.lexsort((timeline.spans["begin_ns"][chosen], timeline.spans["role"][chosen], timeline.spans["worker"][chosen]))]
    operators = timeline.graph.tensor_graph.operators
    tracks: dict[tuple[int, int, int], int] = {}
    free: list[int] = []  # when each lane of the present track ends
    present = (-1, -1)
    for span, cause in zip(timeline.spans[chosen].tolist(), causes[chosen].tolist(), strict=True):
        _, worker, role, phase, task, begin, end, amount = span
        if (worker, role) != present:
            present, free = (worker, role), []
        # slices of a track nest, so that loads that overlap need a second track
        lane = next((n for n, until in enumerate(free) if until <= begin), len(free))
        free[lane : lane + 1] = [end]
        if (worker, role, lane) not in tracks:
            name = f"{unit} {worker}" + (f" {ROLES[role]}" if role != CONSUMER else "") + (f" ({lane + 1})" if lane else "")
            tracks[worker, role, lane] = writer.track(name, process, 10 + (worker * len(ROLES) + role) * 16 + min(lane, 15))
        op = operators[timeline.graph.tasks[task].op] if task >= 0 else None
        category = PHASES[phase] if phase != RUN else ROLES[role] if role != CONSUMER or op is None else op.kind
        writer.slice(tracks[worker, role, lane], writer.intern(_name(op, phase, role)), category, begin, end,
                     _arguments(timeline, task, op, amount, cause))


def _name(op: Operator | None, phase: int, role: int) -> str:
    what = op.name if op is not None else "no task"
    return f"{PHASES[phase]}: {what}" if phase != RUN else PREFIX[role] + what


def _arguments(timeline: Timeline, task: int, op: Operator | None, amount: int, cause: int) -> Iterable[tuple[int, int | str]]:
    if op is not None:
        found = timeline.graph.tasks[task]
        yield ANNOTATIONS["task"], task
        if op.layer >= 0:
            yield ANNOTATIONS["layer"], op.layer
        yield ANNOTATIONS["first tile"], found.tile_begin
        yield ANNOTATIONS["last tile"], found.tile_end - 1
    if amount:
        yield ANNOTATIONS["bytes"], amount
    if cause >= 0:
        yield ANNOTATIONS["waited for"], f"{timeline.graph.operator(cause).name}, task {cause}"
