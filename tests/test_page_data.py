"""What a page holds, read back from the file as the page itself does, against the timelines it was made of."""

from __future__ import annotations

import base64
import json
import re
import zlib
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpk.errors import RequestError
from mpk.simulate import analysis, page_data
from mpk.simulate.page import FILES, SCRIPTS, write_page
from mpk.simulate.timeline import CONSUMER, RUN, SPAN, Timeline
from tests.support.timelines import layered_graph, list_schedule


class Scripts(HTMLParser):
    """The script elements with an id, and everything that could ask the network for something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: dict[str, tuple[dict[str, str | None], str]] = {}
        self.open: str | None = None
        self.outside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.outside += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith(("data:", "#"))]
        if tag == "script" and found.get("id"):
            self.open = str(found["id"])
            self.scripts[self.open] = (found, "")

    def handle_data(self, data: str) -> None:
        if self.open:
            self.scripts[self.open] = (self.scripts[self.open][0], self.scripts[self.open][1] + data)

    def handle_endtag(self, tag: str) -> None:
        self.open = None if tag == "script" else self.open


def unpack(columns: list[tuple[str, int, int, bool]], text: str) -> dict[str, np.ndarray]:
    """The columns of a block, by the words of the format and without the code that wrote it."""
    data = zlib.decompress(base64.b64decode(text))
    out, at = {}, 0
    for name, length, planes, delta in columns:
        values = [0] * length
        for p in range(planes):
            for i in range(length):
                values[i] += data[at + p * length + i] << 8 * p
        at += planes * length
        if delta:
            last = 0
            for i, z in enumerate(values):
                last = (last + (z // 2 if z % 2 == 0 else -(z // 2) - 1)) % 2**32
                values[i] = last
        out[name] = np.array(values, np.int64)
    assert at == len(data)
    return out


def read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]], Scripts]:
    page = Scripts(path.read_text(encoding="utf-8"))
    blocks = {key.removeprefix("block-"): unpack(json.loads(unescape(str(attrs["data-columns"]))), text)
              for key, (attrs, text) in page.scripts.items() if key.startswith("block-")}
    return json.loads(page.scripts["manifest"][1]), blocks, page


def spans_of(described: dict[str, Any], columns: dict[str, np.ndarray]) -> np.ndarray:
    out = np.zeros(len(columns["gap"]), SPAN)
    row = 0
    for worker, role, count in described["tracks"]:
        last = 0
        for _ in range(count):
            begin = (last + int(columns["gap"][row])) % 2**32
            last = begin + int(columns["length"][row])
            task = int(columns["task"][row])
            out[row] = (0, worker, role, columns["phase"][row], task if task != page_data.NO_TASK else -1, begin, last, columns["bytes"][row])
            row += 1
    return out


def test_the_page_gives_back_every_span_and_task(tmp_path: Path) -> None:
    graph = layered_graph(5, 3)
    t = list_schedule(graph, steps=2)
    write_page([t], tmp_path / "page.html")
    manifest, blocks, _ = read(tmp_path / "page.html")
    described = manifest["timelines"][0]
    np.testing.assert_array_equal(spans_of(described["devices"][0], blocks["t0d0"]), t.spans)
    np.testing.assert_array_equal(np.where(blocks["t0d0"]["cause"] == page_data.NO_TASK, -1, blocks["t0d0"]["cause"]), analysis.waited_for(t))
    tasks = blocks[manifest["graphs"][0]["block"]]
    assert tasks["op"].tolist() == [x.op for x in graph.tasks] and tasks["worker"].tolist() == [x.worker for x in graph.tasks]
    assert (tasks["tile_begin"] + tasks["tile_count"]).tolist() == [x.tile_end for x in graph.tasks]
    assert described["devices"][0]["steps"] == analysis.step_ends(t).tolist() and described["duration"] == t.duration_ns
    assert (described["unit"], described["workers"], described["steps"], described["spans"]) == ("SM", 5, 2, len(t.spans))


def test_two_timelines_share_a_graph_and_stand_side_by_side_in_the_table(tmp_path: Path) -> None:
    graph = layered_graph(4, 2)
    pair = [list_schedule(graph), list_schedule(graph, loads=False, slower=2.0, source="measured")]
    write_page(pair, tmp_path / "page.html", floor_ms=0.5)
    manifest, blocks, _ = read(tmp_path / "page.html")
    assert set(blocks) == {"g0", "t0d0", "t1d0"} and manifest["floor_ms"] == 0.5
    assert [t["label"] for t in manifest["timelines"]] == ["simulated", "measured"]
    assert [t["traffic"] for t in manifest["timelines"]] == [analysis.LOADS, analysis.WEIGHTS_OF_TASKS]
    for row in manifest["operators"]:
        for figures, t in zip(row["figures"], pair, strict=True):
            expected = next(r for r in analysis.per_operator(t) if r.name == row["name"])
            assert figures["task_us"] == pytest.approx(expected.task_us, abs=1e-3) and figures["gb_s"] == pytest.approx(expected.gb_s, abs=0.01)
    assert manifest["operators"][0]["name"] == "gate_up"  # what takes most comes first
    run = spans_of(manifest["timelines"][1]["devices"][0], blocks["t1d0"])
    run = run[(run["phase"] == RUN) & (run["task"] >= 0)]
    assert run["bytes"].tolist() == [graph.tasks[t].cost.weight_bytes for t in run["task"]]


def test_devices_overlapping_loads_and_spans_without_a_task_survive(tmp_path: Path) -> None:
    graph = layered_graph(2, 1)
    rows = [(0, 0, 0, 0, -1, 5, 9, 0), (0, 0, 1, 0, 3, 0, 50, 7), (0, 0, 1, 0, 4, 20, 30, 7), (1, 1, 0, 1, 2, 100, 4_000_000_000, 0),
            (1, 1, 0, 0, 2, 4_000_000_000, 9_000_000_000, 0)]
    t = Timeline(graph, np.array(rows, SPAN), "simulated", 2, devices=2)
    write_page([t], tmp_path / "page.html")
    manifest, blocks, _ = read(tmp_path / "page.html")
    described = manifest["timelines"][0]
    tick = described["tick_ns"]
    assert tick == 3  # 9 s do not fit 32 bits of nanoseconds
    for d in (0, 1):
        expected = t.spans[t.spans["device"] == d].copy()
        expected["begin_ns"] //= tick
        expected["end_ns"] //= tick
        expected["device"] = 0
        np.testing.assert_array_equal(spans_of(described["devices"][d], blocks[f"t0d{d}"]), expected)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.booleans())
def test_columns_of_any_numbers_survive(values: list[int], delta: bool) -> None:
    block = page_data.pack({"a": (np.array(values, np.int64), delta), "b": (np.arange(3), True)})
    out = unpack(block.columns, block.text)
    assert out["a"].tolist() == values and out["b"].tolist() == [0, 1, 2]


def test_the_page_needs_no_other_file_and_no_network(tmp_path: Path) -> None:
    write_page([list_schedule(layered_graph(2, 1))], tmp_path / "page.html", title='a "quoted" <title> & more')
    _, _, page = read(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.outside == [] and not re.search(r"@import|url\(\s*['\"]?(?!data:)", text)
    assert "default-src 'none'" in text and "{{" not in text
    assert "<title>a &#34;quoted&#34; &lt;title&gt; &amp; more</title>" in text or "<title>a &quot;quoted&quot; &lt;title&gt; &amp; more</title>" in text
    assert {p.name for p in FILES.glob("*.js")} == set(SCRIPTS)


def test_a_busy_step_takes_few_bytes_a_span(tmp_path: Path) -> None:
    t = list_schedule(layered_graph(132, 20))
    write_page([t], tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 100_000 + 12 * len(t.spans)


@pytest.mark.parametrize("count", [0, 3])
def test_a_page_shows_one_or_two_timelines(tmp_path: Path, count: int) -> None:
    t = list_schedule(layered_graph(2, 1))
    with pytest.raises(RequestError, match=f"a page of {count} timelines, expected one or two"):
        write_page([t] * count, tmp_path / "page.html")


def test_a_timeline_without_spans_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the measured timeline, expected spans, got none"):
        write_page([Timeline(layered_graph(2, 1), np.zeros(0, SPAN), "measured", 2)], tmp_path / "page.html")
    assert CONSUMER == 0  # data.js has the same number
