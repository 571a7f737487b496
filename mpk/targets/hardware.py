"""Hardware as data: one TOML file a target under `mpk/targets/descriptions`, every cost with its source and date."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from mpk.errors import TargetError

FOLDER = Path(__file__).parent / "descriptions"


@dataclass(frozen=True)
class Figure:
    """One number of a hardware description: its value, where it comes from (measured, cited or guessed) and when."""

    value: float
    source: str
    date: str


UNKNOWN_PEERS = Figure(65536.0, "guessed: no figure in the description", "2026-11-30")


@dataclass(frozen=True)
class KernelPlan:
    """How the persistent kernel of a GPU is laid out. Bytes a block.

    `stage_bytes`: what one bulk copy brings; `stages`: of them in the ring. `flight_bytes`: most bytes of weights on their way while a
    product runs; `flight_idle_bytes`: from a product's end until the next input is there. More in flight brings no bandwidth and delays
    every small message behind it. `prefetch_bytes`: while the ring is full, most bytes of weights behind it that are brought to the L2, a
    stage every `prefetch_ns` at most. `attention_bytes`: with more keys and values of a layer, nothing is while attention reads them.
    """

    architecture: str
    capability: tuple[int, int]
    stage_bytes: int
    stages: int
    flight_bytes: int
    flight_idle_bytes: int
    prefetch_bytes: int
    prefetch_ns: int
    attention_bytes: int


@dataclass(frozen=True)
class Target:
    """A machine that a graph is lowered for. Bandwidths in GB/s, rates in GFLOP/s, latencies in microseconds."""

    name: str
    backend: str
    description: str
    workers: int
    bandwidth: Figure
    worker_bandwidth: Figure
    capacity_gb: Figure
    worker_rate: Figure
    event_latency: Figure
    task_latency: Figure
    max_events: int
    scratch_bytes: int
    max_signals_per_task: int
    max_workers: int = 256  # that a graph may be lowered for
    max_rows: int = 256  # token rows of one step, at most
    append_in: str = "qkv"  # which task rotates queries and keys and appends to the cache: "qkv" or "attention"
    swiglu_columns: int = 16  # output columns of a tile of a gate / up product
    half_tiles: bool = False  # tiles of products may have 8 rows of weights instead of 16
    prompt_rows: int = 0  # of a step that reads prompts with a graph of its own; 0: prompts are read in ordinary steps
    prompt_least: int = 0  # tokens that are worth such a step
    flagged: bool = False  # activations are their own flags (mpk.graph.tensor_graph.Value)
    activation_bytes: int = 4  # of an element of an activation: 4 (float32) or 2 (bf16)
    two_shot_bytes: Figure = UNKNOWN_PEERS  # of a message between ranks: most that a rank sends in one shot
    device: str = ""  # part of the name by which a GPU's driver calls it
    kernel: KernelPlan | None = None  # of the `cuda` back end
    simulation_only: bool = False  # described to be lowered for and simulated; no program is generated for it

    def with_workers(self, workers: int) -> Target:
        return replace(self, workers=workers)

    def rank_bandwidth(self, ranks: int) -> float:
        """GB/s that each of `ranks` devices gets at a time: those of the back end `cpp` are groups of threads of one machine, which share its memory."""
        return self.bandwidth.value / (ranks if self.backend == "cpp" else 1)


def available_cpus() -> int:
    """Processors this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not offered outside Linux
        return os.cpu_count() or 1


@cache
def backend_of(name: str) -> str:
    """Back end of a target; names without a description stand for machines that tests make up, which are threads."""
    return load(name).backend if (FOLDER / f"{name.lower()}.toml").is_file() else "cpp"


def names() -> list[str]:
    """Names of all described targets."""
    return sorted(p.stem for p in FOLDER.glob("*.toml"))


@cache
def _aliases() -> dict[str, str]:
    """Other names of targets -> the name of their description."""
    return {str(alias): name for name in names() for alias in tomllib.loads((FOLDER / f"{name}.toml").read_text()).get("aliases", ())}


@cache
def description(name: str) -> dict[str, Any]:
    """The whole description called `name`, as it stands in its file; raises `TargetError` listing the known ones."""
    path = FOLDER / f"{_aliases().get(name.lower(), name.lower())}.toml"
    if not path.is_file():
        raise TargetError(f"target '{name}'", remedy=f"known targets: auto, {', '.join(names())}")
    return tomllib.loads(path.read_text())


@cache
def load(name: str) -> Target:
    """The target called `name`; raises `TargetError` listing the known ones."""
    data = description(name)

    def figure(section: str, key: str) -> Figure:
        entry: dict[str, Any] = data[section][key]
        return Figure(float(entry["value"]), str(entry["source"]), str(entry["date"]))

    return Target(
        name=data["name"], backend=data["backend"], description=data["description"],
        workers=min(int(data["workers"]["count"]) or available_cpus(), int(data["workers"]["most"])), max_workers=int(data["workers"]["most"]),
        bandwidth=figure("memory", "bandwidth_gb_s"), worker_bandwidth=figure("memory", "worker_bandwidth_gb_s"),
        capacity_gb=figure("memory", "capacity_gb"), worker_rate=figure("compute", "worker_gflop_s"),
        event_latency=figure("latency", "event_us"), task_latency=figure("latency", "task_us"),
        max_events=int(data["limits"]["events"]), scratch_bytes=int(data["limits"]["scratch_kb"]) * 1024, max_rows=int(data["limits"].get("max_rows", 256)),
        max_signals_per_task=int(data["limits"]["max_signals_per_task"]),
        append_in=str(data.get("fusion", {}).get("append_in", "qkv")),
        swiglu_columns=int(data.get("fusion", {}).get("swiglu_columns", 16)),
        half_tiles=bool(data.get("tiles", {}).get("half", False)),
        prompt_rows=int(data.get("prompts", {}).get("rows", 0)), prompt_least=int(data.get("prompts", {}).get("least", 0)),
        flagged=bool(data.get("fusion", {}).get("flagged", False)),
        activation_bytes=int(data.get("fusion", {}).get("activation_bytes", 4)),
        two_shot_bytes=figure("peers", "two_shot_bytes") if "peers" in data else UNKNOWN_PEERS,
        device=str(data.get("device", "")), kernel=_kernel_plan(data["kernel"]) if "kernel" in data else None,
        simulation_only=bool(data.get("simulation_only", False)),
    )


def _kernel_plan(data: dict[str, Any]) -> KernelPlan:
    major, minor = data["capability"]
    return KernelPlan(str(data["architecture"]), (int(major), int(minor)), int(data["stage_bytes"]), int(data["stages"]),
                      int(data["flight_bytes"]), int(data["flight_idle_bytes"]), int(data.get("prefetch_bytes", 0)), int(data.get("prefetch_ns", 0)),
                      int(data.get("attention_bytes", 0)))


def choose(name: str) -> str:
    """Resolve "auto": the first GPU of this machine that is described, else the CPU threads."""
    if name.lower() != "auto":
        return name
    device = _first_device()
    return next((n for n in names() if runs_on(load(n), device)), "cpp")


def runs_on(target: Target, device: str | None) -> bool:
    """Whether a device of that name (None: no GPU) is what a GPU target describes."""
    return bool(device and target.device and target.device in device and not target.simulation_only)


def runs_here(target: Target) -> bool:
    """Whether this machine can execute graphs of the target."""
    return target.backend == "cpp" or runs_on(target, _first_device())


def require_device(target: Target) -> None:
    """Raise `TargetError` saying what is needed where a target has no program, or the machine no GPU that answers."""
    if target.simulation_only:
        raise TargetError(f"target {target.name}", expected="a target that programs are generated for", actual="one that can only be simulated",
                          remedy=f"mpk simulate --target {target.name}, or use one of: {', '.join(n for n in names() if not load(n).simulation_only)}")
    if target.backend == "cuda" and _first_device() is None:
        raise TargetError(f"target {target.name}", expected="a CUDA device", actual="none on this machine",
                          remedy="it needs an NVIDIA GPU with its driver and the packages cuda-bindings and nvidia-cuda-nvrtc; the target cpp runs here")


@cache
def _first_device() -> str | None:
    from mpk.runtime import cuda_device

    return cuda_device.Device(0).properties().name if cuda_device.device_count() else None
