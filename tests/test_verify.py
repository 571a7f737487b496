"""The verifier names each hazard: what is wrong, which tasks, regions and events, and refuses it as a `GraphError`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from mpk.errors import GraphError
from mpk.graph.hazards import Fault
from mpk.graph.order import Order, OrderError
from mpk.graph.sm_task_graph import Allocation, Buffer, Region, SMTaskGraph
from mpk.graph.tensor_graph import Operator, Value
from mpk.passes import verify
from mpk.passes.verify import CHECKS, find_fault
from tests.support.graphs import KINDS, random_graph, small_graph

DECLARED = tuple(c for c in CHECKS if c != "kinds")  # take the regions of the graph as they are


@pytest.fixture
def graph() -> SMTaskGraph:
    return small_graph()


def fault(graph: SMTaskGraph, checks: tuple[str, ...] | None = None) -> Fault:
    found = find_fault(graph, KINDS, checks)
    assert found is not None, "the graph was accepted"
    assert "\n" not in found.message
    return found


def drop_wait(graph: SMTaskGraph, task: int, event: int) -> None:
    graph.tasks[task].waits = tuple(e for e in graph.tasks[task].waits if e != event)


def test_valid_graph_is_accepted(graph: SMTaskGraph) -> None:
    assert find_fault(graph, KINDS) is None


@pytest.mark.parametrize("seed", range(0, 600, 100))
def test_random_valid_graphs_are_accepted(seed: int) -> None:
    for s in range(seed, seed + 100):
        assert find_fault(random_graph(s), KINDS) is None, f"seed {s}"


def test_run_raises_the_fault_as_one_line(graph: SMTaskGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "load_kinds", lambda: KINDS)
    assert verify.run(graph) is graph
    drop_wait(graph, 3, 1)
    with pytest.raises(GraphError, match=r"^read-after-write: task 3 \(mix 1:2, worker 1\) reads a\[0:12\]"):
        verify.run(graph)


# ---- data hazards
def test_read_after_write(graph: SMTaskGraph) -> None:
    drop_wait(graph, 3, 1)
    found = fault(graph)
    assert found.message == ("read-after-write: task 3 (mix 1:2, worker 1) reads a[0:12] after task 0 (fill 0:1, worker 0) writes a[0:6], "
                             "but nothing makes it wait for that")
    assert (found.kind, found.tasks, found.regions) == ("read-after-write", (0, 3), (Region("a", 0, 6), Region("a", 0, 12)))


def test_write_after_read(graph: SMTaskGraph) -> None:
    drop_wait(graph, 4, 2)
    assert fault(graph).message == ("write-after-read: task 4 (update 0:1, worker 0) writes a[0:6] after task 3 (mix 1:2, worker 1) reads a[0:12], "
                                    "but nothing makes it wait for that")


def test_write_after_a_read_between_two_partial_writes() -> None:
    """A reader of whole a between writes of its halves must still be waited for when the first half is written again."""
    graph = small_graph()
    graph.tasks = []
    half, other, whole = Region("a", 0, 6), Region("a", 6, 12), Region("a", 0, 12)
    for reads, writes, worker in (((), (whole,), 0), ((whole,), (), 0), ((), (half,), 0), ((whole,), (Region("d", 0, 12),), 0), ((), (other,), 0),
                                  ((), (half,), 1), ((), (), 0)):
        graph.add_task("columns", 0, (0, 1), reads, writes, worker=worker)
    graph.tasks[6].kind = "advance"
    graph.queues, graph.events = [[0, 1, 2, 3, 4, 6], [5]], []
    graph.add_event([6], [0])
    graph.add_event([2], [5])
    graph.add_event([5], [6])
    found = fault(graph, ("structure", "events", "deadlock", "step", "memory", "accesses"))
    assert (found.kind, found.tasks, found.regions) == ("write-after-read", (3, 5), (whole, half))


def test_write_after_write(graph: SMTaskGraph) -> None:
    graph.tasks[3].reads, graph.tasks[3].writes = (), (Region("a", 0, 6),)
    drop_wait(graph, 3, 1)
    assert fault(graph, DECLARED).message == ("write-after-write: task 3 (mix 1:2, worker 1) writes a[0:6] after task 0 (fill 0:1, worker 0) "
                                              "writes a[0:6], but nothing makes it wait for that")


def test_conflict_in_the_wrong_direction(graph: SMTaskGraph) -> None:
    graph.queues[0][1:3] = [4, 2]  # update before mix, on the same worker
    graph.tasks[4].waits = (1,)
    graph.tasks[4].reads = ()
    assert fault(graph, DECLARED).message == ("write-after-read: task 4 (update 0:1, worker 0) writes a[0:6] after task 2 (mix 0:1, worker 0) reads "
                                              "a[0:12], but the schedule runs them the other way round")


def test_arena_conflict(graph: SMTaskGraph) -> None:
    drop_wait(graph, 7, 3)  # c lies where b was; task 4 may still read b
    graph.tasks[7].reads = ()
    found = fault(graph, DECLARED)
    assert found.kind == "arena"
    assert found.message == ("arena: task 7 (use 1:2, worker 1) writes c[6:12] into the same bytes of the arena after task 4 (update 0:1, worker 0) "
                             "reads b[0:6], but nothing makes it wait for that")


def test_arena_clobber(graph: SMTaskGraph) -> None:
    graph.tasks[8].reads += (Region("b", 0, 12),)
    found = fault(graph, DECLARED)
    assert found.message == ("clobbered: task 8 (last 0:1, worker 0) reads b[0:12], but task 7 (use 1:2, worker 1) may write c[6:12] into the same "
                             "bytes of the arena before")
    assert (found.kind, found.tasks) == ("clobbered", (8, 7))


def test_task_that_overwrites_its_own_input(graph: SMTaskGraph) -> None:
    graph.arena["d"] = graph.arena["c"]
    assert fault(graph).message == ("arena: task 8 (last 0:1, worker 0) writes d[0:12] into the same bytes of the arena after task 8 (last 0:1, "
                                    "worker 0) reads c[0:12], all in one task")


def test_buffers_that_overlap_by_a_few_bytes(graph: SMTaskGraph) -> None:
    graph.arena["d"] = Allocation(64, 64)
    graph.arena["c"] = Allocation(128, 64)
    assert find_fault(graph, KINDS) is None
    graph.arena["c"] = Allocation(0, 64)
    assert fault(graph).kind in ("arena", "clobbered")


def test_read_of_what_nothing_wrote(graph: SMTaskGraph) -> None:
    graph.tasks[1].writes = (Region("a", 8, 12),)
    assert fault(graph, DECLARED).message == ("unwritten: task 2 (mix 0:1, worker 0) reads a[0:12], but no task before it writes a[6:8] "
                                              "in the same step")


def test_cache_may_be_read_before_it_is_written(graph: SMTaskGraph) -> None:
    graph.buffers["kv"] = Buffer("kv", 8, "positions", "cache", 4)
    graph.tasks[2].reads += (Region("kv", 0, 8),)
    graph.tasks[5].writes += (Region("kv", 0, 8),)
    assert find_fault(graph, KINDS, DECLARED) is None


# ---- steps
def test_missing_step_wait(graph: SMTaskGraph) -> None:
    drop_wait(graph, 1, 0)
    assert fault(graph).message == ("missing step wait: task 1 (fill 1:2, worker 1) does not wait for event 0, neither itself nor through what it "
                                    "waits for, so it could start before the step before is over")


def test_step_wait_through_another_task_is_enough(graph: SMTaskGraph) -> None:
    drop_wait(graph, 1, 0)
    graph.add_event([0], [1])
    assert find_fault(graph, KINDS) is None


def test_step_that_is_not_closed(graph: SMTaskGraph) -> None:
    graph.add_task("columns", 4, (1, 2), worker=0)
    graph.queues[0].append(10)
    found = fault(graph, DECLARED)
    assert found.message == ("step not closed: task 9 (advance 0:1, worker 1) does not wait for task 10 (last 1:2, worker 0), so the next step "
                             "could start before this one is over")


def test_step_event_signalled_by_another_task(graph: SMTaskGraph) -> None:
    graph.tasks[8].signals += (0,)
    graph.events[0].producers = (8, 9)
    assert "event 0, the step event, must be signalled once by task 9 (advance 0:1, worker 1) alone" in fault(graph).message


def test_no_advance(graph: SMTaskGraph) -> None:
    graph.tasks[9].kind = "columns"
    assert "no task of kind advance" in fault(graph, DECLARED).message


# ---- events
def test_cycle(graph: SMTaskGraph) -> None:
    graph.tasks[0].waits += (3,)
    found = fault(graph)
    assert found.kind == "cycle"
    assert re.fullmatch(r"cycle: task \d waits for event \d of task \d .*", found.message)
    assert found.tasks and set(found.events) <= {1, 2, 3}
    named = [int(t) for t in re.findall(r"task (\d+)", found.message)]
    assert named[0] == named[-1] and tuple(named[:-1]) == found.tasks


def test_cycle_through_a_queue(graph: SMTaskGraph) -> None:
    graph.queues[0][:2] = [2, 0]
    found = fault(graph)
    assert found.message == "cycle: task 2 waits for event 1 of task 0 stands in queue 0 behind task 2"
    assert (found.tasks, found.events) == ((2, 0), (1,))


def test_unreachable_threshold(graph: SMTaskGraph) -> None:
    graph.events[2].threshold = 3
    found = fault(graph)
    assert found.message == ("unreachable threshold: event 2 needs 3 signals a step, but 2 tasks signal it: task 2 (mix 0:1, worker 0), ...")
    assert (found.events, found.tasks) == ((2,), (2, 3))


def test_threshold_that_is_too_small_orders_nothing(graph: SMTaskGraph) -> None:
    graph.events[1].threshold = 1
    assert fault(graph).kind == "read-after-write"


def test_threshold_of_zero(graph: SMTaskGraph) -> None:
    graph.events[4].threshold = 0
    assert fault(graph).message == "event 4 has threshold 0, so waiting for it waits for nothing"


def test_doubled_signal(graph: SMTaskGraph) -> None:
    graph.tasks[2].signals += (2,)
    assert fault(graph).message == "doubled signal: task 2 (mix 0:1, worker 0) signals event 2 more often than the event lists it"
    graph.events[2].producers, graph.events[2].threshold = (2, 2, 3), 3
    assert fault(graph).message == "doubled signal: task 2 (mix 0:1, worker 0) signals event 2 more than once"


def test_missing_signal(graph: SMTaskGraph) -> None:
    graph.tasks[3].signals = ()
    assert fault(graph).message == "missing signal: event 2 lists task 3 (mix 1:2, worker 1) as producer, which does not signal it"


def test_event_that_does_not_exist(graph: SMTaskGraph) -> None:
    graph.tasks[3].waits += (17,)
    assert fault(graph).message == "task 3 (mix 1:2, worker 1) uses event 17, but the graph has 6 events"


def test_producer_that_does_not_exist(graph: SMTaskGraph) -> None:
    graph.events[2].producers = (2, 3, 99)
    assert fault(graph).message == "event 2 lists task 99 as producer, but there is no such task"


# ---- form
QUEUE_FAULTS: list[tuple[Callable[[SMTaskGraph], object], str]] = [
    (lambda g: g.queues[1].remove(5), "task 5 (update 1:2, worker 1) stands in no queue and would never run"),
    (lambda g: g.queues[0].append(5), "task 5 (update 1:2, worker 1) stands in queue 0"),
    (lambda g: g.queues[1].append(5), "task 5 (update 1:2, worker 1) stands in queue 1 and again in queue 1"),
    (lambda g: g.queues[1].append(77), "queue 1 holds task 77, but the graph has 10 tasks"),
    (lambda g: g.queues.append([]), "3 queues for 2 workers"),
]


@pytest.mark.parametrize(("damage", "message"), QUEUE_FAULTS)
def test_queues(graph: SMTaskGraph, damage: Callable[[SMTaskGraph], object], message: str) -> None:
    damage(graph)
    assert fault(graph).message == message


def test_region_outside_its_buffer(graph: SMTaskGraph) -> None:
    graph.tasks[2].reads = (Region("a", 0, 13),)
    assert fault(graph).message == "task 2 (mix 0:1, worker 0) touches a[0:13], but the buffer has columns 0:12"
    graph.tasks[2].reads = (Region("z", 0, 1),)
    assert fault(graph).message == "task 2 (mix 0:1, worker 0) touches z[0:1], but there is no such buffer"


def test_region_other_than_the_task_kind_says(graph: SMTaskGraph) -> None:
    graph.tasks[2].reads = (Region("a", 0, 6),)
    assert fault(graph).message == "task 2 (mix 0:1, worker 0) reads a[0:12], but the graph says a[0:6]"


def test_tile_computed_by_no_task(graph: SMTaskGraph) -> None:
    graph.tensor_graph.operators[3] = replace(graph.tensor_graph.operators[3], attrs={"tiles": 3, "whole0": True})
    graph.tasks[6].writes, graph.tasks[7].writes = (Region("c", 0, 4),), (Region("c", 4, 8),)
    assert fault(graph).message == "operator use (columns) has 3 tiles, but its tasks compute 2"


def test_tile_computed_twice(graph: SMTaskGraph) -> None:
    graph.tasks[7].tile_begin = 0
    assert fault(graph).message == "task 7 (use 0:2, worker 1): expected a range of tiles that starts at 1"


OPERATOR_FAULTS: list[tuple[dict[str, object], str]] = [
    ({"kind": "fancy"}, "operator last is of kind fancy, which no task kind implements"),
    ({"inputs": ("z",)}, "operator last names value z, which the graph does not have"),
    ({"weights": {"weight": ("w9",)}}, "operator last names weight w9, which the graph does not have"),
    ({"attrs": {"tiles": 1}}, "operator last is not what task kind columns takes (KeyError: 'whole0')"),
    ({"attrs": {"tiles": 0, "whole0": False}}, "operator last is not what task kind columns takes (ZeroDivisionError: integer division or modulo by zero)"),
    ({"kind": "advance"}, "task 8 (last 0:1, worker 0) is of kind columns, its operator of kind advance"),
]


@pytest.mark.parametrize(("changes", "message"), OPERATOR_FAULTS)
def test_operators(graph: SMTaskGraph, changes: dict[str, object], message: str) -> None:
    graph.tensor_graph.operators[4] = replace(graph.tensor_graph.operators[4], **changes)
    assert fault(graph).message == message


def test_tasks_against_the_order_of_operators(graph: SMTaskGraph) -> None:
    graph.tasks[6].op, graph.tasks[6].reads, graph.tasks[6].writes = 4, graph.tasks[8].reads, graph.tasks[8].writes
    assert fault(graph).message == "task 7 (use 1:2, worker 1) stands behind tasks of operator last, against the order of the operators"


# ---- memory
MEMORY_FAULTS: list[tuple[Callable[[SMTaskGraph], object], str]] = [
    (lambda g: g.arena.update(d=Allocation(128, 32)), "d has 32 bytes in the arena, but its rows need 48"),
    (lambda g: g.arena.update(d=Allocation(192, 64)), "d lies at bytes 192:256, but the arena has 192"),
    (lambda g: g.arena.update(d=Allocation(-64, 64)), "d lies at bytes -64:0, but the arena has 192"),
    (lambda g: g.arena.update(d=Allocation(132, 60)), "d lies at byte 132, which is no multiple of 64"),
    (lambda g: g.arena.pop("d"), "task 8 (last 0:1, worker 0) touches d, which has no place in the arena"),
    (lambda g: g.arena.update(z=Allocation(0, 64)), "the arena has a place for z, but there is no such buffer"),
    (lambda g: g.arena.update(step=Allocation(64, 64)), "b and step share bytes 64:128 of the arena, but one of them lives across steps"),
    (lambda g: g.weight_offsets.update(w1=64), "the packed matrices of operators fill and mix overlap in bytes 64:128"),
    (lambda g: g.weight_offsets.update(w1=192),
     "the packed matrix of operator mix (w1) lies at bytes 192:320; expected a multiple of 64 within 256"),
    (lambda g: g.weight_offsets.pop("w1"), "the packed matrix of operator mix (w1) has no place"),
]


@pytest.mark.parametrize(("damage", "message"), MEMORY_FAULTS)
def test_memory(graph: SMTaskGraph, damage: Callable[[SMTaskGraph], object], message: str) -> None:
    damage(graph)
    found = fault(graph)
    assert found.message == message
    assert found.kind in ("memory", "weights")


LIMITS: list[tuple[str, int, str]] = [
    ("workers", 1, "the graph needs 2 workers, but target synthetic has 1"),
    ("events", 5, "the graph needs 6 events, but target synthetic has 5"),
    ("arena_bytes", 191, "the graph needs 192 bytes of arena, but target synthetic has 191"),
    ("scratch_bytes", 127, "operator fill needs 128 bytes of scratch memory, but a worker of target synthetic has 127"),
]


@pytest.mark.parametrize(("name", "value", "message"), LIMITS)
def test_limits(graph: SMTaskGraph, name: str, value: int, message: str) -> None:
    assert graph.limits is not None
    graph.limits = replace(graph.limits, **{name: value})
    assert fault(graph).message == message


# ---- happens-before
def test_order_through_queues_and_events(graph: SMTaskGraph) -> None:
    order = Order(graph)
    assert order.happens_before(0, 3) and not order.happens_before(3, 0)
    assert order.concurrent(2, 3) and not order.concurrent(2, 2)
    assert order.clock[4].tolist() == [1, 1] and order.clock[0].tolist() == [-1, -1]
    assert order.happens_before_many([0, 2, 4], 5).tolist() == [True, True, False]
    assert order.all_before([0, 1], [2, 3]) and not order.all_before([2], [3, 4])
    assert order.minimal([0, 1, 2, 3]) == [2, 3]
    assert order.required(5, [2, 3]) == [] and order.required(4, [4, 5]) == [4, 5]
    assert order.after_everything(9).tolist() == [True] * 9 + [False]
    assert order.before_everything(8).tolist() == [False] * 9 + [True]


def test_order_by_dependencies_before_there_are_events(graph: SMTaskGraph) -> None:
    for task in graph.tasks:
        task.waits, task.signals = (), ()
    graph.events = []
    graph.dependencies = {3: [frozenset((0, 1))], 4: [frozenset((2, 3))]}
    assert not Order(graph).happens_before(0, 3)
    order = Order(graph, use_dependencies=True)
    assert order.happens_before(0, 3) and order.happens_before(3, 4) and not order.happens_before(2, 5)


def test_order_refuses_a_task_without_a_queue(graph: SMTaskGraph) -> None:
    graph.queues[0].remove(8)
    with pytest.raises(OrderError, match="task 8 stands in no queue"):
        Order(graph)


def wide_graph(layers: int, operators: int, workers: int) -> SMTaskGraph:
    """The size of a 70B model: every operator has one task a worker, reads all of the operator before and writes its share."""
    graph = small_graph()
    graph.tasks, graph.events, graph.arena, graph.limits = [], [], {}, None
    graph.num_workers = workers
    graph.queues = [[] for _ in range(workers)]
    graph.tensor_graph.operators = []
    graph.add_event([], [])
    before: list[int] = []
    for n in range(layers * operators):
        name = f"v{n}"
        graph.buffers[name] = Buffer(name, workers * 16, "tokens", "activation", 4)
        graph.arena[name] = Allocation((n % 3) * workers * 64, workers * 64)
        graph.tensor_graph.values[name] = Value(name, workers * 16)
        graph.tensor_graph.operators.append(Operator(name, "columns", (f"v{n - 1}",) if n else (), (name,), {},
                                                     {"tiles": workers, "whole0": True}))
        now = []
        for w in range(workers):
            reads = [Region(f"v{n - 1}", 0, workers * 16)] if n else []
            now.append(graph.add_task("columns", n, (w, w + 1), reads, [Region(name, w * 16, w * 16 + 16)], worker=w).id)
            graph.queues[w].append(now[-1])
        if before:
            graph.add_event(before, now)
        before = now
    graph.tensor_graph.operators.append(Operator("advance", "advance", (name, "step"), ("step",), {}, {"tiles": 1, "whole0": True}))
    last = graph.add_task("advance", layers * operators, (0, 1), [Region(name, 0, workers * 16)], [Region("step", 0, 1)], worker=0)
    graph.queues[0].append(last.id)
    graph.add_event(before, [last.id])
    graph.events[0].producers, graph.events[0].threshold, last.signals = (last.id,), 1, (0,)
    for queue in graph.queues:
        graph.tasks[queue[0]].waits += (0,)
    graph.arena_bytes = 3 * workers * 64
    return graph


def test_a_graph_of_63_000_tasks_is_verified_in_seconds() -> None:
    graph = wide_graph(80, 6, 132)
    begin = time.perf_counter()
    assert find_fault(graph, KINDS) is None
    assert time.perf_counter() - begin < 20  # about 3 s on one core; loose, because machines that run tests are busy
    drop_wait(graph, 40_000, graph.tasks[40_000].waits[0])
    assert fault(graph).tasks[1] == 40_000
