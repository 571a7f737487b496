"""The simulator against times worked out by hand, on graphs of a few tasks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mpk.compiler import Compiler
from mpk.errors import GraphError, RequestError
from mpk.frontend.source import LoadedModel
from mpk.graph.sm_task_graph import Buffer, Cost, Region, SMTaskGraph
from mpk.graph.tensor_graph import Operator, TensorGraph
from mpk.models import shapes
from mpk.models.config import DecoderConfig, first_layers
from mpk.simulate import simulate
from mpk.simulate.baseline import compare, kernel_per_operator, with_barriers
from mpk.simulate.machine import KindCost, LaunchCost, LinkCost, Machine, WorkerCost
from mpk.simulate.report import critical_path, idle, overlap, report, traffic
from mpk.simulate.simulator import Simulation
from mpk.simulate.timeline import CONSUMER, LINK, LOADER, RUN, WAIT_EVENT, WAIT_WEIGHTS
from mpk.simulate.work import Step
from mpk.targets import hardware

STAGE = 16384
CONFIG = DecoderConfig("tiles", 1, 8, 8, 1, 1, 1, 8, 1e-5, 1)
PLAIN = WorkerCost(event_us=0.0, port_gb_s=1e9)  # nothing costs anything but what a test says


def device(workers: int, worker: WorkerCost = PLAIN, *, bandwidth: float = 1000.0, stages: int = 10, flight: int = 4, idle_flight: int = 4,
           prefetch: int = 0, **cost: float) -> Machine:
    """A machine with a ring of `stages` stages, of which `flight` (`idle_flight`) may be on their way, and `prefetch` in the L2 behind them; every task costs `cost`."""
    target = hardware.load("h200").with_workers(workers)
    assert target.kernel is not None
    plan = replace(target.kernel, stages=stages, flight_bytes=flight * STAGE, flight_idle_bytes=idle_flight * STAGE, prefetch_bytes=prefetch * STAGE, prefetch_ns=1000)
    kinds = (KindCost("default", **cost), KindCost("advance"))  # type: ignore[arg-type]
    return Machine("test", replace(target, kernel=plan), bandwidth, worker, kinds, LaunchCost(graph_us=2.0, gap_us=2.0, eager_us=5.0), l2_mb=50.0)


def tasks(queues: list[list[tuple[int, tuple[int, ...]]]]) -> SMTaskGraph:
    """A graph: a queue a worker of (stages of weights, tasks waited for). Tasks are numbered queue by queue; all end in `advance` on worker 0."""
    tensors = TensorGraph(CONFIG, operators=[Operator("work", "tile", (), ()), Operator("advance", "advance", (), ())])
    graph = SMTaskGraph(tensors, "h200", len(queues), max_rows=1, queues=[[] for _ in queues])
    graph.buffers["x"] = Buffer("x", 1, "tokens", "activation", 2)
    for worker, queue in enumerate(queues):
        for stages, _ in queue:
            graph.queues[worker].append(graph.add_task("tile", 0, (0, 1), (), (), Cost(stages * STAGE), worker).id)
    advance = graph.add_task("advance", 1, (0, 1), worker=0)
    graph.queues[0].append(advance.id)
    graph.add_event((advance.id,), [q[0] for q in graph.queues if q])
    waits = [needed for queue in queues for _, needed in queue]
    for task, needed in enumerate(waits):
        if needed:
            graph.add_event(needed, (task,))
    graph.add_event(range(advance.id), (advance.id,))
    return graph


def ended(simulation: Simulation, task: int, step: int = 0) -> float:
    """Microseconds from the beginning to the end of a task."""
    return float(simulation.by_task("ended", step)[task]) / 1e6


def test_one_task_takes_its_bytes_over_the_bandwidth_and_its_fixed_cost() -> None:
    worker = replace(PLAIN, latency_us=0.7)
    s = simulate(tasks([[(100, ())]]), target=device(1, worker, start=0.3, end=0.5, stages=200, flight=200, idle_flight=200), steps=1)
    assert ended(s, 0) == pytest.approx(100 * STAGE / 1e6 + 0.7 + 0.5, abs=1e-3)  # the input of 0.3 us is fetched while weights come
    assert traffic(s).weights == 100 * STAGE


def test_independent_loads_share_the_bandwidth() -> None:
    alone = ended(simulate(tasks([[(500, ())]]), target=device(1), steps=1), 0)
    s = simulate(tasks([[(500, ())]] * 8), target=device(8), steps=1)
    ends = [ended(s, t) for t in range(8)]
    assert max(ends) == pytest.approx(8 * alone, rel=2e-2)  # those that end first already load the next step's stages
    assert min(ends) > 0.97 * max(ends)  # equal shares


def test_shares_differ_as_the_machine_says() -> None:
    worker = replace(PLAIN, shares=(0.5, 1.5))
    machine = device(8, worker)
    s = simulate(tasks([[(50, ())]] * 8), target=machine, steps=1)
    ends = np.array([ended(s, t) for t in range(8)])
    assert list(np.argsort(ends)) == list(np.argsort(machine.shares(8)))
    assert machine.shares(8).mean() == pytest.approx(1)


def test_a_worker_gets_no_more_than_its_port_lets_through() -> None:
    worker = replace(PLAIN, issue_us=0.1, port_gb_s=100.0)
    s = simulate(tasks([[(100, ())]]), target=device(1, worker, bandwidth=1e6), steps=1)
    assert ended(s, 0) == pytest.approx(99 * (0.1 + STAGE / 100e3), rel=1e-3)


def test_bytes_on_their_way_bound_the_rate() -> None:
    """Little's law: 2 stages in 1 us of latency, whatever the bandwidth."""
    worker = replace(PLAIN, latency_us=1.0)
    s = simulate(tasks([[(100, ())]]), target=device(1, worker, bandwidth=1e6, flight=2, idle_flight=2), steps=1)
    assert ended(s, 0) == pytest.approx(100 / 2 * 1.0, rel=1e-2)


def test_few_bytes_are_on_their_way_while_inputs_are_awaited() -> None:
    """With the gate closed one stage is on its way; the task opens it when its input is there."""
    worker = replace(PLAIN, latency_us=1.0)
    machine = device(1, worker, bandwidth=1e6, stages=16, flight=8, idle_flight=1, start=4.0)
    s = simulate(tasks([[(16, ())]]), target=machine, steps=1)
    loaded_before = 4  # one a microsecond
    assert ended(s, 0) == pytest.approx(4 + (16 - loaded_before) / 8, abs=1.1)
    slow = simulate(tasks([[(16, ())]]), target=replace(machine, target=replace(machine.target, kernel=replace(machine.target.kernel, flight_bytes=STAGE))), steps=1)  # type: ignore[type-var]
    assert ended(slow, 0) > 15


def test_a_full_ring_holds_the_loader_back() -> None:
    """Two tasks, the second waits long: only as many stages as the ring holds are loaded ahead."""
    machine = device(2, stages=4, end=50.0)
    s = simulate(tasks([[(1, ())], [(20, (0,))]]), target=machine, steps=1)
    begun = ended(s, 0)
    assert ended(s, 1) == pytest.approx(begun + 16 * STAGE / 1e6 + 50, abs=0.05)
    wide = simulate(tasks([[(1, ())], [(20, (0,))]]), target=device(2, stages=20, end=50.0), steps=1)
    assert ended(wide, 1) == pytest.approx(begun + 50, abs=0.05)


def test_a_chain_of_events_costs_a_hop_each() -> None:
    worker = replace(PLAIN, event_us=0.6, fence_us=0.3)
    s = simulate(tasks([[(0, ())], [(0, (0,))], [(0, (1,))]]), target=device(3, worker, end=2.0), steps=1)
    assert [ended(s, t) for t in range(3)] == pytest.approx([2.0, 2.0 + 2.9, 2.0 + 5.8])
    path = critical_path(s)
    assert path["work"]["hand_off"] == pytest.approx(1.2) and path["work"]["run"] == pytest.approx(6.0)
    assert sum(sum(row.values()) for row in path.values()) == pytest.approx(s.latency_us)


def test_a_release_waits_for_copies_that_are_on_their_way() -> None:
    worker = replace(PLAIN, latency_us=5.0, fence_us=0.1)
    graph = tasks([[(0, ()), (3, ())], [(0, (0,))]])
    quiet = simulate(graph, target=device(2, worker), steps=1)
    draining = simulate(graph, target=device(2, replace(worker, fence_drains=1.0)), steps=1)
    assert float(quiet.by_task("ready", 0)[2]) / 1e6 == pytest.approx(0.1)
    assert float(draining.by_task("ready", 0)[2]) / 1e6 == pytest.approx(5.0 + 4 * STAGE / 1e6, abs=0.01)  # 3 of this step, 1 of the next


def test_behind_a_full_ring_stages_come_to_the_l2_at_their_pace() -> None:
    """The second task waits for 50 us: 4 stages are in the ring, and as many more in the L2 as time and its limit allow. From there they need no memory time."""
    queues = [[(1, ())], [(20, (0,))]]
    def last(**given: int) -> float:
        s = simulate(tasks(queues), target=device(2, replace(PLAIN, l2_us=0.0), bandwidth=4.0, stages=4, end=50.0, **given), steps=1)
        return ended(s, 1) - ended(s, 0) - 50
    stage_us = STAGE / 4e3
    assert last() == pytest.approx(16 * stage_us, rel=0.02)
    assert last(prefetch=3) == pytest.approx(13 * stage_us, rel=0.02)
    slow = last(prefetch=16)  # 5 stages have come to the ring and the first worker by 20 us, and one more every 4.1 us
    assert 16 * stage_us - 50 < slow < last(prefetch=3)


def test_weights_are_fetched_across_steps() -> None:
    """A step whose weights fit the ring needs no memory time after the first."""
    machine = device(1, bandwidth=10.0, end=30.0)
    s = simulate(tasks([[(4, ())]]), target=machine, steps=3)
    first, second, third = np.diff(s.bounds) / 1e6
    assert first == pytest.approx(4 * STAGE / 1e4 + 30, abs=0.01)
    assert second == third == pytest.approx(30, abs=0.01)
    assert simulate(tasks([[(4, ())]]), target=machine, steps=3, pipelining=False).latency_us == pytest.approx(first, abs=0.01)


def test_the_same_input_gives_the_same_result() -> None:
    graph, machine = tasks([[(7, ()), (3, (2,))], [(5, ()), (9, (0,))]]), device(2, replace(PLAIN, event_us=0.6, latency_us=0.7), end=0.3)
    assert (simulate(graph, target=machine).records == simulate(graph, target=machine).records).all()


def test_more_bandwidth_is_never_slower() -> None:
    graph = tasks([[(30, ()), (30, (2,))], [(20, ()), (40, (0,))]])
    worker = replace(PLAIN, event_us=0.6, latency_us=0.7)
    times = [simulate(graph, target=device(2, worker, bandwidth=b, stage=0.05, end=0.5)).latency_us for b in (10, 50, 100, 500, 1000, 5000)]
    assert times == sorted(times, reverse=True) and times[0] > 5 * times[-1]


def test_spans_fill_the_time_of_every_worker() -> None:
    worker = replace(PLAIN, event_us=0.6, latency_us=0.7, fence_us=0.2)
    s = simulate(tasks([[(30, ()), (30, (2,))], [(20, ()), (40, (0,))]]), target=device(2, worker, bandwidth=100, stage=0.05, end=0.5))
    spans = s.timeline.spans
    assert s.timeline.steps == 2 and set(spans["phase"]) >= {RUN, WAIT_EVENT, WAIT_WEIGHTS}
    for w in (0, 1):
        mine = spans[(spans["worker"] == w) & (spans["role"] == CONSUMER)]
        assert (mine["begin_ns"][1:] >= mine["end_ns"][:-1] - 1).all()  # a nanosecond of rounding
        assert (mine["end_ns"] - mine["begin_ns"]).sum() == pytest.approx(mine["end_ns"].max(), abs=20)
    loads = spans[spans["role"] == LOADER]
    assert loads["bytes"].sum() == pytest.approx(2 * 120 * STAGE, rel=0.3)
    found = report(s)
    assert sum(found["idle"].values()) + found["utilisation"] == pytest.approx(1, abs=1e-3)
    busy = (spans["end_ns"] - spans["begin_ns"])[(spans["role"] == CONSUMER) & (spans["phase"] == RUN)].sum() / 1e3 / (2 * 2 * s.latency_us)
    assert found["utilisation"] == pytest.approx(busy, abs=0.02)
    assert sum(idle(s).values()) < 1 and overlap(s) == 0


def test_a_mega_kernel_is_not_slower_than_barriers_at_equal_costs() -> None:
    rng = np.random.default_rng(0)
    worker = replace(PLAIN, event_us=2.0, latency_us=0.7)  # a hop costs what a boundary costs
    for _ in range(20):
        sizes = rng.integers(0, 30, (3, 2))
        graph = tasks([[(int(a), ()), (int(b), (int(rng.integers(0, 3)) * 2,))] for a, b in sizes])
        machine = device(3, worker, bandwidth=200, stage=0.05, start=0.3, end=0.5)
        mega = simulate(graph, target=machine)
        barrier = simulate(with_barriers(_operators(graph)), target=machine, pipelining=False)
        assert mega.latency_us <= barrier.latency_us + 1e-6


def _operators(graph: SMTaskGraph) -> SMTaskGraph:
    """The same graph with the first tasks of all queues as one operator, and the second ones as the next."""
    tensors = TensorGraph(CONFIG, operators=[Operator("a", "tile", (), ()), Operator("b", "tile", (), ()), Operator("advance", "advance", (), ())])
    place = {t: i for q in graph.queues for i, t in enumerate(q)}
    return replace(graph, tensor_graph=tensors, tasks=[replace(t, op=place[t.id] if t.kind == "tile" else 2) for t in graph.tasks])


def test_a_kernel_boundary_costs_a_gap_and_the_host_a_launch() -> None:
    graph = _operators(tasks([[(0, ()), (0, ())], [(0, ()), (0, ())]]))
    machine = device(2, end=1.0)
    assert kernel_per_operator(graph, machine, Step(), "graph").latency_us == pytest.approx(2 * 1.0 + 3 * 2.0)
    assert kernel_per_operator(graph, machine, Step(), "eager").latency_us == pytest.approx(2.0 + 3 * 5.0)  # the gap after the token, then the host


def test_a_schedule_that_hangs_is_refused() -> None:
    graph = tasks([[(0, (1,))], [(0, (0,))]])
    with pytest.raises(GraphError, match="hangs"):
        simulate(graph, target=device(2))
    with pytest.raises(RequestError, match="batch 2"):
        simulate(graph, target=device(2), batch=2)
    graph.queues = []
    with pytest.raises(GraphError, match="without queues"):
        simulate(graph, target=device(2))


def test_regions_say_what_goes_through_memory() -> None:
    graph = tasks([[(1, ())]])
    graph.tasks[0].reads = (Region("x", 0, 1),)
    assert traffic(simulate(graph, target=device(1))).activations == 0
    split = kernel_per_operator(graph, device(1), Step(), "graph")
    assert traffic(split).weights == STAGE


# ---- data as its own flag, several devices
def flagged(queues: list[list[tuple[int, tuple[int, ...]]]], sending: tuple[int, ...] = (), ranks: int = 1) -> SMTaskGraph:
    """As `tasks`, with events that data carries; tasks in `sending` write 100 elements of a message."""
    graph = replace(tasks(queues), ranks=ranks)
    graph.buffers["message"] = Buffer("message", 100, "tokens", "peer", 8 * ranks)
    for event in graph.events[1:-1]:
        event.carried = True
    for t in sending:
        graph.tasks[t].writes = (Region("message", 0, 100),)
    return graph


def test_data_that_is_its_own_flag_needs_no_release() -> None:
    worker = replace(PLAIN, event_us=0.9, flag_us=0.4, fence_us=0.5)
    queues = [[(0, ())], [(0, (0,))], [(0, (1,))]]
    counted = simulate(tasks(queues), target=device(3, worker, end=2.0), steps=1)
    carried = simulate(flagged(queues), target=device(3, worker, end=2.0), steps=1)
    assert ended(counted, 2) == pytest.approx(3 * 2.0 + 2 * (0.5 + 0.9))
    assert ended(carried, 2) == pytest.approx(3 * 2.0 + 2 * 0.4)
    assert critical_path(carried)["work"]["hand_off"] == pytest.approx(0.8)


def linked(workers: int, **cost: float) -> Machine:
    return replace(device(workers, replace(PLAIN, flag_us=0.4), **cost), link=LinkCost(bandwidth_gb_s=1.0, latency_us=1.5))


def test_a_message_takes_its_bytes_over_the_link_and_its_latency() -> None:
    """800 bytes to each of three others, then the receiver, on another worker and on the same one."""
    on_the_way = 3 * 800 / 1e3 + 1.5
    other = simulate(flagged([[(0, ())], [(0, (0,))]], sending=(0,), ranks=4), target=linked(2, end=2.0), steps=1, devices=4)
    assert ended(other, 1) == pytest.approx(2.0 + on_the_way + 2.0)
    same = flagged([[(0, ()), (0, ())]], sending=(0,), ranks=4)
    same.tasks[1].reads = (Region("message", 0, 100),)
    s = simulate(same, target=linked(1, end=2.0), steps=1, devices=4)
    assert ended(s, 1) == pytest.approx(2.0 + on_the_way + 2.0)
    assert idle(s)["peer"] == pytest.approx(on_the_way / s.latency_us)
    assert sum(sum(row.values()) for row in critical_path(s).values()) == pytest.approx(s.latency_us)
    assert {(int(p), int(n)) for p, n in s.timeline.spans[["role", "bytes"]].tolist() if n} == {(LINK, 2400)}


def test_weights_come_while_a_message_is_on_its_way() -> None:
    graph = flagged([[(1, ()), (20, ())]], sending=(0,), ranks=2)
    graph.tasks[1].reads = (Region("message", 0, 100),)
    s = simulate(graph, target=linked(1, bandwidth=100, stages=40, flight=40, idle_flight=40, end=2.0), steps=1, devices=2)
    assert 0 < overlap(s) <= 1
    blocking = kernel_per_operator(_operators(graph), linked(1, end=2.0), Step(), "graph", 2)
    assert overlap(blocking) == 0


def test_the_shards_of_a_model_are_simulated_with_their_messages() -> None:
    compiler = Compiler("h200", tensor_parallel_size=2, max_batch=1, workers=24)
    graph = compiler.lower_model(LoadedModel(first_layers(shapes.shape("Qwen3-0.6B"), 2), None, None, "two layers"))  # type: ignore[arg-type]
    s = simulate(graph, devices=2)
    found = report(s)
    assert found["communication_overlap"] > 0.5 and found["idle"]["peer"] > 0
    rows = {r["model"]: r for r in compare(s)}
    assert list(rows) == ["eager", "CUDA graph", "fused, CUDA graph", "mega-kernel"]
    assert [r["speed_up"] for r in rows.values()] == sorted(r["speed_up"] for r in rows.values())
    assert rows["mega-kernel"]["activation_share"] == 0 < rows["fused, CUDA graph"]["activation_share"]
    assert rows["fused, CUDA graph"]["communication_overlap"] == 0


def test_requests_that_stand_in_line_unequally_spread_the_ends_of_short_tasks_most() -> None:
    def spread(stages: int) -> float:
        machine = device(16, replace(PLAIN, spread=0.9, latency_us=0.7))
        s = simulate(tasks([[(stages, ())]] * 16), target=machine, steps=1)
        ends = np.array([ended(s, t) for t in range(16)])
        return float((ends.max() - ends.min()) / ends.mean())

    assert spread(20) > spread(200) > spread(2000) > 0
