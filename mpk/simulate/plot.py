"""`write_png`: timelines as a figure for papers, drawn with matplotlib, which is needed for this alone (`pip install 'mpk[plot]'`).

From top to bottom for each timeline: utilisation and bandwidth over time, and a row a worker; beside them the workers' time by cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpk.errors import RequestError
from mpk.simulate import analysis
from mpk.simulate.page_data import labels
from mpk.simulate.timeline import CONSUMER, PHASES, RUN, Timeline
from mpk.targets import hardware

# Colours that readers with any colour vision tell apart (after Okabe and Ito, and Tol), in order of time taken; the last one is for all others.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#332288", "#999933", "#882255", "#6b7280")
WAITS = {"wait for an event": "#d3d9df", "wait for weights": "#f0d9a0", "wait for the step": "#c4cbe8", "wait for a peer": "#f2c3d2",
         analysis.NOT_TRACED: "#f4f5f5"}
HATCHES = {"wait for weights": "////", "wait for a peer": "...."}
BUSY, MOVED, PAPER = "#0b5cad", "#c2185b", "#f4f5f5"
WIDTH_IN, DPI = 7.16, 300  # two columns of a page
COLUMNS = 1400  # of the image of a timeline
BINS = 350  # of the curves


def require() -> None:
    """Raise `RequestError` where matplotlib is not installed; to be asked before long work is done for a plot."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RequestError("a plot", expected="the package matplotlib", actual="none installed", remedy="pip install 'mpk[plot]'") from error


def write_png(timelines: Sequence[Timeline], path: Path | str, *, device: int = 0) -> None:
    """Write the figure of one or more timelines, one below the other on a common axis of time, 7.16 inches wide at 300 dots an inch.

    Raises `RequestError` without matplotlib or without timelines, OSError where `path` cannot be written.
    """
    require()
    if not timelines:
        raise RequestError("a plot of no timelines", expected="one or more")
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"font.size": 7.5, "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6, "hatch.linewidth": 0.5}):
        count = len(timelines)
        figure = Figure(figsize=(WIDTH_IN, 0.75 + 2.35 * count), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(2 * count, 2, width_ratios=(8.4, 1), height_ratios=(1.25, 2.6) * count)
        names = _order(timelines)
        longest = max(t.duration_ns for t in timelines)
        scale, unit = (1e6, "ms") if longest >= 1e6 else (1e3, "µs")
        fastest = max(float(analysis.series(t, BINS, device)[2].max()) for t in timelines) / 1e12
        first: Any = None
        for index, (timeline, label) in enumerate(zip(timelines, labels(timelines), strict=True)):
            curve = figure.add_subplot(grid[2 * index, 0], sharex=first)
            first = first or curve
            rows = figure.add_subplot(grid[2 * index + 1, 0], sharex=first)
            _curves(curve, timeline, device, fastest, scale)
            curve.set_title(f"{label}: {timeline.duration_ns / timeline.steps / 1e6:.3f} ms a step, "
                            f"{100 * analysis.in_tasks(timeline):.1f} % of the time in tasks", loc="left", fontsize=8)
            _rows(rows, timeline, device, names, scale)
            _idle(figure.add_subplot(grid[2 * index : 2 * index + 2, 1]), timeline)
        first.set_xlim(0, longest / scale)
        rows.set_xlabel(f"time ({unit})")
        _legend(figure, names, timelines)
        figure.savefig(str(path), dpi=DPI, format="png")


def _order(timelines: Sequence[Timeline]) -> list[str]:
    """Short operator names, those that take most time first."""
    total: dict[str, float] = {}
    for timeline in timelines:
        for row in analysis.per_operator(timeline):
            total[row.name] = total.get(row.name, 0.0) + row.task_us
    return sorted(total, key=lambda name: -total[name])


def raster(timeline: Timeline, device: int, columns: int, names: Sequence[str]) -> np.ndarray:
    """int [workers, columns]: what a worker did most of in each column of time: index of `names` (running), or -1 - phase; -9: nothing."""
    spans = timeline.spans[(timeline.spans["device"] == device) & (timeline.spans["role"] == CONSUMER)]
    of_task, short = analysis.task_operators(timeline.graph)
    place = np.array([names.index(n) if n in names else len(names) for n in short])
    code = np.where(spans["phase"] == RUN, place[of_task[spans["task"]]], len(names) + spans["phase"])
    edges = np.linspace(0, max(timeline.duration_ns, 1), columns + 1)
    kinds = np.unique(code)
    out = np.full((timeline.workers, columns), -9)
    for worker in range(timeline.workers):
        mine = np.flatnonzero(spans["worker"] == worker)
        own, codes = spans[mine], code[mine]
        cover = np.zeros((len(kinds), columns))
        for row, kind in enumerate(kinds):
            s = own[codes == kind]
            if len(s):
                cover[row] = analysis.binned(s["begin_ns"], s["end_ns"], (s["end_ns"] - s["begin_ns"]).astype(np.float64), edges)
        best = kinds[np.argmax(cover, axis=0)]
        best = np.where(best > len(names), -1 - (best - len(names)), best)
        out[worker] = np.where(cover.max(axis=0) > 0, best, -9)
    return out


def _curves(axes: Any, timeline: Timeline, device: int, fastest: float, scale: float) -> None:
    edges, busy, rate = analysis.series(timeline, BINS, device)
    middle = (edges[:-1] + edges[1:]) / 2 / scale
    axes.fill_between(middle, 100 * busy, color=BUSY, alpha=0.28, linewidth=0)
    axes.set_ylim(0, 105)
    axes.set_ylabel("running (%)", color=BUSY)
    axes.tick_params(labelbottom=False)
    other = axes.twinx()
    other.plot(middle, rate / 1e12, color=MOVED, linewidth=0.7)
    other.set_ylim(0, 1.1 * fastest if fastest > 0 else 1)
    other.set_ylabel("memory (TB/s)", color=MOVED)


def _rows(axes: Any, timeline: Timeline, device: int, names: Sequence[str], scale: float) -> None:
    from matplotlib.colors import to_rgb

    codes = raster(timeline, device, COLUMNS, names)
    image = np.empty((*codes.shape, 3))
    image[:] = to_rgb(PAPER)
    for index in range(len(names) + 1):
        image[codes == index] = to_rgb(COLOURS[min(index, len(COLOURS) - 1)])
    for phase, name in enumerate(PHASES):
        if phase != RUN:
            image[codes == -1 - phase] = to_rgb(WAITS[name])
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=(0, timeline.duration_ns / scale, timeline.workers, 0))
    axes.set_ylabel("SM" if hardware.backend_of(timeline.graph.target) == "cuda" else "worker")
    for end in analysis.step_ends(timeline, device)[:-1]:
        axes.axvline(end / scale, color="#1c2530", linewidth=0.5, linestyle=(0, (2, 2)))


def _idle(axes: Any, timeline: Timeline) -> None:
    """One bar from 0 to 100 %: running at the bottom, then idle time by cause."""
    bottom = 0.0
    for name, share in analysis.shares(timeline).items():
        if share < 0.0005:
            continue
        running = name == PHASES[RUN]
        axes.bar([0], [100 * share], bottom=[bottom], width=0.7, color=BUSY if running else WAITS[name], hatch=HATCHES.get(name), edgecolor="#66717e", linewidth=0.3)
        if share > 0.06:
            axes.text(0, bottom + 50 * share, f"{100 * share:.0f}", ha="center", va="center", color="white" if running else "#1c2530", fontsize=6.5)
        bottom += 100 * share
    axes.set_xticks([])
    axes.set_ylim(0, 100)
    axes.set_ylabel("workers' time (%)")


def _legend(figure: Any, names: Sequence[str], timelines: Sequence[Timeline]) -> None:
    from matplotlib.patches import Patch

    shown = list(names[: len(COLOURS) - 1])
    marks = [Patch(facecolor=COLOURS[i], label=name) for i, name in enumerate(shown)]
    if len(names) > len(shown):
        marks.append(Patch(facecolor=COLOURS[-1], label="others"))
    present = {name for t in timelines for name, share in analysis.shares(t).items() if share >= 0.0005}
    marks += [Patch(facecolor=c, hatch=HATCHES.get(name), edgecolor="#66717e", linewidth=0.3, label=name) for name, c in WAITS.items() if name in present]
    figure.legend(handles=marks, loc="outside lower center", ncols=6, frameon=False, fontsize=7, handlelength=1.2, columnspacing=1.2)
