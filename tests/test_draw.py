"""Pictures are well-formed SVG that shows every task and event, drawn to the schedule."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from mpk.errors import GraphError
from mpk.graph.draw import colours, layer_svg, schedule_svg, start_times
from mpk.graph.sm_task_graph import SMTaskGraph
from tests.support.graphs import Shape, random_graph, small_graph
from tests.test_verify import wide_graph

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [t.text or "" for t in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def boxes(svg: str) -> dict[str, dict[str, float]]:
    """Title -> geometry of every box that has a title."""
    out = {}
    for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None:
            out[title.text or ""] = {k: float(rect.get(k, "0")) for k in ("x", "y", "width", "height")}
    return out


def layered() -> SMTaskGraph:
    graph = small_graph()
    graph.tensor_graph.operators = [op if i == 5 else type(op)(op.name, op.kind, op.inputs, op.outputs, op.weights, op.attrs, i // 3)
                                    for i, op in enumerate(graph.tensor_graph.operators)]
    return graph


def test_layer_shows_tasks_events_and_where_they_come_from() -> None:
    svg = layer_svg(layered(), 1)
    words = texts(svg)
    for word in ("synthetic, layer 1", "use", "last", "t6", "t7", "t8", "worker 0", "worker 1", "e3 \u00b7 2", "e4 \u00b7 2", "from update", "to advance"):
        assert word in words
    assert "t5" not in words and "e2 \u00b7 2" not in words
    assert svg.count("marker-end") == 3  # 6 and 7 wait for event 3, 8 for event 4
    assert "from the step before" in texts(layer_svg(layered(), 0))


def test_tasks_stand_under_their_worker_and_operators_below_each_other() -> None:
    places = boxes(layer_svg(layered(), 1))
    six, seven = places["task 6: use tiles 0 to 1, worker 0"], places["task 7: use tiles 1 to 2, worker 1"]
    eight = places["task 8: last tiles 0 to 1, worker 0"]
    assert six["y"] == seven["y"] < eight["y"] and six["x"] == eight["x"] and six["x"] + six["width"] <= seven["x"]


@pytest.mark.parametrize("seed", range(8))
def test_no_two_boxes_overlap_and_all_lie_in_the_picture(seed: int) -> None:
    graph = random_graph(seed, Shape(operators=(6, 9), workers=(1, 16), tiles=(1, 12)))
    for layer in (0, 1, -1):
        svg = layer_svg(graph, layer)
        width = float(re.search(r'width="([\d.]+)"', svg).group(1))  # type: ignore[union-attr]
        places = list(boxes(svg).values())
        for i, a in enumerate(places):
            assert a["x"] >= 0 and a["x"] + a["width"] <= width
            for b in places[i + 1:]:
                assert a["x"] + a["width"] <= b["x"] + 0.11 or b["x"] + b["width"] <= a["x"] + 0.11 or a["y"] != b["y"]


def test_wide_layers_are_summarised() -> None:
    graph = wide_graph(1, 6, 132)
    svg = layer_svg(graph, -1)
    words = texts(svg)
    assert words.count("1 event, 132 waits") == 6  # five between operators, one of the step
    assert "t0" not in words and len([b for b in boxes(svg) if b.startswith("task")]) == 132 * 6 + 1
    assert len(svg) < 600_000


def test_layer_that_is_not_there() -> None:
    with pytest.raises(GraphError, match=r"layer 9, expected one of 2 layers \(0 to 1\), or -1"):
        layer_svg(layered(), 9)
    graph = layered()
    graph.queues = []
    with pytest.raises(GraphError, match="a graph without queues has no picture"):
        layer_svg(graph, 1)
    with pytest.raises(GraphError, match="a graph without queues has no schedule"):
        schedule_svg(graph)


def test_start_times_follow_queues_and_events() -> None:
    graph = small_graph()
    start, end = start_times(graph, [1, 3, 2, 2, 1, 1, 1, 4, 1, 1])
    assert start == [0, 0, 3, 3, 5, 5, 6, 6, 10, 11]
    assert end[9] == 12
    graph.events[3].threshold = 1  # one of two producers is enough
    assert start_times(graph, {**dict.fromkeys(range(10), 1.0), 5: 3.0})[0][6] == 3.0


def test_start_times_of_a_schedule_that_never_ends() -> None:
    graph = small_graph()
    graph.events[3].threshold = 3
    with pytest.raises(GraphError, match=r"never ends: workers wait for events \[3\]; see mpk verify"):
        schedule_svg(graph)


def test_schedule_is_to_scale() -> None:
    svg = schedule_svg(small_graph(), [1, 3, 2, 2, 1, 1, 1, 4, 1, 1])
    places = boxes(svg)
    long, short = places["task 7: use, 6 to 10"], places["task 6: use, 6 to 7"]
    assert abs((long["width"] + 1) / (short["width"] + 1) - 4) < 0.02
    assert long["x"] == short["x"] and long["y"] > short["y"]
    assert len(places) == 10
    assert {"columns", "advance", "worker 0", "worker 1", "\u00b5s"} <= set(texts(svg))
    assert any("12 \u00b5s, workers busy 71 %" in t for t in texts(svg))
    assert {"0", "2", "4", "6", "8", "10", "12"} <= set(texts(svg))


def test_schedule_of_some_layers() -> None:
    svg = schedule_svg(layered(), [1, 3, 2, 2, 1, 1, 1, 4, 1, 1], layers=(1, 1))
    assert {int(title.split()[1].rstrip(":")) for title in boxes(svg)} == {6, 7, 8}
    assert any(t.startswith("3 tasks, ") and "5 \u00b5s" in t for t in texts(svg))
    with pytest.raises(GraphError, match="layers 5 to 6 have no tasks"):
        schedule_svg(layered(), layers=(5, 6))


def test_kinds_have_different_colours() -> None:
    graph = small_graph()
    assert colours(graph)["columns"] != colours(graph)["advance"]


def test_schedule_of_many_tasks_stays_small() -> None:
    svg = schedule_svg(wide_graph(80, 6, 132))
    ElementTree.fromstring(svg)
    assert len(svg) < 3_500_000
