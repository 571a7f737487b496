"""Pictures of a scheduled graph as SVG text, without any external program: one layer's tasks and events, and a schedule.

`layer_svg`: a row an operator, a column a worker, so that a column read downwards is (a part of) a worker's queue. Events are the
round marks between rows: lines come in from producers and leave for the tasks that wait. Beyond 16 workers, tasks become
strips and the events between two operators one mark. `schedule_svg`: a row a worker, time to the right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from html import escape
from math import floor, log10

from mpk.errors import GraphError
from mpk.graph.order import STEP_EVENT
from mpk.graph.sm_task_graph import SMTaskGraph, Task, consumers_of_events

FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, sans-serif"
INK, MUTED, LINE, PAPER, TRACK = "#1c2530", "#66717e", "#aab4bf", "#fcfcfa", "#eef0ef"
# fill and border, told apart in print and by most colour-blind readers
PALETTE = (("#cfe3f7", "#2f6fab"), ("#fde2c0", "#b96a10"), ("#d3ecd2", "#3b8a41"), ("#ead9f3", "#7c4a9e"), ("#f8d3d3", "#b03a3d"),
           ("#d5eeee", "#23807f"), ("#f3ecc2", "#8d7a12"), ("#e3dbd2", "#76604a"), ("#dfe3ea", "#4d5a6d"), ("#f6d6e6", "#a83a74"))
DETAIL_WORKERS = 16  # up to here every task is a box with text
DETAIL_TASKS = 48  # of one operator
DETAIL_MARKS = 14  # events above one operator


def colours(graph: SMTaskGraph) -> dict[str, tuple[str, str]]:
    """Task kind -> (fill, border), in order of first use."""
    kinds = dict.fromkeys(op.kind for op in graph.tensor_graph.operators)
    return {kind: PALETTE[i % len(PALETTE)] for i, kind in enumerate(kinds)}


def _middle(colour: tuple[str, str]) -> str:
    """Between fill and border: for boxes too small for a border."""
    fill, border = ([int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in colour)
    return "#" + "".join(f"{round(0.42 * a + 0.58 * b):02x}" for a, b in zip(fill, border, strict=True))


def _amount(x: float) -> str:
    """A number for people: no exponents, as many digits as help."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


# ---- elements
def _number(x: float) -> str:
    return f"{x:.1f}".rstrip("0").rstrip(".")


def _text(x: float, y: float, words: str, size: float = 12, colour: str = INK, anchor: str = "start", weight: int = 400) -> str:
    return (f'<text x="{_number(x)}" y="{_number(y)}" font-size="{_number(size)}" fill="{colour}" text-anchor="{anchor}" '
            f'font-weight="{weight}">{escape(words)}</text>')


def _box(x: float, y: float, width: float, height: float, fill: str, border: str = "none", radius: float = 3, title: str = "") -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    return (f'<rect x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}" rx="{_number(radius)}" '
            f'fill="{fill}" stroke="{border}">{inside}</rect>')


def _curve(x0: float, y0: float, x1: float, y1: float, colour: str = LINE, width: float = 1.0, arrow: bool = False) -> str:
    bend = max(14.0, (y1 - y0) * 0.5)
    head = ' marker-end="url(#arrow)"' if arrow else ""
    return (f'<path d="M{_number(x0)} {_number(y0)}C{_number(x0)} {_number(y0 + bend)} {_number(x1)} {_number(y1 - bend)} {_number(x1)} '
            f'{_number(y1)}" fill="none" stroke="{colour}" stroke-width="{_number(width)}"{head}/>')


def _document(width: float, height: float, parts: Iterable[str], title: str) -> str:
    arrow = (f'<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
             f'<path d="M0 0.8L8 4L0 7.2z" fill="{MUTED}"/></marker></defs>')
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{_number(width)}" height="{_number(height)}" '
            f'viewBox="0 0 {_number(width)} {_number(height)}" font-family="{FONT}" role="img"><title>{escape(title)}</title>')
    return "\n".join([head, arrow, _box(0, 0, width, height, PAPER, radius=0), *parts, "</svg>"]) + "\n"


def _legend(graph: SMTaskGraph, kinds: Iterable[str], small: bool) -> list[str]:
    parts = []
    x, y = 24.0, 80.0
    for kind in kinds:
        fill, border = colours(graph)[kind]
        if small:
            fill = border = _middle((fill, border))
        parts += [_box(x, y - 9, 12, 12, fill, border, 2), _text(x + 18, y + 1, kind, 11, MUTED)]
        x += 34 + 6.4 * len(kind)
    return parts


# ---- one layer
@dataclass
class _Mark:
    """An event, or several between the same operators, above the row of the tasks that wait."""

    label: str
    producers: list[Task]
    consumers: list[Task]
    outside: str = ""  # where producers or consumers are that the picture leaves out
    x: float = 0.0
    title: str = ""

    @property
    def width(self) -> float:
        return 16 + 6.1 * len(self.label)

    @property
    def note(self) -> str:
        return f"from {self.outside}" if self.outside else ""

    @property
    def room(self) -> float:
        """Width with the note on the right and a gap."""
        return self.width + 12 + (5.4 * len(self.note) + 6 if self.outside else 0)


@dataclass
class _Layer:
    """Geometry of the picture of one layer."""

    graph: SMTaskGraph
    operators: list[int]
    tasks: dict[int, list[Task]] = field(default_factory=dict)
    place: dict[int, tuple[float, float, float]] = field(default_factory=dict)  # task -> left, top, width
    left: float = 236.0
    box_height: float = 36.0
    gap: float = 6.0
    width: float = 0.0
    detailed: bool = True

    def __post_init__(self) -> None:
        for op in self.operators:
            self.tasks[op] = [t for t in self.graph.tasks if t.op == op]
        self.detailed = self.graph.num_workers <= DETAIL_WORKERS and max(len(t) for t in self.tasks.values()) <= DETAIL_TASKS
        crowd = max((sum(1 for t in tasks if t.worker == w) for tasks in self.tasks.values() for w in range(self.graph.num_workers)), default=1)
        room = 1080.0 if self.detailed else 1000.0
        self.slot = max(room / (self.graph.num_workers * max(crowd, 1)), 30.0 if self.detailed else 2.0)
        self.slot = min(self.slot, 150.0)
        self.column = self.slot * max(crowd, 1)
        self.width = self.left + self.column * self.graph.num_workers + 40

    def put(self, op: int, top: float) -> None:
        """Places for the tasks of one row."""
        filled = [0] * max(self.graph.num_workers, 1)
        inset = self.gap / 2 if self.detailed else 0.4
        count = {w: sum(1 for t in self.tasks[op] if t.worker == w) for w in range(self.graph.num_workers)}
        for task in self.tasks[op]:
            width = self.column / max(count.get(task.worker, 1), 1)
            x = self.left + max(task.worker, 0) * self.column + filled[task.worker] * width
            self.place[task.id] = (x + inset, top, width - 2 * inset)
            filled[task.worker] += 1

    def centre(self, task: Task) -> float:
        x, _, width = self.place[task.id]
        return x + width / 2


def layer_svg(graph: SMTaskGraph, layer: int) -> str:
    """The operators of `layer` (-1: those outside the layers), their tasks and the events between them.

    Raises `GraphError` if there is no such layer or the graph has no queues yet.
    """
    operators = [i for i, op in enumerate(graph.tensor_graph.operators) if op.layer == layer]
    if not operators:
        layers = max((op.layer for op in graph.tensor_graph.operators), default=-1) + 1
        raise GraphError(f"layer {layer}", expected=f"one of {layers} layers (0 to {layers - 1}), or -1 for what is outside them")
    if not graph.queues:
        raise GraphError("a graph without queues has no picture", remedy="lower the model up to the pass 'event_fusion'")
    plan = _Layer(graph, operators)
    marks = _marks(graph, plan)
    plan.width = max(plan.width, *(plan.left + sum(m.room for m in row) + 16 for row in marks.values()), 0)
    what = f"layer {layer}" if layer >= 0 else "outside the layers"
    name = f"{graph.tensor_graph.config.architecture}, {what}"
    parts = [_text(24, 34, name, 17, weight=600),
             _text(24, 54, f"{sum(map(len, plan.tasks.values()))} tasks of {len(operators)} operators on {graph.num_workers} workers of target "
                   f"{graph.target}, {graph.dtype} weights; a column is a worker, time runs down", 12, MUTED)]
    parts += _legend(graph, dict.fromkeys(graph.tensor_graph.operators[o].kind for o in operators), small=not plan.detailed)
    top = 112.0
    if plan.detailed:
        parts += [_text(plan.left + (w + 0.5) * plan.column, top - 8, f"worker {w}" if plan.column > 58 else str(w), 11, MUTED, "middle")
                  for w in range(graph.num_workers)]
    lines: list[str] = []
    shapes: list[str] = []
    for op in operators:
        above = marks.get(op, [])
        top += 58 if above else 18
        plan.put(op, top)
        shapes += _row(plan, op, top)
        _spread(plan, above)
        for mark in above:
            lines += _wires(plan, mark, top)
            shapes += _pill(mark, top - 32)
        top += plan.box_height
    shapes += _outgoing(graph, plan, top)
    return _document(plan.width, top + 62, [*parts, *lines, *shapes], name)


def _marks(graph: SMTaskGraph, plan: _Layer) -> dict[int, list[_Mark]]:
    """Operator -> marks above its row."""
    inside = set(plan.operators)
    waiting = consumers_of_events(graph)
    marks: dict[int, list[_Mark]] = {}
    for event in graph.events:
        by_op: dict[int, list[Task]] = {}
        for t in waiting[event.id]:
            if graph.tasks[t].op in inside:
                by_op.setdefault(graph.tasks[t].op, []).append(graph.tasks[t])
        producers = [graph.tasks[p] for p in event.producers]
        for op, consumers in by_op.items():
            here = [] if event.id == STEP_EVENT else [p for p in producers if p.op in inside and p.op <= op]
            names = sorted({graph.operator(p).name for p in producers if p not in here})
            outside = "the step before" if event.id == STEP_EVENT else ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
            title = f"event {event.id}: {event.threshold} signals, {len(waiting[event.id])} tasks wait"
            marks.setdefault(op, []).append(_Mark(f"e{event.id} \u00b7 {event.threshold}", here, consumers, outside, title=title))
    return {op: m if plan.detailed and len(m) <= DETAIL_MARKS else _summed(graph, m) for op, m in marks.items()}


def _summed(graph: SMTaskGraph, marks: list[_Mark]) -> list[_Mark]:
    """One mark for all events that come from the same operators."""
    groups: dict[tuple[object, ...], list[_Mark]] = {}
    for mark in marks:
        groups.setdefault((mark.outside, *sorted({p.op for p in mark.producers})), []).append(mark)
    out = []
    for same in groups.values():
        producers = {p.id: p for m in same for p in m.producers}
        consumers = {c.id: c for m in same for c in m.consumers}
        label = f"{_count(len(same), 'event')}, {_count(sum(len(m.consumers) for m in same), 'wait')}"
        out.append(_Mark(label, list(producers.values()), list(consumers.values()), same[0].outside, title=label))
    return out


def _spread(plan: _Layer, marks: list[_Mark]) -> None:
    """Put marks near the middle of what they join, without overlaps."""
    for mark in marks:
        ends = [plan.centre(t) for t in (*mark.producers, *mark.consumers) if t.id in plan.place]
        mark.x = sum(ends) / len(ends) if ends else plan.left
    marks.sort(key=lambda m: m.x)
    right = plan.width - 10
    edge = plan.left
    for i, mark in enumerate(marks):
        rest = sum(m.room for m in marks[i:])
        mark.x = min(max(mark.x, edge + mark.width / 2), right - rest + mark.width / 2)
        edge = mark.x - mark.width / 2 + mark.room


def _row(plan: _Layer, op: int, top: float) -> list[str]:
    graph, operator = plan.graph, plan.graph.tensor_graph.operators[op]
    tasks = plan.tasks[op]
    fill, border = colours(graph)[operator.kind]
    flow = f"{', '.join(i for i in operator.inputs if i != 'step') or 'step'} \u2192 {', '.join(operator.outputs)}"
    tiles = max((t.tile_end for t in tasks), default=0)
    parts = [_text(24, top + 6, operator.name, 13, weight=600), _text(24, top + 21, flow if len(flow) < 36 else flow[:35] + "\u2026", 10.5, MUTED),
             _text(24, top + 35, f"{_count(tiles, 'tile')} in {_count(len(tasks), 'task')}", 10.5, MUTED)]
    for task in tasks:
        x, y, width = plan.place[task.id]
        title = f"task {task.id}: {operator.name} tiles {task.tile_begin} to {task.tile_end}, worker {task.worker}"
        if not plan.detailed:
            parts.append(_box(x, y, max(width, 0.8), plan.box_height, _middle((fill, border)), radius=0.6, title=title))
            continue
        parts.append(_box(x, y, width, plan.box_height, fill, border, title=title))
        size = min(11.5, width / 4)
        parts.append(_text(x + width / 2, y + 15, f"t{task.id}", size, INK, "middle", 600))
        part = f"{task.tile_begin}:{task.tile_end}"
        parts.append(_text(x + width / 2, y + 28, part, min(10, width / (0.62 * max(len(part), 4))), MUTED, "middle"))
    return parts


def _wires(plan: _Layer, mark: _Mark, top: float) -> list[str]:
    y = top - 32
    out = []
    bold = 1.0 if plan.detailed else 0.5
    for task in mark.producers:
        bottom = plan.place[task.id][1] + plan.box_height
        out.append(_curve(plan.centre(task), bottom, mark.x, y - 8, LINE, bold))
    for task in mark.consumers:
        out.append(_curve(mark.x, y + 8, plan.centre(task), top - 1, LINE if not plan.detailed else MUTED, bold, arrow=plan.detailed))
    return out


def _pill(mark: _Mark, y: float) -> list[str]:
    parts = [_box(mark.x - mark.width / 2, y - 9, mark.width, 18, "#ffffff", MUTED, 9, mark.title),
             _text(mark.x, y + 4, mark.label, 10.5, INK, "middle")]
    if mark.outside:
        parts.append(_text(mark.x + mark.width / 2 + 5, y + 3.5, mark.note, 10, MUTED))
    return parts


def _outgoing(graph: SMTaskGraph, plan: _Layer, bottom: float) -> list[str]:
    """What the layer signals to operators below."""
    waiting = consumers_of_events(graph)
    events = {e for op in plan.operators for t in plan.tasks[op] for e in t.signals if e != STEP_EVENT}
    names = dict.fromkeys(graph.operator(t).name for t in sorted({t for e in events for t in waiting[e]}) if graph.tasks[t].op not in plan.operators)
    shown = ", ".join(list(names)[:4]) + (", ..." if len(names) > 4 else "")
    return [_text(plan.left, bottom + 30, f"to {shown}", 11, MUTED)] if names else []


# ---- schedule
def start_times(graph: SMTaskGraph, durations: Sequence[float] | Mapping[int, float]) -> tuple[list[float], list[float]]:
    """(start, end) of every task when each starts as soon as its queue and its events allow; the unit is that of `durations`.

    Raises `GraphError` if some task never starts.
    """
    start, end = [0.0] * len(graph.tasks), [0.0] * len(graph.tasks)
    counters = [0] * len(graph.events)
    fired = [0.0] * len(graph.events)
    place, free = [0] * len(graph.queues), [0.0] * len(graph.queues)
    blocked: dict[int, list[int]] = {}  # event -> workers
    running: list[tuple[float, int, int]] = []  # (end, worker, task)

    def go_on(worker: int) -> None:
        """Start the next task of a worker if its events have fired, else remember what it waits for."""
        if place[worker] == len(graph.queues[worker]):
            return
        task = graph.tasks[graph.queues[worker][place[worker]]]
        waits = [e for e in task.waits if e != STEP_EVENT]
        missing = next((e for e in waits if counters[e] < graph.events[e].threshold), None)
        if missing is not None:
            blocked.setdefault(missing, []).append(worker)
            return
        start[task.id] = max([free[worker], *(fired[e] for e in waits)])
        end[task.id] = free[worker] = start[task.id] + durations[task.id]
        place[worker] += 1
        heappush(running, (end[task.id], worker, task.id))

    for w in range(len(graph.queues)):
        go_on(w)
    while running:
        now, worker, done = heappop(running)
        woken = [worker]
        for e in graph.tasks[done].signals:
            counters[e] += 1
            if counters[e] == graph.events[e].threshold:
                fired[e] = now
                woken += blocked.pop(e, [])
        for w in woken:
            go_on(w)
    if blocked:
        raise GraphError(f"the schedule never ends: workers wait for events {sorted(blocked)[:8]}", remedy="see mpk verify")
    return start, end


def schedule_svg(graph: SMTaskGraph, durations: Sequence[float] | Mapping[int, float] | None = None, unit: str = "\u00b5s",
                 layers: tuple[int, int] | None = None) -> str:
    """One row a worker, boxes coloured by task kind, gaps where a worker waits.

    durations: time of each task by id, in `unit`; without, bytes moved stand for time. layers: first and last layer shown,
    else the whole step. Raises `GraphError` for a graph without queues, with a cycle, or without such layers.
    """
    if not graph.queues or not graph.tasks:
        raise GraphError("a graph without queues has no schedule", remedy="lower the model up to the pass 'event_fusion'")
    if durations is None:
        moved = [t.cost.weight_bytes + t.cost.activation_bytes for t in graph.tasks]
        least = 0.02 * sum(moved) / len(moved) or 1.0
        size, unit = (1e6, "MB moved by a worker") if max(moved) > 2e5 else (1e3, "kB moved by a worker")
        durations = [max(m, least) / size for m in moved]
    start, end = start_times(graph, durations)
    picture = _Schedule(graph, start, end, layers)
    what = "one step" if layers is None else f"layers {layers[0]} to {layers[1]} of one step"
    name = f"{graph.tensor_graph.config.architecture}: {what} on {_count(graph.num_workers, 'worker')}"
    parts = [_text(24, 34, name, 17, weight=600),
             _text(24, 54, f"{_count(len(picture.tasks), 'task')}, target {graph.target}, {graph.dtype} weights; {_amount(picture.span)} {unit}, "
                   f"workers busy {100 * picture.busy():.0f} %", 12, MUTED)]
    parts += _legend(graph, dict.fromkeys(graph.tasks[t].kind for t in picture.tasks), small=not picture.detailed)
    parts += [*picture.rows(), *picture.boxes(), *picture.axis(unit)]
    return _document(picture.left + picture.room + 34, picture.bottom + 46, parts, name)


@dataclass
class _Schedule:
    """Geometry of the picture of a schedule."""

    graph: SMTaskGraph
    start: list[float]
    end: list[float]
    layers: tuple[int, int] | None
    left: float = 86.0
    room: float = 1130.0
    top: float = 108.0

    def __post_init__(self) -> None:
        first, last = self.layers or (-1, max(op.layer for op in self.graph.tensor_graph.operators))
        self.tasks = [t.id for t in self.graph.tasks if first <= self.graph.operator(t).layer <= last]
        if not self.tasks:
            raise GraphError(f"layers {first} to {last} have no tasks")
        self.begin = min(self.start[t] for t in self.tasks)
        self.span = max(self.end[t] for t in self.tasks) - self.begin or 1.0
        self.detailed = len(self.tasks) <= 3000
        self.height = 26.0 if self.graph.num_workers <= DETAIL_WORKERS else max(4.0, 560.0 / self.graph.num_workers)
        self.pitch = self.height * 1.22
        self.bottom = self.top + self.graph.num_workers * self.pitch

    def busy(self) -> float:
        """Share of the time of all workers that is spent in the tasks shown."""
        return sum(self.end[t] - self.start[t] for t in self.tasks) / (self.span * self.graph.num_workers)

    def x(self, time: float) -> float:
        return self.left + (time - self.begin) / self.span * self.room

    def rows(self) -> list[str]:
        parts = []
        every = max(1, round(14 / self.pitch))
        for w in range(self.graph.num_workers):
            y = self.top + w * self.pitch
            parts.append(_box(self.left, y, self.room, self.height, TRACK, radius=1))
            if w % every == 0:
                label = f"worker {w}" if self.graph.num_workers <= DETAIL_WORKERS else str(w)
                parts.append(_text(self.left - 10, y + self.height / 2 + 4, label, 11, MUTED, "end"))
        return parts

    def boxes(self) -> list[str]:
        if self.detailed:
            return [part for t in self.tasks for part in self._box(t)]
        paths: dict[str, list[str]] = {}  # one path a kind keeps tens of thousands of boxes small
        for t in self.tasks:
            task = self.graph.tasks[t]
            x, width = self.x(self.start[t]), max(self.x(self.end[t]) - self.x(self.start[t]), 0.15)
            gap = min(0.4, 0.1 * width)
            y = self.top + task.worker * self.pitch
            paths.setdefault(task.kind, []).append(f"M{x:.2f} {y:.1f}h{width - gap:.2f}v{self.height:.1f}h{gap - width:.2f}z")
        return [f'<path d="{"".join(d)}" fill="{_middle(colours(self.graph)[kind])}"/>' for kind, d in paths.items()]

    def _box(self, t: int) -> list[str]:
        task, label = self.graph.tasks[t], self.graph.operator(t).name
        colour = colours(self.graph)[task.kind]
        x, y = self.x(self.start[t]), self.top + task.worker * self.pitch
        width = self.x(self.end[t]) - x
        title = f"task {t}: {label}, {self.start[t]:.4g} to {self.end[t]:.4g}"
        inset = min(0.5, width * 0.08)
        fill, border, radius = (_middle(colour), "none", 0.0) if width < 4 else (*colour, 2.0)
        parts = [_box(x + inset, y, max(width - 2 * inset, 0.4), self.height, fill, border, radius, title)]
        if self.height > 20 and width > 6.4 * len(label) + 8:
            parts.append(_text(x + width / 2, y + self.height / 2 + 4, label, 10.5, INK, "middle"))
        return parts

    def axis(self, unit: str) -> list[str]:
        step = 10.0 ** floor(log10(self.span))
        step = next(s for s in (step / 10, step / 5, step / 2, step, 2 * step) if self.span / s <= 8)
        y = self.bottom + 4
        parts = []
        for i in range(int(self.span / step * 1.0001) + 1):
            x = self.left + i * step / self.span * self.room
            parts.append(f'<path d="M{_number(x)} {_number(y)}v5" stroke="{LINE}"/>')
            parts.append(_text(x, y + 18, _amount(i * step), 10.5, MUTED, "middle"))
        return [*parts, _text(self.left + self.room, y + 34, unit, 10.5, MUTED, "end")]
