"""Prove that every execution a schedule allows is equivalent to the sequential order of its tasks.

Runs last, and again before a saved graph is built; it changes nothing. Requires the complete graph: queues, events, arena,
weight offsets. It guarantees, or refuses with the first fault found:

- queues, events, regions and tiles are well formed: every task in one queue, producers and signals agree, every tile of every
  operator in one task, and regions as the task kind says;
- no execution hangs: every threshold is reachable, no cycle through queues and events;
- steps do not overlap: every task starts after the step event and ends before `advance`, which alone signals that event (tasks of
  `ephemeral` operators, whose results only `advance` and the same step read, may be seen to end later, by their readers);
- accesses in conflict are ordered as in the sequential order, also through bytes of the arena that buffers share
  (`mpk.graph.hazards`), and nothing is read that the same step did not write;
- where ranks share the model, none overwrites in another's memory what is still to be read there (`mpk.graph.peers`);
- flagged buffers, whose words say themselves that they have been written: each word is written once a step; what such data is said to
  order, its readers really wait for; nothing else relies on it, since it makes no other memory visible (`mpk.graph.order`). So steps
  are closed by counters, which makes clearings, caches and the step itself visible to the next one;
- memory: allocations large enough, inside the arena, state apart from the rest; packed weights apart; within the limits.

By induction over steps a proof for one step is a proof for all: no task of a step starts before `advance` of the step before,
which comes after all its tasks, so a counter never holds signals of a later step when it is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from mpk.errors import GraphError
from mpk.graph.hazards import Fault, describe, find_hazard, show
from mpk.graph.order import STEP_EVENT, Order, OrderError
from mpk.graph.peers import find_peer_fault
from mpk.graph.serialize import fingerprint
from mpk.graph.sm_task_graph import STEP_CLOSERS, Allocation, Buffer, Region, SMTaskGraph, Task
from mpk.tasks.base import TaskKind, load_kinds
from mpk.tasks.matrices import matrix_bytes, matrix_key

ALIGNMENT = 64  # bytes; what vector and bulk accesses of the back ends may rely on


def run(graph: SMTaskGraph) -> SMTaskGraph:
    """Return `graph` as it is, with the fingerprint of what was proven; raises `GraphError` with the first fault."""
    fault = find_fault(graph)
    if fault is not None:
        raise GraphError(fault.message)
    graph.proof = fingerprint(graph)
    return graph


def require_proof(graph: SMTaskGraph) -> None:
    """Verify the graph unless it is what was proven before; raises `GraphError`."""
    if not graph.proof or graph.proof != fingerprint(graph):
        run(graph)


def find_fault(graph: SMTaskGraph, kinds: Mapping[str, TaskKind] | None = None, checks: Sequence[str] | None = None) -> Fault | None:
    """The first fault, or None for a graph that is proven right.

    kinds: task kinds by name (default: all of `mpk.tasks`). checks: names out of `CHECKS`, to look at a part only; checks after
    `structure` and `operators` rely on these, `step` and `accesses` also on `events` and `deadlock`.
    """
    proof = _Proof(graph, load_kinds() if kinds is None else kinds)
    for name in CHECKS if checks is None else checks:
        fault = CHECKS[name](proof)
        if fault is not None:
            return fault
    return None


@dataclass
class _Proof:
    """A graph under proof and what several checks need to know about it."""

    graph: SMTaskGraph
    kinds: Mapping[str, TaskKind]

    @cached_property
    def executed(self) -> Order:
        return Order(self.graph)

    @cached_property
    def visible(self) -> Order:
        return Order(self.graph, carried=False) if any(e.carried for e in self.graph.events) else self.executed

    @cached_property
    def advance(self) -> Task | None:
        return next((t for t in self.graph.tasks if t.kind in STEP_CLOSERS), None)

    def name(self, task: int) -> str:
        return describe(self.graph, task)


def buffer_bytes(graph: SMTaskGraph, buffer: Buffer) -> int:
    """Bytes that tasks touch of an activation: `max_rows` rows, or one where a buffer has one row a step."""
    return buffer.row_bytes * (1 if buffer.rows == "step" else graph.max_rows)


# ---- well formed
def _structure(proof: _Proof) -> Fault | None:
    graph = proof.graph
    if not graph.tasks:
        return Fault("task", "the graph has no tasks")
    operators = graph.tensor_graph.operators
    for i, task in enumerate(graph.tasks):
        if task.id != i:
            return Fault("task", f"task {task.id} stands at place {i} of the sequential order", (i,))
        if not 0 <= task.op < len(operators):
            return Fault("task", f"task {i} is of operator {task.op}, but the graph has {len(operators)} operators", (i,))
        fault = _regions(proof, task)
        if fault is not None:
            return fault
    return _queues(proof)


def _regions(proof: _Proof, task: Task) -> Fault | None:
    for region in (*task.reads, *task.writes):
        buffer = proof.graph.buffers.get(region.buffer)
        if buffer is None:
            return Fault("region", f"{proof.name(task.id)} touches {show(region)}, but there is no such buffer", (task.id,), (region,))
        if not 0 <= region.begin < region.end <= buffer.columns:
            return Fault("region", f"{proof.name(task.id)} touches {show(region)}, but the buffer has columns 0:{buffer.columns}",
                         (task.id,), (region,))
    return None


def _queues(proof: _Proof) -> Fault | None:
    graph = proof.graph
    if graph.num_workers < 1 or len(graph.queues) != graph.num_workers:
        return Fault("queue", f"{len(graph.queues)} queues for {graph.num_workers} workers")
    place = [-1] * len(graph.tasks)
    for worker, queue in enumerate(graph.queues):
        for t in queue:
            if not 0 <= t < len(place):
                return Fault("queue", f"queue {worker} holds task {t}, but the graph has {len(place)} tasks", (t,))
            if place[t] >= 0:
                return Fault("queue", f"{proof.name(t)} stands in queue {place[t]} and again in queue {worker}", (t,))
            place[t] = worker
            if graph.tasks[t].worker != worker:
                return Fault("queue", f"{proof.name(t)} stands in queue {worker}", (t,))
    if -1 in place:
        t = place.index(-1)
        return Fault("queue", f"{proof.name(t)} stands in no queue and would never run", (t,))
    return None


def _events(proof: _Proof) -> Fault | None:
    graph = proof.graph
    signalled: list[list[int]] = [[] for _ in graph.events]
    for task in graph.tasks:
        for e in (*task.waits, *task.signals):
            if not 0 <= e < len(graph.events):
                return Fault("event", f"{proof.name(task.id)} uses event {e}, but the graph has {len(graph.events)} events", (task.id,), (), (e,))
        for e in task.signals:
            signalled[e].append(task.id)
    for i, event in enumerate(graph.events):
        if event.id != i:
            return Fault("event", f"event {event.id} stands at place {i}", (), (), (i,))
        if sorted(event.producers) != signalled[i]:
            return _wrong_producers(proof, i, signalled[i])
        if len(set(signalled[i])) < len(signalled[i]):
            t = next(t for t, n in Counter(signalled[i]).items() if n > 1)
            return Fault("signal", f"doubled signal: {proof.name(t)} signals event {i} more than once", (t,), (), (i,))
        if event.threshold < 1:
            return Fault("threshold", f"event {i} has threshold {event.threshold}, so waiting for it waits for nothing",
                         event.producers, (), (i,))
        if event.threshold > len(signalled[i]):
            return Fault("threshold", f"unreachable threshold: event {i} needs {event.threshold} signals a step, but {len(signalled[i])} "
                         f"tasks signal it{_some(proof, signalled[i])}", event.producers, (), (i,))
    return _carried_events(proof)


def _carried_events(proof: _Proof) -> Fault | None:
    """Who waits for an event that data carries reads flagged data of every producer."""
    graph = proof.graph
    writes = {e.id: [[r for r in graph.tasks[p].writes if graph.buffers[r.buffer].says_itself] for p in e.producers] for e in graph.events if e.carried}
    unread: dict[tuple[int, tuple[Region, ...]], int | None] = {}  # tasks share regions
    for event in (graph.events[e] for e in writes):
        if event.id == STEP_EVENT or event.threshold != len(event.producers):
            return Fault("carried", f"event {event.id} is said to be carried by data, which is all its producers have written or nothing, but its "
                         f"threshold is {event.threshold} of {len(event.producers)}", event.producers, (), (event.id,))
    for task in graph.tasks:
        for e in task.waits:
            if e not in writes:
                continue
            key = (e, task.reads)
            if key not in unread:
                unread[key] = next((i for i, regions in enumerate(writes[e]) if not any(w.overlaps(r) for w in regions for r in task.reads)), None)
            place = unread[key]
            if place is not None:
                producer = graph.events[e].producers[place]
                return Fault("carried", f"event {e} is said to be carried by data, but {proof.name(task.id)}, which waits for it, reads no flagged "
                             f"data of {proof.name(producer)}", (producer, task.id), (), (e,))
    return None


def _wrong_producers(proof: _Proof, event: int, signalled: list[int]) -> Fault:
    listed, actual = Counter(proof.graph.events[event].producers), Counter(signalled)
    extra, absent = sorted((actual - listed).elements()), sorted((listed - actual).elements())
    known = [t for t in absent if 0 <= t < len(proof.graph.tasks)]
    if len(known) < len(absent):
        t = next(t for t in absent if t not in known)
        return Fault("signal", f"event {event} lists task {t} as producer, but there is no such task", (), (), (event,))
    if extra:
        double = "doubled signal: " if extra[0] in listed else ""
        return Fault("signal", f"{double}{proof.name(extra[0])} signals event {event} more often than the event lists it", (extra[0],), (), (event,))
    return Fault("signal", f"missing signal: event {event} lists {proof.name(absent[0])} as producer, which does not signal it", (absent[0],), (),
                 (event,))


def _some(proof: _Proof, tasks: list[int]) -> str:
    return f": {proof.name(tasks[0])}{', ...' if len(tasks) > 1 else ''}" if tasks else ""


def _operators(proof: _Proof) -> Fault | None:
    """Operators name values and weights that exist, and their kinds understand them."""
    tensors = proof.graph.tensor_graph
    for op in tensors.operators:
        if op.kind not in proof.kinds:
            return Fault("kind", f"operator {op.name} is of kind {op.kind}, which no task kind implements")
        for name in (*op.inputs, *op.outputs):
            if name not in tensors.values:
                return Fault("kind", f"operator {op.name} names value {name}, which the graph does not have")
        for name in (n for names in op.weights.values() for n in names):
            if name not in tensors.weights:
                return Fault("kind", f"operator {op.name} names weight {name}, which the graph does not have")
        kind = proof.kinds[op.kind]
        try:
            tiles = kind.tiles(op, tensors)
            kind.reads(op, tensors, 0, tiles), kind.writes(op, tensors, 0, tiles), kind.buffers(op, tensors)
            kind.packed_bytes(op, tensors, proof.graph.dtype), kind.packed_key(op), kind.scratch_bytes(op, tensors, proof.graph.max_rows)
        except (LookupError, ArithmeticError, TypeError, ValueError) as error:
            return Fault("kind", f"operator {op.name} is not what task kind {op.kind} takes ({type(error).__name__}: {error})")
    return None


def _kinds(proof: _Proof) -> Fault | None:
    """Tasks are what their operators and task kinds say, and every tile of every operator is computed once."""
    graph, tensors = proof.graph, proof.graph.tensor_graph
    next_tile = [0] * len(tensors.operators)
    reached = 0
    for task in graph.tasks:
        op = tensors.operators[task.op]
        if task.kind != op.kind:
            return Fault("kind", f"{proof.name(task.id)} is of kind {task.kind}, its operator of kind {op.kind}", (task.id,))
        if task.op < reached:
            return Fault("kind", f"{proof.name(task.id)} stands behind tasks of operator {tensors.operators[reached].name}, "
                         "against the order of the operators", (task.id,))
        reached = task.op
        if task.tile_begin != next_tile[task.op] or task.tile_end <= task.tile_begin:
            return Fault("tiles", f"{proof.name(task.id)}: expected a range of tiles that starts at {next_tile[task.op]}", (task.id,))
        next_tile[task.op] = task.tile_end
        kind = proof.kinds[op.kind]
        for verb, said, found in (("reads", kind.reads(op, tensors, task.tile_begin, task.tile_end), task.reads),
                                  ("writes", kind.writes(op, tensors, task.tile_begin, task.tile_end), task.writes)):
            if tuple(said) != found:
                return Fault("region", f"{proof.name(task.id)} {verb} {_list(said)}, but the graph says {_list(found)}", (task.id,),
                             (*said, *found))
    for op, end in zip(tensors.operators, next_tile, strict=True):
        tiles = proof.kinds[op.kind].tiles(op, tensors)
        if end != tiles:
            return Fault("tiles", f"operator {op.name} ({op.kind}) has {tiles} tiles, but its tasks compute {end}")
    return None


def _list(regions: Sequence[Region]) -> str:
    return ", ".join(show(r) for r in regions) or "nothing"


# ---- order
def _deadlock(proof: _Proof) -> Fault | None:
    """No cycle through queues and events."""
    try:
        proof.executed  # noqa: B018 - made on first use
    except OrderError as error:
        return Fault(error.kind, str(error), error.tasks, (), error.events)
    return None


def _step(proof: _Proof) -> Fault | None:
    """Steps follow each other: all tasks after the step event, all before `advance`, which alone signals it."""
    graph, order, advance = proof.graph, proof.visible, proof.advance
    if advance is None:
        return Fault("step", "no task of kind advance, so no step would ever follow")
    if not graph.events:
        return Fault("step", f"event {STEP_EVENT}, the step event, is missing", (advance.id,), (), (STEP_EVENT,))
    event = graph.events[STEP_EVENT]
    if event.producers != (advance.id,) or event.threshold != 1:
        return Fault("step", f"event {STEP_EVENT}, the step event, must be signalled once by {proof.name(advance.id)} alone, but its producers "
                     f"are {list(event.producers)} and its threshold {event.threshold}", event.producers, (), (STEP_EVENT,))
    early = ~_after_step_event(graph, order)
    if early.any():
        t = int(order.topological[early[order.topological]][0])
        return Fault("step", f"missing step wait: {proof.name(t)} does not wait for event {STEP_EVENT}, neither itself nor through what it "
                     "waits for, so it could start before the step before is over", (t,), (), (STEP_EVENT,))
    late = ~_closed(graph, order, advance)
    late[advance.id] = False
    if late.any():
        t = int(order.topological[late[order.topological]][-1])
        if proof.executed.happens_before(t, advance.id):
            why = " by counters, so the next step might not see what it wrote"
        else:
            why = ", so the next step could start before this one is over"
        return Fault("step", f"step not closed: {proof.name(advance.id)} does not wait for {proof.name(t)}{why}",
                     (t, advance.id), (), (STEP_EVENT,))
    return _ephemeral(proof)


def _closed(graph: SMTaskGraph, order: Order, advance: Task) -> np.ndarray:
    """bool [tasks]: which tasks are over, with what they wrote, when `advance` ends.

    If it may do without what it reads (operators are `ephemeral`), only its queue and the last of its events count, and tasks of such
    operators need not be over in this sense.
    """
    ephemeral = np.array([bool(graph.operator(t).attrs.get("ephemeral")) for t in graph.tasks])
    if not ephemeral.any():
        return order.after_everything(advance.id)
    closing = next((e for e in reversed(advance.waits) if not graph.events[e].carried and e != STEP_EVENT), None)
    if closing is None or graph.events[closing].threshold != len(graph.events[closing].producers):
        return ephemeral
    producers = np.array(graph.events[closing].producers, np.intp)
    known = order.clock[producers].max(axis=0)
    np.maximum.at(known, order.worker[producers], order.index[producers])
    known[order.worker[advance.id]] = order.index[advance.id]
    return ephemeral | (known[order.worker] >= order.index)


def _ephemeral(proof: _Proof) -> Fault | None:
    """Tasks of ephemeral operators write nothing that lasts: activations with bytes of their own, each step in the same place."""
    graph = proof.graph
    for task in graph.tasks:
        if not graph.operator(task).attrs.get("ephemeral"):
            continue
        for region in task.writes:
            if graph.buffers[region.buffer].kind != "activation":
                return Fault("step", f"{proof.name(task.id)} is of an ephemeral operator, but {show(region)} lasts beyond the step", (task.id,), (region,))
            place = graph.arena.get(region.buffer)
            shares = next((n for n, p in graph.arena.items() if place is not None and n != region.buffer and p.size and place.size
                           and p.offset < place.offset + place.size and place.offset < p.offset + p.size), None)
            if shares is not None:
                return Fault("step", f"{proof.name(task.id)} is of an ephemeral operator, but {region.buffer} shares bytes with {shares}", (task.id,), (region,))
    return None


def _after_step_event(graph: SMTaskGraph, order: Order) -> np.ndarray:
    """bool [tasks]: which tasks wait for the step event, themselves or through a task that happens before them."""
    first = np.full(order.clock.shape[1], np.iinfo(np.int32).max, np.int32)
    waits = np.array([STEP_EVENT in t.waits for t in graph.tasks])
    np.minimum.at(first, order.worker[waits], order.index[waits])
    return waits | (order.clock >= first).any(axis=1)


def _accesses(proof: _Proof) -> Fault | None:
    return find_hazard(proof.graph, proof.visible, proof.executed)


def _peers(proof: _Proof) -> Fault | None:
    """Peer memory: places for what is sent, apart from each other; ranks overwrite nothing that is still to be read."""
    graph = proof.graph
    for name in (b.name for b in graph.buffers.values() if b.kind == "peer"):
        place, needed = graph.peers.get(name), buffer_bytes(graph, graph.buffers[name])
        if place is None:
            return Fault("memory", f"{name} has no place in peer memory")
        if place.size < needed or place.offset % ALIGNMENT or place.offset < 0 or place.offset + place.size > graph.peer_bytes:
            return Fault("memory", f"{name} lies at bytes {place.offset}:{place.offset + place.size} of peer memory; expected a multiple of {ALIGNMENT} "
                         f"and {needed} bytes within {graph.peer_bytes}")
        if graph.ranks < 2:
            return Fault("peer", f"{name} is shared among ranks, but the graph has {graph.ranks}")
    spans = sorted((p.offset, p.offset + p.size, name) for name, p in graph.peers.items())
    for (_, end, a), (begin, _, b) in pairwise(spans):
        if begin < end:
            return Fault("memory", f"{a} and {b} overlap in bytes {begin}:{end} of peer memory")
    return find_peer_fault(graph, proof.executed)


# ---- memory
def _memory(proof: _Proof) -> Fault | None:
    graph = proof.graph
    used = {r.buffer: t.id for t in reversed(graph.tasks) for r in (*t.reads, *t.writes)}
    for name, task in used.items():
        if graph.buffers[name].kind == "activation" and name not in graph.arena:
            return Fault("memory", f"{proof.name(task)} touches {name}, which has no place in the arena", (task,))
    for name, place in graph.arena.items():
        fault = _place(graph, name, place)
        if fault is not None:
            return fault
    return _separate_state(graph) or _flagged(graph) or _weights(proof)


def _place(graph: SMTaskGraph, name: str, place: Allocation) -> Fault | None:
    if name not in graph.buffers:
        return Fault("memory", f"the arena has a place for {name}, but there is no such buffer")
    whole = Region(name, 0, graph.buffers[name].columns)
    needed = buffer_bytes(graph, graph.buffers[name])
    if place.size < needed:
        return Fault("memory", f"{name} has {place.size} bytes in the arena, but its rows need {needed}", (), (whole,))
    if place.offset < 0 or place.offset + place.size > graph.arena_bytes:
        return Fault("memory", f"{name} lies at bytes {place.offset}:{place.offset + place.size}, but the arena has {graph.arena_bytes}",
                     (), (whole,))
    if place.offset % ALIGNMENT:
        return Fault("memory", f"{name} lies at byte {place.offset}, which is no multiple of {ALIGNMENT}", (), (whole,))
    return None


def _separate_state(graph: SMTaskGraph) -> Fault | None:
    """What lives across steps shares its bytes with nothing."""
    spans = sorted((p.offset, p.offset + p.size, name) for name, p in graph.arena.items())
    for i, (_, stop, name) in enumerate(spans):
        for other_begin, _, other in spans[i + 1:]:
            if other_begin >= stop:
                break
            if {graph.buffers[name].kind, graph.buffers[other].kind} != {"activation"}:
                return Fault("memory", f"{name} and {other} share bytes {other_begin}:{stop} of the arena, but one of them lives across steps")
    return None


def _flagged(graph: SMTaskGraph) -> Fault | None:
    """Flagged buffers have both copies to themselves."""
    begin, size = graph.flagged_begin, graph.flagged_bytes
    if begin < 0 or size < 0 or begin % ALIGNMENT or size % ALIGNMENT or begin + 2 * size > graph.arena_bytes:
        return Fault("memory", f"flagged buffers have twice {size} bytes from byte {begin} of the arena, expected multiples of {ALIGNMENT} within "
                     f"its {graph.arena_bytes}")
    last, last_end = "", begin
    for place, name in sorted((p, n) for n, p in graph.arena.items()):
        end = place.offset + place.size
        if graph.buffers[name].flagged:
            if place.offset < last_end or end > begin + size:
                what = f"shares bytes with {last}" if last and place.offset < last_end else "is not all in the first copy of flagged buffers"
                return Fault("memory", f"{name} is flagged and lies at bytes {place.offset}:{end}, but {what} (bytes {begin}:{begin + size})")
            last, last_end = name, end
        elif place.size and place.offset < begin + 2 * size and end > begin:
            return Fault("memory", f"{name} lies at bytes {place.offset}:{end}, but flagged buffers have bytes {begin}:{begin + 2 * size} to themselves")
    return None


def _weights(proof: _Proof) -> Fault | None:
    graph, tensors = proof.graph, proof.graph.tensor_graph
    spans: dict[str, tuple[int, int, str]] = {}
    for op in tensors.operators:
        kind = proof.kinds[op.kind]
        size = matrix_bytes(kind, op, graph)
        if not size:
            continue
        key = matrix_key(kind, op, graph)
        if key not in graph.weight_offsets:
            return Fault("weights", f"the packed matrix of operator {op.name} ({key}) has no place")
        begin = graph.weight_offsets[key]
        if begin < 0 or begin % ALIGNMENT or begin + size > graph.weight_bytes:
            return Fault("weights", f"the packed matrix of operator {op.name} ({key}) lies at bytes {begin}:{begin + size}; expected a multiple of "
                         f"{ALIGNMENT} within {graph.weight_bytes}")
        spans[key] = max(spans.get(key, (begin, begin, op.name)), (begin, begin + size, op.name))
    ordered = sorted(spans.values())
    for (_, end, a), (begin, _, b) in pairwise(ordered):
        if begin < end:
            return Fault("weights", f"the packed matrices of operators {a} and {b} overlap in bytes {begin}:{end}")
    return None


def _limits(proof: _Proof) -> Fault | None:
    graph, limits = proof.graph, proof.graph.limits
    if limits is None:
        return None
    for what, needed, available in (("workers", graph.num_workers, limits.workers), ("events", len(graph.events), limits.events),
                                    ("bytes of arena", graph.arena_bytes, limits.arena_bytes)):
        if needed > available:
            return Fault("limits", f"the graph needs {needed} {what}, but target {graph.target} has {available}")
    for op in graph.tensor_graph.operators:
        needed = proof.kinds[op.kind].scratch_bytes(op, graph.tensor_graph, graph.max_rows)
        if needed > limits.scratch_bytes:
            return Fault("limits", f"operator {op.name} needs {needed} bytes of scratch memory, but a worker of target {graph.target} has "
                         f"{limits.scratch_bytes}")
    return None


CHECKS: Mapping[str, Callable[[_Proof], Fault | None]] = {
    "structure": _structure,
    "operators": _operators,
    "kinds": _kinds,
    "events": _events,
    "deadlock": _deadlock,
    "step": _step,
    "memory": _memory,
    "limits": _limits,
    "accesses": _accesses,
    "peers": _peers,
}
