"""The small surface for teaching: what it is given wrongly is refused in one line, and what comes out is physically possible."""

from __future__ import annotations

from typing import Any

import pytest

from mpk.errors import GraphError, RequestError
from mpk.graph.sm_task_graph import Region
from mpk.simulate import MPKMegaKernelEngine, TaskTile
from mpk.targets import hardware

X, Y = (Region("x", 0, 512),), (Region("y", 0, 16),)


def tiles(count: int = 32, **sizes: Any) -> list[TaskTile]:
    return [TaskTile("gemm", X, (Region("y", 16 * i, 16 * i + 16),), **{"weight_bytes": 16384, "flops": 16384, **sizes}) for i in range(count)]


@pytest.mark.parametrize(("values", "text"), [
    (("", X, Y), "a tile's operator, expected a name, got ''"),
    ((None, X, Y), "a tile's operator, expected a name, got None"),
    (("gemm", X, Y, -5), "weight_bytes of a tile of gemm, expected a whole number from 0"),
    (("gemm", X, Y, 1.5), "weight_bytes of a tile of gemm, expected a whole number from 0"),
    (("gemm", X, Y, 0, -1), "flops of a tile of gemm, expected a whole number from 0"),
    (("gemm", X, Y, 0, 1 << 70), "flops of a tile of gemm, expected a whole number from 0"),
    (("gemm", (Region("x", 5, 2),), Y), "reads of a tile of gemm, expected Region(buffer, begin, end) with 0 <= begin < end, got Region(buffer='x', begin=5, end=2)"),
    (("gemm", X, (Region("y", -5, 2),)), "writes of a tile of gemm, expected Region"),
    (("gemm", (("x", 0, 2),), Y), "reads of a tile of gemm, expected Region"),
])
def test_tiles_that_cannot_be_are_refused(values: tuple[Any, ...], text: str) -> None:
    with pytest.raises(GraphError) as error:
        TaskTile(*values)
    assert text in str(error.value)


@pytest.mark.parametrize("sms", [0, -1, 133, "4", 2.5, True, None])
def test_a_number_of_workers_that_the_target_does_not_have_is_refused(sms: Any) -> None:
    with pytest.raises(RequestError, match=r"num_sms .*, expected 1 to 132 on target h200"):
        MPKMegaKernelEngine(num_sms=sms)


@pytest.mark.parametrize("given", [5, [1, 2], [], "tiles"])
def test_what_is_no_list_of_tiles_is_refused(given: Any) -> None:
    engine = MPKMegaKernelEngine(num_sms=4)
    for benchmark in (engine.benchmark_mpk_persistent, engine.benchmark_kernel_per_op_baseline, engine.workers):
        with pytest.raises(GraphError, match="tiles, expected"):
            benchmark(given)


def test_a_graph_for_another_number_of_workers_is_refused() -> None:
    graph = MPKMegaKernelEngine(num_sms=4).graph(tiles())
    with pytest.raises(GraphError, match="a graph scheduled on 4 workers, expected 8, as the engine has"):
        MPKMegaKernelEngine(num_sms=8).benchmark_mpk_persistent(graph)


@pytest.mark.parametrize(("sizes", "text"), [
    ({"weight_bytes": 10**12}, "3 steps of 32 TB, expected at most"), ({"flops": 10**15}, ""), ({"flops": 10**12, "weight_bytes": 0}, "")])
def test_work_without_end_is_refused_and_long_work_is_simulated(sizes: dict[str, int], text: str) -> None:
    engine = MPKMegaKernelEngine(num_sms=16)
    if text:
        with pytest.raises(RequestError, match=text):
            engine.benchmark_mpk_persistent(tiles(**sizes))
    else:
        least_us = 32 * sizes["flops"] / (16 * hardware.load("h200").worker_rate.value * 1e3)
        assert least_us <= engine.benchmark_mpk_persistent(tiles(**sizes)).latency_us < 1.01 * least_us + 10


def test_times_that_would_not_fit_are_refused() -> None:
    with pytest.raises(RequestError, match=r"a step that takes one worker .* s, expected at most 100000 s"):
        MPKMegaKernelEngine(num_sms=1).benchmark_mpk_persistent(tiles(800, flops=(1 << 50) - 1))


@pytest.mark.parametrize("sms", [1, 7, 132])
def test_no_execution_is_faster_than_the_memory_and_workers_account_for_all_their_time(sms: int) -> None:
    engine = MPKMegaKernelEngine(num_sms=sms)
    graph = engine.graph(tiles(264, weight_bytes=1 << 20))
    described = hardware.load("h200")
    least_us = 264 * (1 << 20) / (min(described.bandwidth.value, sms * described.worker_bandwidth.value) * 1e3)
    mega, split = engine.benchmark_mpk_persistent(graph), engine.benchmark_kernel_per_op_baseline(graph)
    assert least_us <= mega.latency_us and least_us <= split.latency_us
    assert mega.memory_bytes == 264 << 20 and 0 < mega.utilisation <= 1
    for worker in engine.workers(graph):
        assert worker.busy_us + sum(worker.idle_us.values()) <= mega.latency_us + 0.01 * (len(worker.queue) + 2)  # nanoseconds of every span are rounded


def test_ready_tasks_of_tasks_that_are_not_there_are_refused() -> None:
    graph = MPKMegaKernelEngine(num_sms=4).graph(tiles())
    for wrong in (-1, 33, "a"):
        with pytest.raises(GraphError, match=r"completed task .*, expected 0 to 32"):
            graph.ready_tasks([wrong])  # type: ignore[list-item]
