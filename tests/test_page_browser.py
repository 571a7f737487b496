"""The page in a headless Chromium: a schedule of 132 SMs and 80 layers opens in time, and zoom, search and the rest do what they say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpk.simulate.page import write_page
from mpk.simulate.timeline import Timeline
from tests.support.timelines import layered_graph, list_schedule

browser = pytest.importorskip("tests.support.browser", reason="needs the package websocket-client (requirements/test.txt)")
BINARY = browser.find()
OPENS_WITHIN_MS = 3000
READY = "document.documentElement?.dataset.ready === 'true'"

if BINARY is None and not os.environ.get("CI"):
    pytest.skip("no Chromium here: `apt-get install chromium`, or name one in MPK_TEST_CHROMIUM", allow_module_level=True)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    assert BINARY is not None, "continuous integration needs Chromium: .ci/run installs it"
    with browser.running(BINARY) as running:
        yield running


@pytest.fixture(scope="module")
def large() -> list[Timeline]:
    """A step of 80 layers on 132 SMs with loads, and a slower one without, as a measured trace is: some 330,000 spans."""
    graph = layered_graph(132, 80)
    return [list_schedule(graph, 1), list_schedule(graph, 1, seed=1, loads=False, slower=1.1, source="measured")]


@pytest.fixture(scope="module")
def opened(chromium: Any, large: list[Timeline], tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_page(large, path, title="80 layers", floor_ms=5.0)
    page = chromium.open(path)
    page.wait_for(READY)
    return page


@pytest.fixture
def page(opened: Any) -> Iterator[Any]:
    """The page as it is after opening; nothing may complain while a test uses it."""
    opened.front()
    opened.evaluate("mpkPage.search.set(''), mpkPage.current && mpkPage.select(mpkPage.current, -1), mpkPage.setView(0, mpkPage.whole), window.scrollTo(0, 0)")
    opened.evaluate("mpkPage.panels[0].rows.focus({preventScroll: true})")
    opened.settle()
    yield opened
    assert opened.complaints() == []


def view(page: Any) -> tuple[float, float]:
    begin, end = page.evaluate("[mpkPage.view.begin, mpkPage.view.end]")
    return begin, end


def middle_of_rows(page: Any, panel: int = 0) -> tuple[float, float, float]:
    """(x, y, width) of the middle of a panel's rows in the window."""
    box = page.evaluate(f"(r => [r.left, r.top, r.width, r.height])(document.querySelectorAll('.rows')[{panel}].getBoundingClientRect())")
    return box[0] + box[2] / 2, box[1] + box[3] / 2, box[2]


def colours_in_rows(page: Any, panel: int = 0) -> int:
    """How many different colours the rows of a panel show."""
    return int(page.evaluate(f"""(shown => {{
        const copy = new OffscreenCanvas(shown.width, shown.height).getContext('2d', {{ willReadFrequently: true }});
        copy.drawImage(shown, 0, 0);
        return new Set(new Uint32Array(copy.getImageData(70, 0, shown.width - 140, shown.height).data.buffer)).size;
    }})(document.querySelectorAll('.rows')[{panel}])"""))


def test_a_schedule_of_132_sms_and_80_layers_opens_in_time(opened: Any, large: list[Timeline]) -> None:
    assert sum(len(t.spans) for t in large) > 250_000
    assert opened.evaluate("performance.getEntriesByName('mpk-ready')[0].startTime") < OPENS_WITHIN_MS
    assert opened.evaluate("mpkPage.panels.map(p => p.data.count)") == [len(t.spans) for t in large]
    assert colours_in_rows(opened, 0) > 10 and colours_in_rows(opened, 1) > 10
    assert opened.complaints() == []


def test_spans_arrive_as_they_were_written(page: Any, large: list[Timeline]) -> None:
    spans = large[0].spans
    for i in (0, 1, 12345, len(spans) - 1):
        begin, end, task, amount = page.evaluate(f"(d => [d.begin[{i}], d.end[{i}], d.task[{i}], d.bytes[{i}]])(mpkPage.panels[0].data)")
        assert (begin, end, task, amount) == tuple(int(spans[i][k]) for k in ("begin_ns", "end_ns", "task", "bytes"))


def test_the_wheel_zooms_at_the_pointer(page: Any) -> None:
    x, y, _ = middle_of_rows(page)
    before = page.evaluate(f"mpkPage.time({x} - document.querySelector('.rows').getBoundingClientRect().left, mpkPage.panels[0].rowSurface.plot)")
    begin, end = view(page)
    for _ in range(5):
        page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-120)
    page.settle()
    zoomed = view(page)
    assert zoomed[1] - zoomed[0] < 0.25 * (end - begin)
    after = page.evaluate(f"mpkPage.time({x} - document.querySelector('.rows').getBoundingClientRect().left, mpkPage.panels[0].rowSurface.plot)")
    assert abs(after - before) < 1e-3 * (zoomed[1] - zoomed[0])
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=3000)
    for _ in range(6):
        page.mouse("mouseWheel", x, y, deltaX=0, deltaY=240)
    page.settle()
    assert view(page) == pytest.approx((begin, end), abs=1)


def test_dragging_moves_and_dragging_with_shift_zooms_to_a_range(page: Any) -> None:
    x, y, _ = middle_of_rows(page)
    page.key("+")
    page.key("+")
    begin, end = view(page)
    page.drag((x, y), (x - 100, y))
    moved = view(page)
    plot = page.evaluate("mpkPage.panels[0].rowSurface.plot")
    assert moved[0] - begin == pytest.approx(100 / plot * (end - begin), rel=0.02) and moved[1] - moved[0] == pytest.approx(end - begin)
    page.drag((x - 100, y), (x + 100, y), "shift")
    chosen = view(page)
    assert chosen[1] - chosen[0] == pytest.approx(200 / plot * (end - begin), rel=0.02) and moved[0] < chosen[0] and chosen[1] < moved[1]


def test_the_keyboard_zooms_moves_and_chooses_spans(page: Any, large: list[Timeline]) -> None:
    begin, end = view(page)
    page.key("+")
    assert view(page)[1] - view(page)[0] == pytest.approx((end - begin) / 2)
    left = view(page)[0]
    page.key("ArrowRight")
    assert view(page)[0] == pytest.approx(left + 0.1 * (end - begin))
    page.key("]")
    first = page.evaluate("mpkPage.panels[0].selected")
    page.key("]")
    assert page.evaluate("mpkPage.panels[0].selected") == first + 1
    page.key("Enter")
    span = large[0].spans[first + 1]
    assert view(page)[0] <= span["begin_ns"] and span["end_ns"] <= view(page)[1] and view(page)[1] - view(page)[0] < 5 * (span["end_ns"] - span["begin_ns"]) + 500
    worker = int(span["worker"])
    page.key("ArrowDown")
    assert page.evaluate("mpkPage.panels[0].trackOf(mpkPage.panels[0].selected).worker") == worker + 1
    page.key("Escape")
    page.key("0")
    assert view(page) == pytest.approx((begin, end)) and page.evaluate("mpkPage.current === null")


def test_search_counts_highlights_and_jumps(page: Any) -> None:
    before = colours_in_rows(page)
    page.key("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.type("^l79\\.down")
    page.key("Enter")
    assert page.evaluate("document.getElementById('found').textContent").startswith("1 of 2: l79.down at ")
    assert "1 operator, 132 tasks, 132 runs | 1 operator, 132 tasks, 132 runs" in page.evaluate("mpkPage.search.summary")
    runs = page.evaluate("""(p => { const o = []; for (let i = 0; i < p.data.count; ++i) if (p.data.phase[i] === 0 && p.data.task[i] !== 4294967295
        && p.operator(i).name === 'l79.down') o.push(p.data.begin[i], p.data.end[i]); return [Math.min(...o), Math.max(...o)] })(mpkPage.panels[0])""")
    begin, end = view(page)
    assert begin < runs[0] and runs[1] < end and end - begin < 4 * (runs[1] - runs[0])
    assert colours_in_rows(page) < before  # everything else is grey
    page.key("Enter")
    assert page.evaluate("document.getElementById('found').textContent").startswith("2 of 2: l79.down at ")
    page.key("Escape")
    assert page.evaluate("mpkPage.panels.every(p => p.found === null)")


@pytest.mark.parametrize(("text", "count"), [
    ("layer 7", "5 operators, 660 tasks, 660 runs"), ("task 4711", "1 operator, 1 task, 1 run"), ("SM 3", "401 operators, 401 tasks, 401 runs"),
    ("gate_up", "80 operators, 10,560 tasks, 10,560 runs"), ("l1[0-9]\\.o$", "10 operators, 1,320 tasks, 1,320 runs"),
    ("rotary", "80 operators, 10,560 tasks, 10,560 runs"), ("op:o", "80 operators, 10,560 tasks, 10,560 runs"), ("nothing like it", "nothing found"),
    ("l3.(", "not a regular expression, searched as plain text; nothing found"),
])
def test_search_understands(page: Any, text: str, count: str) -> None:
    page.evaluate(f"mpkPage.search.set({text!r})")
    assert page.evaluate("mpkPage.search.summary").split(" | ")[0] == count


def test_pointing_at_a_span_tells_what_it_is_and_what_it_waited_for(page: Any) -> None:
    page.evaluate("mpkPage.search.set('^l5.attention$'), mpkPage.search.step(1), mpkPage.search.set('')")
    page.key("[")  # the wait before the task
    page.settle()
    box = page.evaluate("(p => ({...p.box(p.selected), top: p.rows.getBoundingClientRect().top, left: p.rows.getBoundingClientRect().left}))(mpkPage.panels[0])")
    page.mouse("mouseMoved", box["left"] + box["x"] + box["width"] / 2, box["top"] + box["y"] + box["height"] / 2)
    page.settle()
    tip = page.evaluate("document.getElementById('tip').hidden ? '' : document.getElementById('tip').innerText")
    assert "l5.attention waits for an event" in tip and "rotary_attention · layer 5 · tiles" in tip
    assert "last to end of what it waits for: l5.qkv, task" in tip
    page.key("c")
    assert page.evaluate("mpkPage.panels[0].operator(mpkPage.panels[0].selected).name") == "l5.qkv"
    assert page.evaluate("document.getElementById('detail').innerText").startswith("l5.qkv · task ")


def test_the_other_timeline_can_be_aligned_with_a_task(page: Any, large: list[Timeline]) -> None:
    page.evaluate("mpkPage.search.set('^l40.o$'), mpkPage.search.step(1), mpkPage.search.set('')")
    page.key("a")
    task = page.evaluate("mpkPage.panels[0].data.task[mpkPage.panels[0].selected]")
    begins = [int(t.spans["begin_ns"][(t.spans["task"] == task) & (t.spans["phase"] == 0) & (t.spans["role"] == 0)][0]) for t in large]
    assert page.evaluate("mpkPage.panels.map(p => p.shift)") == [0, begins[0] - begins[1]]
    assert "moved by" in page.evaluate("document.querySelectorAll('.panel h3')[1].innerText")
    page.evaluate("document.querySelectorAll('.panel h3 button')[0].click()")
    page.settle()
    assert page.evaluate("mpkPage.panels[1].shift") == 0


def test_the_tables_hold_both_timelines_and_their_differences(page: Any, large: list[Timeline]) -> None:
    rows = page.evaluate("[...document.querySelectorAll('#operators tbody tr')].map(r => [...r.cells].map(c => c.innerText.trim()))")
    row = next(r for r in rows if r[0] == "gate_up")
    times = [float(r.replace(",", "")) for r in (row[3], row[8])]
    assert row[1] == "linear" and row[2] == "10,560" and times[1] > times[0]
    assert float(row[13].replace("+", "")) == pytest.approx(times[1] - times[0], abs=0.11)
    assert float(row[4]) > 0 and row[9] == "\u2013"  # what was starved is known of the simulated one only
    figures = page.evaluate("document.getElementById('figures').innerText")
    assert f"{large[0].duration_ns / 1e6:.3f}" in figures and f"{large[1].duration_ns / 1e6:.3f}" in figures
    assert f"{large[0].duration_ns / 5e6:.2f}" in figures  # times the floor of 5 ms
    assert "wait for weights" in page.evaluate("document.getElementById('idle').innerText")


def test_one_of_several_devices_is_shown(chromium: Any, tmp_path: Path) -> None:
    graph = layered_graph(4, 2)
    parts = []
    for device in range(3):
        spans = list_schedule(graph, seed=device, slower=1.0 + device).spans.copy()
        spans["device"] = device
        parts.append(spans)
    write_page([Timeline(graph, np.concatenate(parts), "simulated", 4, devices=3)], tmp_path / "devices.html")
    page = chromium.open(tmp_path / "devices.html")
    page.wait_for(READY)
    choose = "(c => {{ c.value = '{}'; c.dispatchEvent(new Event('change')) }})(document.getElementById('device'))"
    page.evaluate(choose.format(1) + ";" + choose.format(2))  # the second choice overtakes the first
    page.wait_for(f"mpkPage.panels[0].data.end[0] === {int(parts[2]['end_ns'][0])}")
    page.evaluate(choose.format(1))
    page.wait_for(f"mpkPage.panels[0].data.count === {len(parts[1])} && mpkPage.panels[0].data.end.at(-1) === {int(parts[1]['end_ns'][-1])}")
    page.evaluate("mpkPage.search.set('advance')")
    assert page.evaluate("mpkPage.search.summary") == "1 operator, 1 task, 1 run" and page.complaints() == []


def test_dark_screens_and_small_windows_are_served(chromium: Any, tmp_path: Path) -> None:
    graph = layered_graph(8, 2, target="cpp")
    write_page([list_schedule(graph, 3, loads=False, source="measured")], tmp_path / "small.html", title="a </script><b>title</b> & more")
    page = chromium.open(tmp_path / "small.html", width=480, height=640, dark=True, scale=2.0)
    page.wait_for(READY)
    assert page.evaluate("document.querySelector('h1').textContent") == "a </script><b>title</b> & more"
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(18, 23, 29)"
    assert page.evaluate("document.documentElement.scrollWidth") <= 480
    assert "8 workers over time" in page.evaluate("document.querySelector('.panel h3').innerText")
    assert page.evaluate("[...mpkPage.panels[0].utilisation].some(u => u > 0.5)")
    assert page.complaints() == []
