"""Graphs with flagged buffers: what data carries orders its readers and nothing else, and the proof must not take it for more."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from mpk.compiler import Compiler
from mpk.graph.order import Order
from mpk.graph.sm_task_graph import Allocation, SMTaskGraph, Task
from mpk.passes.verify import find_fault
from tests.support.models import tiny_model
from tests.support.mutations import copy_graph, without_producer


@cache
def lowered(workers: int = 7) -> SMTaskGraph:
    return Compiler("h200", max_rows=4, max_batch=2, workers=workers).lower_model(tiny_model("qwen3", num_hidden_layers=2))


def conflicts_on_plain_memory(a: Task, b: Task, graph: SMTaskGraph) -> bool:
    pairs = [(x, y) for x in a.writes for y in (*b.reads, *b.writes)] + [(x, y) for x in a.reads for y in b.writes]
    return any(x.overlaps(y) and not graph.buffers[x.buffer].flagged for x, y in pairs)


def lasting(graph: SMTaskGraph) -> set[int]:
    """Tasks before `advance` whose results a later step may read."""
    return {t.id for t in graph.tasks[:-1] if not graph.operator(t).attrs.get("ephemeral")}


def seen(graph: SMTaskGraph) -> tuple[dict[int, set[int]], set[int]]:
    """Task -> earlier tasks whose writes it surely sees, through queues and counters, by walking them; and what the next step sees.

    Optional tasks may not have waited, as far as others know; `advance` may have waited for its last event only.
    """
    out: dict[int, set[int]] = {}
    told: dict[int, set[int]] = {}  # what follows from the end of a task, itself included
    previous = {b: a for queue in graph.queues for a, b in pairwise(queue)}
    for task in graph.tasks:  # an order that queues and events respect
        before = told[previous[task.id]] if task.id in previous else set()
        waits = [e for e in task.waits if e and not graph.events[e].carried]
        awaited = [set[int]().union(*(told[p] for p in graph.events[e].producers)) for e in waits]
        out[task.id] = before.union(*awaited)
        told[task.id] = {task.id} | (before if graph.operator(task).attrs.get("optional") else out[task.id])
    return out, before | awaited[-1]


def test_a_lowered_graph_has_data_that_carries_and_is_proven_right() -> None:
    graph = lowered()
    assert find_fault(graph) is None
    flagged = {name for name, b in graph.buffers.items() if b.flagged}
    assert {"x", "rope", "l0.x1", "l0.x2", "l1.qkv", "l1.attn", "l0.mlp"} <= flagged and not flagged & {"logits", "step", "l0.kv"}
    executed, visible = Order(graph), Order(graph, carried=False)
    down, up = (next(t.id for t in graph.tasks if graph.operator(t).name == f"l0.{name}") for name in ("down", "gate_up"))
    assert executed.happens_before(up, down) and not visible.happens_before(graph.queues[graph.tasks[down].worker - 1][2], down)


def test_counters_alone_close_a_step_and_order_plain_memory() -> None:
    graph = lowered()
    earlier, closed = seen(graph)
    assert lasting(graph) <= closed
    for b in graph.tasks:
        for a in graph.tasks[: b.id]:
            assert a.id in earlier[b.id] or not conflicts_on_plain_memory(a, b, graph)


def test_each_producer_of_a_counter_left_out_in_turn() -> None:
    """The proof must agree with a look at all pairs of tasks: plain memory and the end of the step need counters."""
    graph = lowered(12)
    tried = harmful = 0
    for event in graph.events:
        if event.carried or event.id == 0:
            continue
        for producer in event.producers:
            mutant = without_producer(graph, event.id, producer)
            earlier, closed = seen(mutant)
            harm = not lasting(graph) <= closed or any(
                a.id not in earlier[b.id] and conflicts_on_plain_memory(a, b, mutant) for b in mutant.tasks for a in mutant.tasks[: b.id])
            fault = find_fault(mutant)
            assert (fault is not None) == harm, f"event {event.id} without task {producer}"
            tried, harmful = tried + 1, harmful + harm
    assert tried > 10 and harmful > 5


def no_longer_flagged(graph: SMTaskGraph) -> None:
    """A buffer of plain memory whose readers have nothing but what data carried."""
    graph.buffers["l0.mlp"] = replace(graph.buffers["l0.mlp"], flagged=False)
    graph.arena["l0.mlp"] = Allocation(graph.arena_bytes, graph.arena["l0.mlp"].size)
    graph.arena_bytes += graph.arena["l0.mlp"].size


def shares_bytes(graph: SMTaskGraph) -> None:
    graph.arena["l0.mlp"] = Allocation(graph.arena["l0.qkv"].offset, graph.arena["l0.mlp"].size)


def in_the_second_copy(graph: SMTaskGraph) -> None:
    graph.arena["logits"] = Allocation(graph.flagged_begin + graph.flagged_bytes, graph.arena["logits"].size)


def second_copy_beyond_the_arena(graph: SMTaskGraph) -> None:
    graph.arena_bytes -= 64


def counter_said_to_be_carried(graph: SMTaskGraph) -> None:
    event = next(e for e in graph.events if not e.carried and e.id and graph.tasks[e.producers[0]].kind == "head")
    graph.events[event.id].carried = True


def step_event_said_to_be_carried(graph: SMTaskGraph) -> None:
    graph.events[0].carried = True


def carried_for_a_task_that_reads_other_data(graph: SMTaskGraph) -> None:
    a, b = (next(t for t in graph.tasks if graph.operator(t).name == f"l1.{name}") for name in ("o", "down"))
    b.waits += tuple(e for e in a.waits if graph.events[e].carried)


def half_a_threshold(graph: SMTaskGraph) -> None:
    event = next(e for e in graph.events if e.carried and len(e.producers) > 1)
    event.threshold -= 1


def reader_before_its_writer(graph: SMTaskGraph) -> None:
    """Both in one queue: the reader would poll for ever."""
    names = {t.id: graph.operator(t).name for t in graph.tasks}
    queue = next(q for q in graph.queues if {"l0.gate_up", "l0.down"} <= {names[t] for t in q})
    i, j = (next(i for i, t in enumerate(queue) if names[t] == n) for n in ("l0.gate_up", "l0.down"))
    queue[i], queue[j] = queue[j], queue[i]


def written_twice(graph: SMTaskGraph) -> None:
    a, b = [t for t in graph.tasks if graph.operator(t).name == "l0.gate_up"][:2]
    b.writes = a.writes


DAMAGES: list[tuple[Callable[[SMTaskGraph], None], str]] = [
    (no_longer_flagged, "reads no flagged data of"), (shares_bytes, "shares bytes with"),
    (in_the_second_copy, "flagged buffers have bytes .* to themselves"), (second_copy_beyond_the_arena, "within its"),
    (counter_said_to_be_carried, "reads no flagged data of"), (step_event_said_to_be_carried, "event 0 is said to be carried by data"),
    (carried_for_a_task_that_reads_other_data, "reads no flagged data of"), (half_a_threshold, "its threshold is"), (reader_before_its_writer, "cycle"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=lambda v: v.__name__ if callable(v) else "")
def test_damages_are_refused(damage: Callable[[SMTaskGraph], None], message: str) -> None:
    graph = copy_graph(lowered())
    graph.buffers = dict(graph.buffers)
    damage(graph)
    graph.limits = None
    fault = find_fault(graph)
    assert fault is not None
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(fault.message)


def test_a_block_whose_last_task_signals_no_counter_is_refused() -> None:
    """All data has been read when the step ends, but what the block cleared and wrote to the cache would not be visible in the next one."""
    graph = lowered(12)  # more blocks than the head has tiles
    flagged = [t for t in graph.tasks if all(graph.buffers[r.buffer].flagged for r in t.writes)]
    found = [(t, e) for t in flagged for e in t.signals if not graph.events[e].carried]
    assert found
    for task, event in found:
        fault = find_fault(without_producer(graph, event, task.id))
        assert fault is not None and fault.kind == "step" and fault.tasks[0] == task.id
        assert "by counters, so the next step might not see what it wrote" in fault.message


def test_plain_memory_behind_carried_events_is_refused_by_the_order_of_visibility() -> None:
    """Without the look at events: the data hazard itself is found."""
    graph = copy_graph(lowered())
    graph.buffers = dict(graph.buffers)
    no_longer_flagged(graph)
    fault = find_fault(graph, checks=("accesses",))
    assert fault is not None and fault.kind == "read-after-write" and "l0.mlp" in fault.message


def test_a_flagged_word_written_twice_in_a_step_is_refused() -> None:
    graph = copy_graph(lowered())
    written_twice(graph)
    fault = find_fault(graph, checks=("accesses",))
    assert fault is not None and fault.kind == "rewritten"


def test_a_carried_event_more_or_less_changes_no_proof_of_plain_memory() -> None:
    """Readers of flagged data wait for it, whatever the graph's events say; only the look at execution misses the edge."""
    graph, rng = lowered(), random.Random(3)
    for event in rng.sample([e for e in graph.events if e.carried], 20):
        mutant = copy_graph(graph)
        for task in mutant.tasks:
            task.waits = tuple(e for e in task.waits if e != event.id)
        fault = find_fault(mutant)
        assert fault is None or (fault.kind == "read-after-write" and all(graph.buffers[r.buffer].flagged for r in fault.regions))
