"""What a simulated step moves is what the model's sizes say, however its tasks are cut, and no device is faster than its memory."""

from __future__ import annotations

import pytest

from mpk.commands.bench import floor_bytes, floor_ms
from mpk.compiler import Compiler
from mpk.frontend.source import LoadedModel
from mpk.models import shapes
from mpk.models.config import DecoderConfig, first_layers
from mpk.simulate import simulate
from mpk.simulate.report import report, traffic
from mpk.simulate.simulator import Simulation
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
