"""The figure for papers: what its rows show, and that it says what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from mpk.errors import RequestError
from mpk.simulate import plot
from mpk.simulate.timeline import RUN, SPAN, WAIT_EVENT, Timeline
from tests.support.timelines import layered_graph, list_schedule


def test_a_row_shows_what_took_most_of_each_column() -> None:
    graph = layered_graph(2, 1)
    rows = [(0, 0, 0, RUN, 2, 0, 55, 0), (0, 0, 0, WAIT_EVENT, 4, 55, 100, 0), (0, 0, 0, RUN, 4, 100, 190, 0), (0, 0, 1, RUN, 4, 0, 400, 9),
            (0, 1, 0, RUN, 3, 150, 400, 0)]
    t = Timeline(graph, np.array(rows, SPAN), "simulated", 2)
    shown = plot.raster(t, 0, 4, ["attention", "qkv"])
    assert shown.tolist() == [[1, 0, -9, -9], [-9, 1, 1, 1]]
    assert plot.raster(t, 0, 10, ["attention"])[0].tolist() == [1, -2, 0, 0, 0, -9, -9, -9, -9, -9]  # 1: an operator without a name here


def test_a_figure_is_a_png_of_the_size_of_two_columns(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (requirements/test.txt)")
    graph = layered_graph(6, 2)
    pair = [list_schedule(graph, steps=2), list_schedule(graph, loads=False, slower=1.3, source="measured")]
    plot.write_png(pair[:1], tmp_path / "one.png")
    plot.write_png(pair, tmp_path / "two.png")
    from matplotlib.image import imread

    one, two = imread(tmp_path / "one.png"), imread(tmp_path / "two.png")
    assert one.shape[1] == two.shape[1] == round(plot.WIDTH_IN * plot.DPI) and two.shape[0] > 1.5 * one.shape[0]
    red, green, blue = (two[:, :, i] * 255 for i in range(3))
    seen = {f"#{code:06x}" for code in np.unique(red.round().astype(int) << 16 | green.round().astype(int) << 8 | blue.round().astype(int)).tolist()}
    wanted = {*plot.COLOURS[:5], plot.WAITS["wait for an event"]}
    assert wanted <= seen


def test_without_matplotlib_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RequestError, match=r"a plot, expected the package matplotlib, got none installed; pip install 'mpk\[plot\]'"):
        plot.write_png([list_schedule(layered_graph(2, 1))], tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()
