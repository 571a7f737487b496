"""Files for Perfetto, read back with Perfetto's own messages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpk.simulate import perfetto
from mpk.simulate.timeline import SPAN, Timeline
from tests.support.perfetto_file import Read
from tests.support.timelines import layered_graph, list_schedule


def test_every_span_is_a_slice_named_by_its_operator(tmp_path: Path) -> None:
    graph = layered_graph(3, 2)
    t = list_schedule(graph, steps=2)
    perfetto.write([t], tmp_path / "a")
    read = Read(tmp_path / "a")
    assert list(read.processes.values()) == ["simulated h200 device 0"]
    assert {name.removesuffix(" (2)") for name, _ in read.tracks.values()} == {"utilisation", "memory"} | {f"SM {w}{r}" for w in range(3) for r in ("", " loader")}
    names = {0: "{}", 1: "wait for an event: {}", 2: "wait for weights: {}", 3: "wait for the step: {}"}
    expected = []
    for _, worker, role, phase, task, begin, end, amount in t.spans.tolist():
        label = f"load {graph.operator(task).name}" if role == 1 else names[phase].format(graph.operator(task).name)
        expected.append((f"SM {worker}" + (" loader" if role == 1 else ""), label, begin, end, task, amount))
    found = [(track.removesuffix(" (2)"), label, begin, end, a["task"], a.get("bytes", 0)) for track, label, _, begin, end, a in read.slices]
    assert sorted(found) == sorted(expected)
    down = next(s for s in read.slices if s[1] == "l1.down")
    assert down[2] == "linear" and down[5]["layer"] == 1 and down[5]["last tile"] == down[5]["first tile"] + 1
    waiting = next(s for s in read.slices if s[1] == "wait for an event: l1.down")
    assert waiting[5]["waited for"].startswith("l1.gate_up, task ")


def test_loads_that_overlap_are_on_tracks_of_their_own(tmp_path: Path) -> None:
    rows = [(0, 0, 1, 0, 2, 0, 50, 7), (0, 0, 1, 0, 4, 20, 90, 7), (0, 0, 1, 0, 6, 60, 95, 7), (0, 0, 0, 0, -1, 5, 9, 0)]
    perfetto.write([Timeline(layered_graph(2, 1), np.array(rows, SPAN), "simulated", 2)], tmp_path / "a")
    slices = Read(tmp_path / "a").slices
    assert [(track, begin, end) for track, _, _, begin, end, _ in slices if "loader" in track] == [
        ("SM 0 loader", 0, 50), ("SM 0 loader (2)", 20, 90), ("SM 0 loader", 60, 95)]
    assert [s[1] for s in slices if s[0] == "SM 0"] == ["no task"]


def test_each_device_of_each_timeline_is_a_process_with_its_counters(tmp_path: Path) -> None:
    graph = layered_graph(2, 1, target="cpp")
    rows = [(d, 0, 0, 0, 2, 0, 1000, 0) for d in (0, 1)]
    perfetto.write([Timeline(graph, np.array(rows, SPAN), "simulated", 2, devices=2), list_schedule(graph, loads=False, source="measured")], tmp_path / "a")
    read = Read(tmp_path / "a")
    assert list(read.processes.values()) == ["simulated cpp device 0", "simulated cpp device 1", "measured cpp device 0"]
    first = read.samples["utilisation"]
    assert first[0] == (0, pytest.approx(50.0)) or max(v for _, v in first) <= 100.0
    assert len([n for n, _ in read.tracks.values() if n == "utilisation"]) == 3


def test_counters_tell_the_rate_of_what_runs(tmp_path: Path) -> None:
    rows = [(0, 0, 0, 0, 2, 0, 1000, 0), (0, 1, 0, 1, 3, 0, 2000, 0)]  # 40,000 bytes of weights in 1 us, by one of two workers
    perfetto.write([Timeline(layered_graph(2, 1), np.array(rows, SPAN), "measured", 2)], tmp_path / "a")
    samples = Read(tmp_path / "a").samples
    assert {v for t, v in samples["utilisation"] if t < 999} == {50.0} and {v for t, v in samples["utilisation"] if t > 1001} == {0.0}
    assert {v for t, v in samples["memory"] if t < 999} == {40.0} and samples["memory"][-1] == (2000, 0.0)
