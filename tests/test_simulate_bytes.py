"""What a simulated step moves is what the model's sizes say, however its tasks are cut, and no device is faster than its memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpk.commands.bench import floor_ms
from mpk.compiler import Compiler
from mpk.frontend.source import LoadedModel
from mpk.models import shapes
from mpk.models.config import DecoderConfig, first_layers
from mpk.models.floor import floor_bytes
from mpk.simulate import simulate
from mpk.simulate.analysis import bytes_per_step, covered_ns, series
from mpk.simulate.baseline import compare
from mpk.simulate.report import report, traffic
from mpk.simulate.simulator import Simulation, _apart
from mpk.simulate.timeline import LOADER, SPAN
from mpk.targets import hardware


def two_layers(name: str) -> DecoderConfig:
    return first_layers(shapes.shape(name), 2)


def step(name: str, target: str, workers: int, batch: int = 2, context: int = 640, tp: int = 1) -> Simulation:
    compiler = Compiler(target, tensor_parallel_size=tp, workers=workers, max_batch=batch)
    graph = compiler.lower_model(LoadedModel(two_layers(name), None, None, name))  # type: ignore[arg-type]
    return simulate(graph, batch=batch, context=context, devices=tp)


@pytest.mark.parametrize(("name", "target", "workers"), [
    ("SmolLM2-135M", "cpp", 1), ("SmolLM2-135M", "cpp", 2), ("SmolLM2-135M", "cpp", 4), ("Qwen3-0.6B", "cpp", 5), ("Qwen3-0.6B", "h200", 3), ("Qwen3-0.6B", "h200", 20)])
def test_every_key_and_value_is_read_once_however_many_workers_share_the_heads(name: str, target: str, workers: int) -> None:
    config = two_layers(name)
    read = floor_bytes(config, "bf16", 2, 640) - floor_bytes(config, "bf16", 0, 0)
    found = traffic(step(name, target, workers)).cache
    assert read <= found <= read + 64 * 2 * workers  # shares are rounded up to whole bytes


def test_groups_of_threads_share_the_memory_of_their_machine() -> None:
    target = hardware.load("cpp")
    assert [target.rank_bandwidth(n) for n in (1, 2)] == [target.bandwidth.value, target.bandwidth.value / 2]
    assert hardware.load("h200").rank_bandwidth(8) == hardware.load("h200").bandwidth.value
    config = two_layers("Qwen3-0.6B")
    assert floor_ms(config, "bf16", target, 2, 1, 512) == pytest.approx(floor_ms(config, "bf16", target, 1, 1, 512))
    assert floor_ms(config, "bf16", hardware.load("h200"), 2, 1, 512) == pytest.approx(floor_ms(config, "bf16", hardware.load("h200"), 1, 1, 512) / 2)


def test_devices_of_one_machine_are_no_faster_together_than_its_memory() -> None:
    found = report(step("Qwen3-0.6B", "cpp", 1, tp=2))
    bytes_of_all = floor_bytes(two_layers("Qwen3-0.6B"), "bf16", 2, 640)
    assert found["latency_us"] >= bytes_of_all / (hardware.load("cpp").bandwidth.value * 1e3)
    assert found["memory_utilisation"] <= 1


def test_one_worker_of_a_gpu_does_a_whole_step() -> None:
    s = step("Qwen3-0.6B", "h200", 1)
    closing = s.graph.events[s.graph.tasks[-1].waits[-1]]
    assert not closing.carried and closing.threshold == 1
    assert s.latency_us > step("Qwen3-0.6B", "h200", 2).latency_us


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40), st.integers(0, 5000)), min_size=1, max_size=12))
def test_loads_at_a_time_are_drawn_apart_with_all_their_bytes(given_loads: list[tuple[int, int, int]]) -> None:
    loads = np.zeros(len(given_loads), SPAN)
    loads["role"], loads["task"] = LOADER, np.arange(len(loads))
    for i, (begin, length, size) in enumerate(sorted(given_loads)):
        loads[i]["begin_ns"], loads[i]["end_ns"], loads[i]["bytes"] = 1000 * begin, 1000 * (begin + length), size
    drawn = _apart(loads)
    assert (drawn["end_ns"] > drawn["begin_ns"]).all() and (drawn["begin_ns"][1:] >= drawn["end_ns"][:-1]).all()
    assert covered_ns(drawn["begin_ns"], drawn["end_ns"]) == covered_ns(loads["begin_ns"], loads["end_ns"])
    assert drawn["bytes"].sum() == loads["bytes"].sum()
    for load in loads:
        of_it = drawn[drawn["task"] == load["task"]]
        assert abs(int(of_it["bytes"].sum()) - int(load["bytes"])) <= 1 + 0.01 * loads["bytes"].sum()  # but for pieces below a nanosecond


@pytest.mark.parametrize(("batch", "context"), [(1, 5000), (16, 700)])
def test_no_picture_shows_more_than_the_memory_gives(batch: int, context: int) -> None:
    """Keys and values are loaded beside weights: what was drawn over one another came to several times the bandwidth."""
    s = step("Qwen3-0.6B", "h200", 132, batch, context)
    _, busy, rate = series(s.timeline, 400)
    assert rate.max() / 1e9 <= 1.15 * s.machine.bandwidth_gb_s  # a load is drawn as if its bytes came evenly from its first request on
    assert 0 <= busy.min() <= busy.max() <= 1
    brought = bytes_per_step(s.timeline)[0]
    assert brought == pytest.approx(traffic(s).total, rel=1e-6)  # the same figure in tables and pictures


def test_no_kernel_moves_more_than_the_memory_gives() -> None:
    for row in compare(step("Qwen3-0.6B", "cpp", 1, tp=2)):
        assert row["memory_utilisation"] <= 1 <= row["ratio"], row["model"]


@pytest.mark.parametrize(("name", "target", "tp"), [("SmolLM2-135M", "h200", 1), ("SmolLM2-135M", "cpp", 3), ("Qwen3-0.6B", "h200", 2)])
def test_simulations_and_measurements_are_compared_with_the_same_floor(name: str, target: str, tp: int) -> None:
    found = report(step(name, target, 2, 1, 512, tp=tp))
    assert found["floor_us"] / 1e3 == pytest.approx(floor_ms(two_layers(name), "bf16", hardware.load(target), tp, 1, 512), abs=1e-6)
    moved = found["memory_bytes"]["weights"] + found["memory_bytes"]["cache"]
    assert moved * tp >= floor_bytes(two_layers(name), "bf16", 1, 512)  # what rows are padded to is read too, but need not be
