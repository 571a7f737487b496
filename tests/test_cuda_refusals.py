"""What a GPU must have is checked before anything is launched; the refusal gives the numbers. No GPU is needed: the device is made up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import mpk
from mpk.errors import TargetError
from mpk.frontend.source import LoadedModel
from mpk.models import registry, shapes
from mpk.runtime.cuda_device import Properties
from mpk.runtime.cuda_engine import check_device, shared_bytes
from mpk.targets import hardware

H200 = Properties("NVIDIA H200", (9, 0), 132, 227 << 10, 50 << 20)
GIB = 1 << 30


@pytest.fixture(scope="module")
def graph() -> Any:
    config = shapes.shape("Qwen3-0.6B")
    return mpk.Compiler("h200").lower_model(LoadedModel(config, shapes.RandomWeights(config, registry.build_graph(config)), None, "Qwen3-0.6B"))


def check(graph: Any, properties: Properties, free: int = 100 * GIB) -> None:
    device: Any = SimpleNamespace(index=3, properties=lambda: properties, free_memory=lambda: (free, 139 * GIB))
    plan = hardware.load("h200").kernel
    assert plan is not None
    check_device(device, graph, plan, shared_bytes(plan))


def test_a_gpu_that_has_all_is_taken(graph: Any) -> None:
    check(graph, H200)


@pytest.mark.parametrize(("properties", "free", "said"), [
    (replace(H200, name="NVIDIA A100", capability=(8, 0)), 100 * GIB,
     r"device 3 \(NVIDIA A100\) for target h200, expected compute capability 9.0, got 8.0; use a target of that capability, or cpp"),
    (replace(H200, multiprocessors=78), 100 * GIB, r"device 3 \(NVIDIA H200\) for target h200, expected 132 multiprocessors, got 78; .*workers=78"),
    (replace(H200, shared_memory_per_block=99 << 10), 100 * GIB, r"shared memory of a block, expected \d{6} bytes, got 101376"),
    (H200, GIB, r"weights and activations of the model on device 3 \(NVIDIA H200\): 1\.\d+ GiB, expected at most 1.00 GiB, what is free of 139.00 GiB; "
                r"stop other programs"),
], ids=["too old", "too few multiprocessors", "too little shared memory", "full"])
def test_a_gpu_that_lacks_something_is_refused_with_the_numbers(graph: Any, properties: Properties, free: int, said: str) -> None:
    with pytest.raises(TargetError, match=said):
        check(graph, properties, free)
