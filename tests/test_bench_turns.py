"""Which systems `mpk bench` holds on a device at once."""

from __future__ import annotations

import pytest

from mpk.commands import bench
from mpk.models.shapes import shape
from mpk.runtime import cuda_device
from mpk.targets import hardware


class Device:
    """One with 100 GB free."""

    def __init__(self, index: int) -> None:
        assert index == 0

    def free_memory(self) -> tuple[int, int]:
        return 100 * 10**9, 140 * 10**9


@pytest.mark.parametrize(("model", "tp", "together"), [("Llama-3.1-8B", 1, True), ("Llama-3.1-70B", 2, False), ("Llama-3.1-70B", 4, True), ("Qwen3-32B", 1, False)])
def test_systems_are_measured_in_turn_where_their_weights_do_not_fit_together(model: str, tp: int, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_device, "Device", Device)
    turns = bench._turns(["mpk", "nccl-graph"], shape(model), "bf16", tp, hardware.load("h200"))
    assert turns == ([["mpk", "nccl-graph"]] if together else [["mpk"], ["nccl-graph"]])


def test_one_system_and_threads_need_no_device() -> None:
    assert bench._turns(["mpk"], shape("Llama-3.1-70B"), "bf16", 1, hardware.load("h200")) == [["mpk"]]
    assert bench._turns(["mpk", "torch-eager"], shape("Llama-3.1-70B"), "bf16", 1, hardware.load("cpp")) == [["mpk", "torch-eager"]]


def test_systems_take_turns_after_a_warm_up() -> None:
    calls: list[str] = []

    def system(name: str, ms: float) -> bench.System:
        def run(batch: int, context: int) -> list[float]:
            calls.append(f"{name}{batch}.{context}")
            return [ms, ms]

        return run

    samples = bench._samples({"a": system("a", 1.0), "b": system("b", 2.0)}, 3, 512, 2)
    assert calls == ["a3.512", "b3.512"] + ["a3.512", "b3.512"] * 2
    assert samples == {"a": [1.0] * 4, "b": [2.0] * 4}
