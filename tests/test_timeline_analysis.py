"""Numbers that pictures and `mpk trace` print, on timelines small enough to work out by hand, and traces turned into timelines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpk.errors import InternalError
from mpk.graph.sm_task_graph import Buffer, Region, SMTaskGraph
from mpk.simulate import analysis
from mpk.simulate.measured import measured
from mpk.simulate.timeline import CONSUMER, LOADER, RUN, SPAN, WAIT_EVENT, WAIT_PEER, WAIT_STEP, WAIT_WEIGHTS, Timeline
from tests.support.timelines import layered_graph, list_schedule

RAW = np.dtype([("task", np.int32), ("phase", np.int32), ("begin_ns", np.int64), ("end_ns", np.int64)])


def timeline(graph: SMTaskGraph, rows: list[tuple[int, ...]], steps: int = 1, devices: int = 1) -> Timeline:
    return Timeline(graph, np.array(rows, SPAN), "simulated", graph.num_workers, devices, steps)


def two_workers() -> tuple[SMTaskGraph, dict[str, tuple[int, int]]]:
    """A graph of one layer on two workers, and the two tasks of each operator."""
    graph = layered_graph(2, 1)
    return graph, {op.name: (2 * i, 2 * i + 1) for i, op in enumerate(graph.tensor_graph.operators)}


def test_time_by_operator_is_per_worker_and_rates_are_per_device_while_it_runs() -> None:
    graph, tasks = two_workers()
    a, b = tasks["l0.qkv"]
    rows = per = analysis.per_operator(timeline(graph, [
        (0, 0, CONSUMER, WAIT_EVENT, a, 0, 500, 0), (0, 0, CONSUMER, RUN, a, 500, 2500, 0), (0, 0, LOADER, RUN, a, 0, 2000, 40_000),
        (0, 1, CONSUMER, RUN, b, 1500, 4500, 0), (0, 1, CONSUMER, WAIT_STEP, b, 4500, 4900, 0)]))
    assert [r.name for r in rows] == ["qkv"]
    row = per[0]
    assert (row.kind, row.tasks, row.bytes) == ("linear", 2, 80_000)
    assert row.run_us == row.task_us == pytest.approx(2.5) and row.before_us == pytest.approx(0.45) and row.wait_us == {WAIT_EVENT: 0.25, WAIT_STEP: pytest.approx(0.2)}
    assert row.active_us == pytest.approx(4.0)  # from 500 to 4500: not the 2.5 us of the mean worker
    assert row.gb_s == pytest.approx(20.0)


def test_waits_for_weights_belong_to_the_task_that_needs_them() -> None:
    graph, tasks = two_workers()
    a, b = tasks["l0.gate_up"]
    told_apart = timeline(graph, [(0, 0, CONSUMER, WAIT_EVENT, a, 0, 100, 0), (0, 0, CONSUMER, WAIT_WEIGHTS, a, 100, 700, 0), (0, 0, CONSUMER, RUN, a, 700, 1000, 0),
                                  (0, 1, CONSUMER, WAIT_EVENT, b, 0, 100, 0), (0, 1, CONSUMER, RUN, b, 100, 300, 0)])
    as_traced = timeline(graph, [(0, 0, CONSUMER, WAIT_EVENT, a, 0, 100, 0), (0, 0, CONSUMER, RUN, a, 100, 1000, 0),
                                 (0, 1, CONSUMER, WAIT_EVENT, b, 0, 100, 0), (0, 1, CONSUMER, RUN, b, 100, 300, 0)])
    x, y = analysis.per_operator(told_apart)[0], analysis.per_operator(as_traced)[0]
    assert (x.task_us, x.active_us, x.gb_s, x.before_us) == (y.task_us, y.active_us, y.gb_s, y.before_us) == pytest.approx((0.55, 0.9, 488.9, 0.1), rel=1e-3)
    assert x.run_us == pytest.approx(0.25) and y.run_us == pytest.approx(0.55)
    assert analysis.in_tasks(told_apart) == analysis.in_tasks(as_traced) == pytest.approx(0.55)
    assert analysis.knows_waits_inside(told_apart) and not analysis.knows_waits_inside(as_traced)


def test_figures_are_of_one_step_and_one_device() -> None:
    graph, tasks = two_workers()
    a = tasks["l0.down"][0]
    once = [(0, 0, CONSUMER, RUN, a, 0, 1000, 0)]
    twice = [(d, 0, CONSUMER, RUN, a, begin, begin + 1000, 0) for d in (0, 1) for begin in (0, 5000)]
    one, four = analysis.per_operator(timeline(graph, once))[0], analysis.per_operator(timeline(graph, twice, steps=2, devices=2))[0]
    assert (four.run_us, four.active_us, four.bytes, four.gb_s) == (one.run_us, one.active_us, one.bytes, one.gb_s)


def test_alike_devices_of_which_one_is_shown_count_once() -> None:
    graph, tasks = two_workers()
    rows = [(0, w, CONSUMER, RUN, tasks["l0.down"][w], 0, 1000, 0) for w in (0, 1)]
    alone, of_eight = timeline(graph, rows), timeline(graph, rows, devices=8)
    assert analysis.utilisation(of_eight) == analysis.utilisation(alone) == 1.0
    assert analysis.per_operator(of_eight) == analysis.per_operator(alone)
    assert analysis.bytes_per_step(of_eight) == analysis.bytes_per_step(alone) == (220_000, 0)


def test_shares_of_time_add_up_with_what_no_span_covers() -> None:
    graph, tasks = two_workers()
    a, b = tasks["l0.o"]
    t = timeline(graph, [(0, 0, CONSUMER, RUN, a, 0, 600, 0), (0, 0, CONSUMER, WAIT_WEIGHTS, a, 600, 1000, 0), (0, 0, LOADER, RUN, a, 0, 900, 5),
                         (0, 1, CONSUMER, WAIT_EVENT, b, 0, 500, 0)])
    shares = analysis.shares(t)
    assert shares == {"run": 0.3, "wait for an event": 0.25, "wait for weights": 0.2, "wait for the step": 0.0, "wait for a peer": 0.0, "no span": 0.25}
    assert analysis.utilisation(t) == 0.3


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 400), st.integers(0, 1000)), min_size=1, max_size=20), st.integers(1, 40))
def test_binning_agrees_with_adding_up_interval_by_interval(spans: list[tuple[int, int, int]], bins: int) -> None:
    begin, length, amount = (np.array(c) for c in zip(*spans, strict=True))
    edges = np.linspace(0, 1300, bins + 1)
    expected = np.zeros(bins)
    for b, n, a in spans:
        for i in range(bins):
            expected[i] += a * max(0.0, min(edges[i + 1], b + n) - max(edges[i], b)) / n
    np.testing.assert_allclose(analysis.binned(begin, begin + length, amount.astype(float), edges), expected, atol=1e-6)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_covered_time_is_that_of_a_marked_ruler(spans: list[tuple[int, int]]) -> None:
    ruler = np.zeros(100, bool)
    for begin, length in spans:
        ruler[begin : begin + length] = True
    begin, length = np.array([s[0] for s in spans], int), np.array([s[1] for s in spans], int)
    assert analysis.covered_ns(begin, begin + length) == ruler.sum()


def test_bandwidth_over_time_comes_from_loads_or_else_from_the_weights_of_running_tasks() -> None:
    graph, tasks = two_workers()
    a = tasks["l0.gate_up"][0]
    runs = [(0, 0, CONSUMER, RUN, a, 500, 800, 0), (0, 0, CONSUMER, WAIT_WEIGHTS, a, 800, 900, 0), (0, 0, CONSUMER, RUN, a, 900, 1000, 0)]
    loaded = timeline(graph, [*runs, (0, 0, LOADER, RUN, a, 0, 500, 3000)])
    _, busy, rate = analysis.series(loaded, 2)
    assert busy.tolist() == [0.0, pytest.approx(0.4)] and rate.tolist() == [pytest.approx(6e9), 0.0]
    assert analysis.traffic(loaded)[1] == analysis.LOADS
    moved, source = analysis.traffic(timeline(graph, runs))
    assert source == analysis.WEIGHTS_OF_TASKS and moved.tolist() == [110_000, 0, 110_000]  # the task's 220,000 on both pieces of its run


def test_a_wait_names_the_producer_that_ended_last_in_its_own_step() -> None:
    graph = layered_graph(3, 2)
    t = list_schedule(graph, steps=3, seed=4)
    causes = analysis.waited_for(t)
    spans = t.spans
    waits = np.flatnonzero(spans["phase"] == WAIT_EVENT)
    assert len(waits) > 60 and (causes[spans["phase"] != WAIT_EVENT] == -1).all()
    runs = spans[(spans["phase"] == RUN) & (spans["role"] == CONSUMER)]
    for i in waits.tolist():
        producers = graph.events[graph.tasks[spans["task"][i]].waits[0]].producers
        done = runs[np.isin(runs["task"], producers) & (runs["end_ns"] <= spans["end_ns"][i])]
        assert causes[i] == done["task"][np.argmax(done["end_ns"])]


def raw(rows: list[tuple[int, int, int, int]]) -> np.ndarray:
    return np.array(rows, RAW)


def test_a_trace_becomes_a_timeline_of_the_chosen_steps() -> None:
    graph, tasks = two_workers()
    (e0, e1), (q0, q1), advance = tasks["embed"], tasks["l0.qkv"], tasks["advance"][0]
    base = 10**12  # a clock that began long ago

    def step(at: int, wait: int) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int, int, int]]]:
        return ([(e0, 1, at - wait, at), (e0, 0, at, at + 10), (q0, 1, at + 10, at + 30), (q0, 0, at + 30, at + 80), (advance, 0, at + 90, at + 100)],
                [(e1, 1, at - wait, at + 5), (e1, 0, at + 5, at + 20), (q1, 0, at + 20, at + 70)])

    parts = [step(base + 100 * n + (50 if n else 0), 60 if n else 10) for n in range(3)]
    trace = [raw([r for p in parts for r in p[w]]) for w in range(2)]
    t = measured(graph, trace, first=1, steps=2)
    assert (t.source, t.workers, t.steps, t.duration_ns) == ("measured", 2, 2, 250)
    assert analysis.step_ends(t).tolist() == [150, 250]
    first = t.spans[t.spans["worker"] == 0]
    assert first[["phase", "task", "begin_ns", "end_ns"]].tolist()[:4] == [
        (WAIT_STEP, e0, 0, 50), (RUN, e0, 50, 60), (WAIT_EVENT, q0, 60, 80), (RUN, q0, 80, 130)]  # the first wait is cut at the end of the step before
    assert (t.spans["role"] == CONSUMER).all() and (t.spans["device"] == 0).all()
    everything = measured(graph, trace)
    assert (everything.steps, everything.duration_ns, len(everything.spans)) == (3, 360, sum(map(len, trace)))
    planning = [np.concatenate([raw([(advance, 0, base - 40, base - 20)]), trace[0]]), trace[1]]  # ahead of the first step, as on GPUs
    assert measured(graph, planning, first=1, steps=2).spans.tolist() == t.spans.tolist()
    assert measured(graph, planning).steps == 3 and measured(graph, planning).duration_ns == 370
    late = [w.copy() for w in trace]  # a second device, whose clock is ahead by an hour
    for w in late:
        w["begin_ns"] += 3600 * 10**9
        w["end_ns"] += 3600 * 10**9
    both = measured(graph, [*trace, *late], first=1, steps=2, devices=2)
    assert both.devices == 2 and both.duration_ns == 250
    names = ["worker", "phase", "task", "begin_ns", "end_ns"]
    assert both.spans[both.spans["device"] == 1][names].tolist() == both.spans[both.spans["device"] == 0][names].tolist() == t.spans[names].tolist()
    with pytest.raises(InternalError, match="the trace holds 3 steps, expected 4"):
        measured(graph, trace, first=2, steps=2)
    with pytest.raises(InternalError, match="a trace of 2 workers, expected 2 on each of 2 devices"):
        measured(graph, trace, devices=2)


def test_a_first_task_that_waits_for_events_too_has_a_wait_of_each_cause() -> None:
    graph, tasks = two_workers()
    e0, advance = tasks["embed"][0], tasks["advance"][0]
    graph.tasks[e0].waits += (1,)
    one = raw([(e0, 1, 0, 10), (e0, 1, 10, 25), (e0, 0, 25, 30), (advance, 0, 30, 40), (e0, 1, 40, 50), (e0, 1, 50, 60), (e0, 0, 60, 70), (advance, 0, 70, 80)])
    t = measured(graph, [one, raw([])])
    assert t.spans["phase"].tolist() == [WAIT_STEP, WAIT_EVENT, RUN, RUN] * 2


def test_a_task_that_reads_what_devices_send_waits_for_a_peer() -> None:
    graph, tasks = two_workers()
    e0, q0, advance = tasks["embed"][0], tasks["l0.qkv"][0], tasks["advance"][0]
    graph.buffers["parts"] = Buffer("parts", 4, "tokens", "peer", 4)
    graph.tasks[q0].reads = (Region("parts", 0, 4),)
    one = raw([(e0, 1, 0, 10), (e0, 0, 10, 20), (q0, 1, 20, 50), (q0, 0, 50, 60), (advance, 0, 60, 70)])
    t = measured(graph, [one, raw([])])
    assert t.spans["phase"].tolist() == [WAIT_STEP, RUN, WAIT_PEER, RUN, RUN]
    assert analysis.per_operator(t)[1].task_us == pytest.approx(0.02)  # 40 ns by one of two workers
