"""Files for Perfetto, read with Perfetto's own messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Read:
    """Tracks, slices and counters of a file, names resolved as Perfetto does it."""

    def __init__(self, path: Path) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

        trace: Any = protos.Trace()
        trace.ParseFromString(path.read_bytes())
        self.processes: dict[int, str] = {}
        self.tracks: dict[int, tuple[str, int]] = {}  # id -> name, process
        self.slices: list[tuple[str, str, str, int, int, dict[str, Any]]] = []  # track, name, category, begin, end, arguments
        self.samples: dict[str, list[tuple[int, float]]] = {}
        names: dict[int, str] = {}
        notes: dict[int, str] = {}
        stacks: dict[int, list[Any]] = {}
        for packet in trace.packet:
            for entry in packet.interned_data.event_names:
                names[entry.iid] = entry.name
            for entry in packet.interned_data.debug_annotation_names:
                notes[entry.iid] = entry.name
            if packet.HasField("track_descriptor"):
                track = packet.track_descriptor
                if track.HasField("process"):
                    self.processes[track.uuid] = track.process.process_name
                else:
                    assert track.parent_uuid in self.processes
                    self.tracks[track.uuid] = (track.name, track.parent_uuid)
                    if track.HasField("counter"):
                        self.samples[track.name] = []
            if not packet.HasField("track_event"):
                continue
            event = packet.track_event
            name = self.tracks[event.track_uuid][0]
            stack = stacks.setdefault(event.track_uuid, [])
            if event.type == event.TYPE_SLICE_BEGIN:
                arguments = {notes[n.name_iid]: n.string_value or n.int_value for n in event.debug_annotations}
                stack.append((names[event.name_iid], event.categories[0], packet.timestamp, arguments))
            elif event.type == event.TYPE_SLICE_END:
                label, category, begin, arguments = stack.pop()
                self.slices.append((name, label, category, begin, packet.timestamp, arguments))
            else:
                self.samples[name].append((packet.timestamp, event.double_counter_value))
        assert not any(stacks.values())
