"""Files and text of a graph give back an equal graph, and refuse everything that is not one."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import numpy as np
import pytest

from mpk.errors import GraphError
from mpk.graph.serialize import VERSION, from_text, to_text
from mpk.graph.sm_task_graph import Allocation, Buffer, Region, SMTaskGraph
from tests.support.graphs import random_graph, small_graph
from tests.test_verify import wide_graph


def odd_graph() -> SMTaskGraph:
    """A graph with everything that is easy to lose: odd names, notes, negative numbers, empty queues, dependencies."""
    graph = small_graph()
    graph.notes = ['a note with "quotes", = and\nlines', "zweite Zeile: 5 \u00b5s \u2028 end"]
    graph.buffers['odd "name" [1:2], x'] = Buffer('odd "name" [1:2], x', 4, "tokens", "activation", 4)
    graph.tasks[2].reads += (Region('odd "name" [1:2], x', 0, 4),)
    graph.arena["null"] = Allocation(-64, 0)
    graph.buffers["null"] = Buffer("null", 1, "tokens", "activation", 4)
    graph.param_offsets = {"op 1": 0, "op2": 64}
    graph.queues.append([])
    graph.tasks[5].worker = -1
    graph.limits = None
    graph.dependencies = {4: [frozenset((1, 2)), frozenset((3,))], 5: [frozenset((1, 2))]}
    return graph


@pytest.mark.parametrize("seed", range(0, 40, 10))
def test_file_and_text_give_back_an_equal_graph(seed: int, tmp_path: Path) -> None:
    for s in range(seed, seed + 10):
        graph = random_graph(s)
        graph.save(str(tmp_path / "g"))
        assert SMTaskGraph.load(str(tmp_path / "g")) == graph
        assert from_text(graph.to_text()) == graph


def test_nothing_odd_is_lost(tmp_path: Path) -> None:
    graph = odd_graph()
    graph.save(str(tmp_path / "g"))
    again = SMTaskGraph.load(str(tmp_path / "g"))
    assert again == graph
    assert again.dependencies == {4: [frozenset((1, 2)), frozenset((3,))], 5: [frozenset((1, 2))]}
    assert isinstance(again.tasks[2].waits, tuple) and isinstance(again.tasks[2].reads[0], Region)
    assert again.tensor_graph.config == graph.tensor_graph.config
    assert from_text(to_text(graph)) == graph


def test_graph_in_the_middle_of_lowering_has_a_text() -> None:
    graph = small_graph()
    graph.events, graph.queues, graph.arena = [], [], {}
    for task in graph.tasks:
        task.waits, task.signals, task.worker = (), (), -1
    assert from_text(to_text(graph)) == graph


def test_text_is_stable_and_a_change_shows_in_one_line() -> None:
    graph = small_graph()
    before = to_text(graph).splitlines()
    assert to_text(small_graph()).splitlines() == before
    assert "task 3 kind=columns op=1 tiles=1:2 worker=1 reads=a[0:12] writes=b[6:12] waits=1 signals=2 cost=64/8/128" in before
    assert "event 2 threshold=2 carried=false producers=2,3" in before
    assert "queue 1 tasks=1,3,5,7,9" in before
    assert "place c offset=64 size=64" in before
    graph.events[2].threshold = 1
    after = to_text(graph).splitlines()
    assert [a for a, b in zip(after, before, strict=True) if a != b] == ["event 2 threshold=1 carried=false producers=2,3"]


@pytest.mark.parametrize(("line", "replacement"), [
    ("event 2 threshold=2 carried=false producers=2,3", "event 2 threshold=two producers=2,3"),
    ("event 2 threshold=2 carried=false producers=2,3", "event 2 producers=2,3"),
    ("queue 1 tasks=1,3,5,7,9", "tail 1 tasks=1,3,5,7,9"),
    ("place c offset=64 size=64", "place c"),
])
def test_text_that_cannot_be_read_names_the_line(line: str, replacement: str) -> None:
    text = to_text(small_graph())
    number = text.splitlines().index(line) + 1
    with pytest.raises(GraphError, match=rf"text of a graph, line {number}: '{replacement[:20]}"):
        from_text(text.replace(line, replacement))


def test_text_of_another_version() -> None:
    text = to_text(small_graph())
    with pytest.raises(GraphError, match=f"another version, expected {VERSION}, got 7; lower the model again"):
        from_text(text.replace(f"version {VERSION}", "version 7", 1))
    with pytest.raises(GraphError, match="text is no graph file"):
        from_text("something else 1\n")
    with pytest.raises(GraphError, match="line 1"):
        from_text("")


def with_header(path: Path, **changes: object) -> None:
    with np.load(path) as arrays:
        columns = {name: arrays[name] for name in arrays.files}
    header = json.loads(bytes(columns["header"]))
    header.update(changes)
    columns["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    packed = io.BytesIO()
    np.savez_compressed(packed, **columns)
    path.write_bytes(packed.getvalue())


def test_file_of_another_version(tmp_path: Path) -> None:
    path = tmp_path / "g"
    small_graph().save(str(path))
    with_header(path, version=99)
    with pytest.raises(GraphError, match=f"has another version, expected {VERSION}, got 99; lower the model again and save its graph"):
        SMTaskGraph.load(str(path))
    with_header(path, version=VERSION, format="something")
    with pytest.raises(GraphError, match="is no graph file"):
        SMTaskGraph.load(str(path))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """A flipped byte, a missing end, other files: refused with the path and the remedy, or the graph is unharmed."""
    path = tmp_path / "g"
    graph = small_graph()
    graph.save(str(path))
    data = path.read_bytes()
    refused = 0
    for place in range(0, len(data), 23):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x5A]) + data[place + 1:])
        try:
            assert SMTaskGraph.load(str(path)) == graph  # bytes that no reader looks at
        except GraphError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 0.6 * len(range(0, len(data), 23))
    for content in (b"", b"x", data[: len(data) // 2], data[:-1], b"PK\x03\x04", b"\x93NUMPY", json.dumps({"a": 1}).encode()):
        path.write_bytes(content)
        with pytest.raises(GraphError, match=r"damaged or no graph file.*; lower the model again and save its graph"):
            SMTaskGraph.load(str(path))


def test_columns_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "g"
    graph = small_graph()
    graph.save(str(path))
    with np.load(path) as arrays:
        columns = {name: arrays[name] for name in arrays.files}
    for name, bad in (("reads", columns["reads"] + 1000), ("waits_length", columns["waits_length"] + 1), ("tasks", columns["tasks"][:-1])):
        packed = io.BytesIO()
        np.savez_compressed(packed, **{**columns, name: bad})
        path.write_bytes(packed.getvalue())
        with pytest.raises(GraphError, match="damaged"):
            SMTaskGraph.load(str(path))


def test_paths_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"graph file .*missing cannot be read \(No such file"):
        SMTaskGraph.load(str(tmp_path / "missing"))
    with pytest.raises(GraphError, match=r"cannot be written .*choose a folder that can be written"):
        small_graph().save(str(tmp_path / "no" / "folder"))


def test_large_graph_is_saved_and_loaded_in_seconds(tmp_path: Path) -> None:
    graph = wide_graph(80, 6, 132)
    begin = time.perf_counter()
    graph.save(str(tmp_path / "g"))
    again = SMTaskGraph.load(str(tmp_path / "g"))
    assert time.perf_counter() - begin < 12  # about 2 s on one core; loose, because machines that run tests are busy
    assert again == graph
    assert (tmp_path / "g").stat().st_size < 4_000_000
