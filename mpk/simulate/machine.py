"""`Machine`: what the simulator believes about a target. Figures of the hardware come from its description, costs of task kinds and of
the program's protocol from `mpk/targets/costs/*.toml`, which `python -m benchmarks.calibrate` writes from measured traces.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mpk.errors import TargetError
from mpk.targets import hardware
from mpk.targets.hardware import Target

COSTS = hardware.FOLDER.parent / "costs"
SHARE_SEED = 0  # which worker gets which share is not known; the assignment is fixed


@dataclass(frozen=True)
class KindCost:
    """What a task of one kind costs its consumer, from `rows` rows on. Microseconds.

    `start`: from the events to the first stage, with the input fetched (`start_kb` more per KB of input). `stage`: a stage of weights
    used up (`stage_kb` per KB of it, `stage_row` per row above the first). `group`: after a group of stages. `end`: from the last stage
    to the end (`end_row` per row above the first, `end_kb` per KB written, `append` for a task that writes to the cache). `load_kb`: a KB that the consumer loads itself.
    `prefetches`: its own loads begin before its events have come, and as many as there is room for have to be there before it polls.
    `before`: until it polls (`before_row` per row above the first). `level`: to bring in a part of a normed input of several rows.
    """

    name: str = "default"
    rows: int = 1
    start: float = 0.0
    start_kb: float = 0.0
    stage: float = 0.0
    stage_kb: float = 0.0
    stage_row: float = 0.0
    group: float = 0.0
    end: float = 0.0
    end_row: float = 0.0
    end_kb: float = 0.0
    append: float = 0.0
    load_kb: float = 0.0
    before: float = 0.0
    before_row: float = 0.0
    level: float = 0.0
    prefetches: bool = False


@dataclass(frozen=True)
class WorkerCost:
    """The protocol of a worker. Microseconds, GB/s, KB.

    `event_us`: from a signal to a waiter that polls; `flag_us`: the same for data that is its own flag; `poll_us`: to see an event that has come. `fence_us`: a release of a quiet worker;
    `fence_drains`: share of the time until the worker's own copies on their way have come that it waits at least. `step_us`: to read a step's plan. `latency_us`: of device
    memory without queueing. `issue_us`, `port_gb_s`: the loader asks for a stage every issue_us + bytes / port_gb_s;
    `load_gb_s`: a consumer asks for what it loads itself at this rate (0: at the loader's). `queue_share`: part
    of the queue for device memory in which an activation stands too. `memory_share`: of the target's bandwidth that a program reaches. `window_kb`: most that a consumer has on its way itself.
    `l2_us`: of a stage that is in the L2 already.
    `shares`: quantiles over workers of how long they stand in the queue, mean 1; `spread`: each single request up to this part longer or
    shorter.
    """

    event_us: float
    flag_us: float = 0.0
    poll_us: float = 0.0
    fence_us: float = 0.0
    fence_drains: float = 0.0
    step_us: float = 0.0
    latency_us: float = 0.0
    issue_us: float = 0.0
    port_gb_s: float = 0.0
    load_gb_s: float = 0.0
    queue_share: float = 0.0
    memory_share: float = 1.0
    window_kb: float = 64.0
    l2_us: float = 0.6
    spread: float = 0.0
    shares: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class LaunchCost:
    """What a kernel boundary costs, microseconds. `eager_us`: the host's time for one launch; `gap_us`: between dependent kernels of a
    stream; `graph_us`: between dependent kernels of a CUDA graph; `collective_us`: an all-reduce call of a library, small message."""

    eager_us: float = 0.0
    gap_us: float = 0.0
    graph_us: float = 0.0
    collective_us: float = 0.0


@dataclass(frozen=True)
class LinkCost:
    """Between devices: GB/s each way of one device, one-way latency in microseconds."""

    bandwidth_gb_s: float = 0.0
    latency_us: float = 0.0


@dataclass(frozen=True)
class Machine:
    """One kind of device, ready to be simulated. Bandwidths in GB/s."""

    name: str
    target: Target
    bandwidth_gb_s: float
    worker: WorkerCost
    kinds: tuple[KindCost, ...]
    launch: LaunchCost = field(default_factory=LaunchCost)
    link: LinkCost = field(default_factory=LinkCost)
    l2_mb: float = 0.0  # activations that fit stay there
    costs: str = ""  # where the costs come from, for reports

    def cost(self, kind: str, rows: int) -> KindCost:
        """The entry of `kind` for so many rows, or the default's."""
        return _entry(self.kinds, kind, rows) or _entry(self.kinds, "default", rows) or KindCost()

    def shares(self, workers: int) -> np.ndarray:
        """float64 [workers], mean 1: how long each worker stands in the queue for device memory."""
        quantiles = np.asarray(self.worker.shares, float)
        at = np.interp((np.arange(workers) + 0.5) / workers, np.linspace(0, 1, len(quantiles)), quantiles)
        return np.random.default_rng(SHARE_SEED).permutation(at / at.mean())

    def with_workers(self, workers: int) -> Machine:
        return replace(self, target=self.target.with_workers(workers))


def _entry(kinds: tuple[KindCost, ...], name: str, rows: int) -> KindCost | None:
    return max((k for k in kinds if k.name == name and k.rows <= rows), key=lambda k: k.rows, default=None)


def machine(target: Target | str, devices: int = 1) -> Machine:
    """The machine of a target, as each of `devices` that share a model has it; raises `TargetError` for one whose description says nothing for
    the simulator."""
    described = hardware.load(target) if isinstance(target, str) else target
    data = hardware.description(described.name)
    section = data.get("simulation")
    if section is None:
        raise TargetError(f"target {described.name} has no [simulation] section in its description", remedy="see docs/simulation.md")
    costs = load_costs(str(section["costs"]))
    clock = float(section["clock_ghz"]["value"]) if "clock_ghz" in section else costs.clock_ghz
    slower = costs.clock_ghz / clock if costs.clock_ghz else 1.0
    kinds = tuple(_scaled(k, slower) for k in costs.kinds)
    worker = replace(costs.worker, event_us=costs.worker.event_us or described.event_latency.value)
    if not worker.port_gb_s:
        worker = replace(worker, port_gb_s=described.worker_bandwidth.value)
    launch = LaunchCost(**{k: float(v["value"]) for k, v in data.get("launch", {}).items()})
    link = LinkCost(**{k: float(v["value"]) for k, v in data.get("link", {}).items() if k in {f.name for f in fields(LinkCost)}})
    return Machine(described.name, described, described.rank_bandwidth(devices), worker, kinds, launch, link, float(section["l2_mb"]["value"]), costs.source)


def _scaled(cost: KindCost, factor: float) -> KindCost:
    """The same work at another clock."""
    values = {f.name: getattr(cost, f.name) * factor for f in fields(KindCost) if f.name not in ("name", "rows", "prefetches")}
    return replace(cost, **values)


@dataclass(frozen=True)
class Costs:
    """The contents of one file of costs; `clock_ghz`: of the device it was measured on, 0: unknown."""

    name: str
    source: str
    date: str
    clock_ghz: float
    worker: WorkerCost
    kinds: tuple[KindCost, ...]


@cache
def load_costs(name: str) -> Costs:
    """The costs in `mpk/targets/costs/<name>.toml`."""
    path = COSTS / f"{name}.toml"
    if not path.is_file():
        raise TargetError(f"no costs '{name}' in {COSTS}", remedy=f"there are: {', '.join(sorted(p.stem for p in COSTS.glob('*.toml')))}")
    data = tomllib.loads(path.read_text())
    worker = {**data["worker"], "shares": tuple(data["worker"].get("shares", (1.0,)))}
    return Costs(name, str(data["source"]), str(data["date"]), float(data.get("clock_ghz", 0)), WorkerCost(**worker),
                 tuple(KindCost(**k) for k in data["kind"]))


def save_costs(costs: Costs, path: Path) -> None:
    """Write costs as `load_costs` reads them; figures with four significant digits."""
    lines = [f'# Written by `python -m benchmarks.calibrate`; units and meaning: mpk/simulate/machine.py.\nsource = "{costs.source}"',
             f'date = "{costs.date}"', f"clock_ghz = {costs.clock_ghz:g}", "", "[worker]"]
    lines += [f"{f.name} = {_toml(getattr(costs.worker, f.name))}" for f in fields(WorkerCost)]
    for kind in costs.kinds:
        lines += ["", "[[kind]]"]
        lines += [f"{f.name} = {_toml(getattr(kind, f.name))}" for f in fields(KindCost)
                  if f.name in ("name", "rows") or getattr(kind, f.name) != f.default]
    path.write_text("\n".join(lines) + "\n")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(v) for v in value)}]"
    return f"{value}" if isinstance(value, int) else f"{float(f'{value:.4g}')}"
