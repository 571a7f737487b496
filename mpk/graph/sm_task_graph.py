"""`SMTaskGraph`: tasks (tiles of operators) on workers (SMs, threads), ordered by queues and events.

A *task* runs on one worker. A *queue* is the static order of one worker's tasks. An *event* is a counter: each of its
producers adds one when done, a task that waits for it starts once the counter has reached the threshold of the current
step. The graph describes ONE step (all rows of one forward pass); the program repeats it, with thresholds multiplied by
the number of the step. The order of task ids is the *sequential order*: executing tasks one by one in that order is the
meaning of the graph, and every schedule must be equivalent to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from mpk.errors import GraphError, InternalError
from mpk.graph.tensor_graph import Operator, TensorGraph

STEP_CLOSERS = ("advance", "prompt_advance")  # kinds of the task that ends a step and raises the step event


class Region(NamedTuple):
    """Columns [begin, end) of all rows of a buffer. Rows are not split: a task treats every row of the step."""

    buffer: str
    begin: int
    end: int

    def overlaps(self, other: Region) -> bool:
        return self.buffer == other.buffer and self.begin < other.end and other.begin < self.end


class Cost(NamedTuple):
    """What a task moves and computes at one token row: bytes of weights, bytes of activations per row, operations per row."""

    weight_bytes: int = 0
    activation_bytes: int = 0
    flops: int = 0


NO_COST = Cost()


@dataclass(slots=True)
class Task:
    """One tile range of one operator.

    `tile_begin`, `tile_end`: in the operator's own units (see its task kind). `worker` is -1 until scheduled. `waits` and
    `signals` are event ids. Reads of the state buffer `step` are implied for every task and not listed.
    """

    id: int
    op: int
    kind: str
    tile_begin: int
    tile_end: int
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    cost: Cost = NO_COST
    worker: int = -1
    waits: tuple[int, ...] = ()
    signals: tuple[int, ...] = ()


@dataclass(slots=True)
class Event:
    """A monotonic counter. Every producer adds one; waiters of step s need threshold * s (s counts from 1).

    A `carried` event is no counter but stands for data that is its own flag: a waiter sees in the flagged buffers that it reads that all
    producers have written there. It orders what tasks do, but makes nothing else visible that producers wrote.
    """

    id: int
    producers: tuple[int, ...]
    threshold: int
    carried: bool = False


@dataclass(frozen=True)
class Buffer:
    """Memory of an activation, of state, of the key-value cache, or of messages between ranks; `row_bytes` is columns times the element size.

    `flagged`: see `Value`.
    """

    name: str
    columns: int
    rows: str
    kind: str
    element_bytes: int
    flagged: bool = False

    @property
    def row_bytes(self) -> int:
        return self.columns * self.element_bytes

    @property
    def says_itself(self) -> bool:
        """Whether its words say themselves that they have been written, so that readers wait for them: flagged buffers, and messages between ranks."""
        return self.flagged or self.kind == "peer"


class Allocation(NamedTuple):
    """Place of a buffer in the arena, in bytes; of a flagged one its first copy."""

    offset: int
    size: int


@dataclass(frozen=True)
class MachineLimits:
    """What the verifier holds the graph against."""

    workers: int
    events: int
    arena_bytes: int
    scratch_bytes: int  # private memory of one worker (shared memory of an SM, scratch of a thread)


@dataclass
class SMTaskGraph:
    """Tasks, events, queues and the memory plan of one step of a model on one device.

    With `ranks` > 1 every one of so many devices runs this graph, each with its part of the weights; buffers of kind "peer" are
    written by all of them, in the memory of all of them.
    """

    tensor_graph: TensorGraph
    target: str
    num_workers: int
    max_rows: int
    dtype: str = "bf16"
    ranks: int = 1
    tasks: list[Task] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    queues: list[list[int]] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    arena: dict[str, Allocation] = field(default_factory=dict)
    arena_bytes: int = 0
    peers: dict[str, Allocation] = field(default_factory=dict)  # places of buffers of kind "peer" in a rank's peer memory
    peer_bytes: int = 0
    flagged_begin: int = 0  # part of the arena with the first copy of all flagged buffers; the second follows `flagged_bytes` behind it
    flagged_bytes: int = 0
    weight_offsets: dict[str, int] = field(default_factory=dict)  # packed matrices: TaskKind.packed_key -> byte offset
    weight_bytes: int = 0
    param_offsets: dict[str, int] = field(default_factory=dict)  # packed float32 parameters: operator name -> byte offset
    limits: MachineLimits | None = None
    events_before_fusion: int = 0  # tasks that another task needs: one event each, if none were fused
    notes: list[str] = field(default_factory=list)  # what each pass did or declined, one line each, with numbers
    flight: tuple[int, int] | None = field(default=None, compare=False)  # bytes on their way of a launch, where not the target's own
    proof: str = field(default="", repr=False, compare=False)  # fingerprint of the contents that `verify` proved; not saved
    model: Any = field(default=None, repr=False, compare=False)  # where the weights come from (mpk.frontend.LoadedModel); not saved
    # task -> sets of tasks it needs, before event fusion makes events of them (tasks with the same needs share a set)
    dependencies: dict[int, list[frozenset[int]]] = field(default_factory=dict)
    carried: dict[int, list[frozenset[int]]] = field(default_factory=dict)  # likewise: those whose flagged data a task reads

    def __repr__(self) -> str:
        """A line: the contents of a graph would fill a screen a thousand times."""
        devices = f" on each of {self.ranks} devices" if self.ranks > 1 else ""
        return (f"SMTaskGraph({self.target}, {self.dtype}, {len(self.tasks)} tasks of {len(self.tensor_graph.operators)} operators, {len(self.events)} events, "
                f"{self.num_workers} workers{devices})")

    # ---- contents
    def operator(self, task: Task | int) -> Operator:
        t = self.tasks[task] if isinstance(task, int) else task
        return self.tensor_graph.operators[t.op]

    def add_task(self, kind: str, op: int, tiles: tuple[int, int], reads: Iterable[Region] = (), writes: Iterable[Region] = (),
                 cost: Cost = NO_COST, worker: int = -1) -> Task:
        """Append a task; its id is its place in the sequential order."""
        task = Task(len(self.tasks), op, kind, tiles[0], tiles[1], tuple(reads), tuple(writes), cost, worker)
        self.tasks.append(task)
        return task

    def add_dependency(self, before: int, after: int) -> None:
        """Require task `before` to be done when `after` starts (kept in `dependencies` until events are made)."""
        if not 0 <= before < len(self.tasks) or not 0 <= after < len(self.tasks):
            raise InternalError(f"dependency {before} -> {after}, but the graph has {len(self.tasks)} tasks")
        if before >= after:
            raise InternalError(f"dependency {before} -> {after} is against the sequential order")
        self.dependencies.setdefault(after, []).append(frozenset((before,)))

    def add_event(self, producers: Iterable[int], consumers: Iterable[int], carried: bool = False) -> Event:
        """A new event that `consumers` wait for and that needs all `producers`."""
        event = Event(len(self.events), tuple(sorted(producers)), 0, carried)
        event.threshold = len(event.producers)
        self.events.append(event)
        for t in event.producers:
            self.tasks[t].signals += (event.id,)
        for t in consumers:
            self.tasks[t].waits += (event.id,)
        return event

    # ---- order
    def needs(self, task: int) -> list[frozenset[int]]:
        """Sets of tasks that `task` needs, of both kinds, as long as no events have been made of them."""
        return [*self.dependencies.get(task, ()), *self.carried.get(task, ())]

    def predecessors(self, task: int) -> set[int]:
        """Tasks that must be done before `task` starts, by events and dependencies (queues apart)."""
        found: set[int] = set().union(*self.needs(task))
        for e in self.tasks[task].waits:
            found.update(self.events[e].producers)
        return found

    def ready_tasks(self, completed: Iterable[int]) -> list[int]:
        """Tasks not completed whose events have fired and, where queues exist, whose predecessor in the queue is done.

        The event that `advance` raises counts as fired: the host raises it before the first step. Raises `GraphError` for a task that is not there.
        """
        done = set(completed)
        if unknown := done.difference(range(len(self.tasks))):
            raise GraphError(f"completed task {next(iter(unknown))!r}", expected=f"0 to {len(self.tasks) - 1}")
        armed = {e.id for e in self.events if any(self.tasks[p].kind in STEP_CLOSERS for p in e.producers)}
        count = [0] * len(self.events)
        for t in done:
            for e in self.tasks[t].signals:
                count[e] += 1
        before = {b: a for q in self.queues for a, b in pairwise(q)}
        ready = []
        for task in self.tasks:
            if task.id in done or not all(e in armed or count[e] >= self.events[e].threshold for e in task.waits):
                continue
            if not all(s <= done for s in self.needs(task.id)) or (task.id in before and before[task.id] not in done):
                continue
            ready.append(task.id)
        return ready

    # ---- reports
    def statistics(self) -> dict[str, Any]:
        """Counts of tasks per kind, events, waits, signals, bytes of weights, arena and critical path length in tasks."""
        kinds: dict[str, int] = {}
        for t in self.tasks:
            kinds[t.kind] = kinds.get(t.kind, 0) + 1
        return {
            "operators": len(self.tensor_graph.operators),
            "tasks": len(self.tasks),
            "tasks_per_kind": kinds,
            "events": len(self.events),
            "waits": sum(len(t.waits) for t in self.tasks),
            "signals": sum(len(t.signals) for t in self.tasks),
            "workers": self.num_workers,
            "ranks": self.ranks,
            "weight_bytes": sum(t.cost.weight_bytes for t in self.tasks),
            "arena_bytes": self.arena_bytes,
            "peer_bytes": self.peer_bytes,
            "critical_path_tasks": self.critical_path_length(),
        }

    def critical_path_length(self) -> int:
        """Longest chain of tasks, each of which waits for the one before: through events, the queue of a worker, what ranks send one another (and
        dependencies not yet turned into events)."""
        depth = [0] * len(self.tasks)
        event_depth: dict[int, int] = {}
        before = {t: p for q in self.queues for p, t in pairwise(q)}
        sent: dict[str, int] = {}  # buffer of messages -> depth of the deepest task so far that writes it
        for t in self.tasks:  # the sequential order is a topological order
            d = max((depth[p] for s in self.needs(t.id) for p in s), default=0)
            if t.id in before:
                d = max(d, depth[before[t.id]])
            d = max([d, *(sent.get(r.buffer, 0) for r in t.reads)])
            for e in t.waits:
                if e not in event_depth:
                    event_depth[e] = max((depth[p] for p in self.events[e].producers if p < t.id), default=0)
                d = max(d, event_depth[e])
            depth[t.id] = d + 1
            for r in t.writes:
                if self.buffers[r.buffer].kind == "peer":
                    sent[r.buffer] = max(sent.get(r.buffer, 0), d + 1)
        return max(depth, default=0)

    def to_networkx(self) -> Any:
        """A `networkx.DiGraph`: tasks ("t<id>") and events ("e<id>") as nodes, signals, waits and queue order as edges."""
        import networkx as nx

        g = nx.DiGraph()
        for t in self.tasks:
            g.add_node(f"t{t.id}", type="task", kind=t.kind, operator=self.operator(t).name, worker=t.worker,
                       tiles=(t.tile_begin, t.tile_end))
        for e in self.events:
            g.add_node(f"e{e.id}", type="event", threshold=e.threshold, carried=e.carried)
            for p in e.producers:
                g.add_edge(f"t{p}", f"e{e.id}", type="signal")
        for t in self.tasks:
            for ev in t.waits:
                g.add_edge(f"e{ev}", f"t{t.id}", type="wait")
            for p in set().union(*self.needs(t.id)):
                g.add_edge(f"t{p}", f"t{t.id}", type="dependency")
        for q in self.queues:
            for a, b in pairwise(q):
                if not g.has_edge(f"t{a}", f"t{b}"):
                    g.add_edge(f"t{a}", f"t{b}", type="queue")
        return g

    # ---- files
    def save(self, path: str) -> None:
        """Write the whole graph to one file (see `mpk.graph.serialize`); `load` gives back an equal graph."""
        from mpk.graph.serialize import save

        save(self, path)

    @staticmethod
    def load(path: str) -> SMTaskGraph:
        """Read what `save` wrote; raises `GraphError` for a damaged file or another version."""
        from mpk.graph.serialize import load

        return load(path)

    def to_text(self) -> str:
        """A stable text, one line a task and event, for people and for diffs."""
        from mpk.graph.serialize import to_text

        return to_text(self)


def consumers_of_events(graph: SMTaskGraph) -> Mapping[int, list[int]]:
    """Event id -> ids of the tasks that wait for it."""
    out: dict[int, list[int]] = {e.id: [] for e in graph.events}
    for t in graph.tasks:
        for e in t.waits:
            out[e].append(t.id)
    return out
