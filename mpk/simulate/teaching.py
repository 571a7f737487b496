"""Persistent workers in a few lines: describe tiles by what they read and write, run them as one kernel and as a kernel per operator.

Everything here is thin over the real thing: dependencies are derived from regions, tiles are scheduled and their events fused by the
passes that models go through, and both executions are simulated by `mpk.simulate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpk.errors import GraphError, RequestError
from mpk.graph.sm_task_graph import Buffer, Cost, Region, SMTaskGraph
from mpk.graph.tensor_graph import Operator, TensorGraph
from mpk.models.config import DecoderConfig
from mpk.passes import dependencies, event_fusion, schedule
from mpk.runtime.request import whole
from mpk.simulate.baseline import kernel_per_operator
from mpk.simulate.machine import KindCost, Machine, machine
from mpk.simulate.report import traffic
from mpk.simulate.simulator import Simulation, simulate
from mpk.simulate.timeline import CONSUMER, PHASES, RUN, Timeline
from mpk.simulate.work import Step
from mpk.targets import hardware

KIND = "tile"
MOST = 1 << 50  # bytes, operations and elements of one tile
_NO_MODEL = DecoderConfig("tiles", 1, 8, 8, 1, 1, 1, 8, 1e-5, 1)


@dataclass(frozen=True)
class TaskTile:
    """A piece of an operator that one worker computes.

    `reads`, `writes`: regions (buffer, begin, end) in elements; who depends on whom follows from where they overlap. `weight_bytes`:
    constant data streamed from device memory, which depends on nothing. `flops`: operations. Raises `GraphError` for sizes and regions that
    cannot be.
    """

    operator: str
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    weight_bytes: int = 0
    flops: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.operator, str) or not self.operator:
            raise GraphError("a tile's operator", expected="a name", actual=repr(self.operator))
        for name in ("weight_bytes", "flops"):
            if not whole(value := getattr(self, name)) or not 0 <= value < MOST:
                raise GraphError(f"{name} of a tile of {self.operator}", expected=f"a whole number from 0 below {MOST}", actual=repr(value))
        for name in ("reads", "writes"):
            for region in getattr(self, name):
                if not isinstance(region, Region) or not (whole(region.begin) and whole(region.end) and 0 <= region.begin < region.end < MOST):
                    raise GraphError(f"{name} of a tile of {self.operator}", expected="Region(buffer, begin, end) with 0 <= begin < end", actual=repr(region))


@dataclass(frozen=True)
class ExecutionResult:
    """How tiles ran. Times in microseconds, traffic in bytes of device memory; `speed_up`: over a kernel per operator."""

    latency_us: float
    memory_bytes: int
    activation_bytes: int
    utilisation: float
    speed_up: float
    timeline: Timeline


@dataclass(frozen=True)
class PersistentSMWorker:
    """What one worker did in one step: its queue of task ids in order, and microseconds by what it spent them with."""

    id: int
    queue: tuple[int, ...]
    busy_us: float
    idle_us: dict[str, float]

    @property
    def utilisation(self) -> float:
        total = self.busy_us + sum(self.idle_us.values())
        return self.busy_us / total if total else 0.0


class MPKMegaKernelEngine:
    """A device of `num_sms` persistent workers, with the figures of a described target.

    Raises `RequestError` for a number of workers that the target does not have, `TargetError` for an unknown target.
    """

    def __init__(self, num_sms: int = 132, target: str = "h200") -> None:
        described = hardware.load(target)
        if not whole(num_sms) or not 1 <= num_sms <= described.max_workers:
            raise RequestError(f"num_sms {num_sms!r}", expected=f"1 to {described.max_workers} on target {described.name}")
        self.machine: Machine = machine(described.with_workers(num_sms))
        self.num_sms = num_sms

    def graph(self, tiles: Sequence[TaskTile], element_bytes: int = 2) -> SMTaskGraph:
        """Schedule tiles, in the order that defines their meaning; tiles of one operator stand together. Raises `GraphError`."""
        if not isinstance(tiles, Sequence) or not all(isinstance(t, TaskTile) for t in tiles):
            raise GraphError("tiles", expected="a list of TaskTile", actual=type(tiles).__name__)
        if not tiles:
            raise GraphError("no tiles", expected="one or more")
        operators = list(dict.fromkeys(t.operator for t in tiles))
        if [t.operator for t in tiles] != [name for name in operators for t in tiles if t.operator == name]:
            raise GraphError("tiles out of order", expected="the tiles of an operator one after the other")
        tensors = TensorGraph(_NO_MODEL, operators=[
            Operator(name, KIND, _buffers(tiles, name, "reads"), _buffers(tiles, name, "writes")) for name in operators])
        tensors.operators.append(Operator("end of step", "advance", (), ()))
        out = SMTaskGraph(tensors, self.machine.name, self.num_sms, max_rows=1)
        for tile in tiles:
            for region in (*tile.reads, *tile.writes):
                columns = max(region.end, out.buffers[region.buffer].columns if region.buffer in out.buffers else 0)
                out.buffers[region.buffer] = Buffer(region.buffer, columns, "tokens", "activation", element_bytes)
            out.add_task(KIND, operators.index(tile.operator), (len(out.tasks), len(out.tasks) + 1), tile.reads, tile.writes,
                         Cost(tile.weight_bytes, 0, tile.flops))
        out.add_task("advance", len(operators), (0, 1))
        described = self.machine.target
        return event_fusion.run(schedule.run(dependencies.run(out), described), described)

    def benchmark_mpk_persistent(self, tiles: Sequence[TaskTile] | SMTaskGraph) -> ExecutionResult:
        """All tiles in one kernel: workers follow their queues, events order them, weights are fetched ahead."""
        graph = self._scheduled(tiles)
        mega = self.simulate(graph)
        return _result(mega, self._per_operator(graph, "graph").latency_us)

    def benchmark_kernel_per_op_baseline(self, tiles: Sequence[TaskTile] | SMTaskGraph, launch: str = "graph") -> ExecutionResult:
        """A kernel per operator, launched "eager" by the host or from a CUDA "graph"; activations go through device memory."""
        if launch not in ("eager", "graph"):
            raise RequestError(f"launch '{launch}'", expected="eager or graph")
        found = self._per_operator(self._scheduled(tiles), launch)
        return _result(found, found.latency_us)

    def workers(self, tiles: Sequence[TaskTile] | SMTaskGraph) -> list[PersistentSMWorker]:
        """What each worker of the mega-kernel did in the last step."""
        simulation = self.simulate(self._scheduled(tiles))
        spans, begin = simulation.timeline.spans, int(simulation.bounds[-2] - simulation.bounds[1]) // 1000
        spans = spans[(spans["role"] == CONSUMER) & (spans["end_ns"] > begin)]
        took = (spans["end_ns"] - spans["begin_ns"].clip(begin)) / 1e3
        out = []
        for i, queue in enumerate(simulation.graph.queues):
            mine = spans["worker"] == i
            idle = {PHASES[p]: float(took[mine & (spans["phase"] == p)].sum()) for p in range(1, len(PHASES))}
            out.append(PersistentSMWorker(i, tuple(queue), float(took[mine & (spans["phase"] == RUN)].sum()), {k: v for k, v in idle.items() if v}))
        return out

    def simulate(self, graph: SMTaskGraph) -> Simulation:
        """The simulation behind `benchmark_mpk_persistent`; nothing is charged for the end of a step of tiles."""
        return simulate(graph, target=self._machine(graph))

    def _per_operator(self, graph: SMTaskGraph, launch: str) -> Simulation:
        return kernel_per_operator(graph, self._machine(graph), Step(), launch)

    def _machine(self, graph: SMTaskGraph) -> Machine:
        if any(t.kind != KIND for t in graph.tasks[:-1]):
            return self.machine  # a model's graph
        kinds = (*(k for k in self.machine.kinds if k.name != "advance"), KindCost("advance"))
        return replace(self.machine, kinds=kinds, worker=replace(self.machine.worker, step_us=0.0))

    def _scheduled(self, tiles: Sequence[TaskTile] | SMTaskGraph) -> SMTaskGraph:
        if not isinstance(tiles, SMTaskGraph):
            return self.graph(tiles)
        if tiles.num_workers != self.num_sms:
            raise GraphError(f"a graph scheduled on {tiles.num_workers} workers", expected=f"{self.num_sms}, as the engine has")
        return tiles


def _buffers(tiles: Sequence[TaskTile], operator: str, which: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(r.buffer for t in tiles if t.operator == operator for r in getattr(t, which)))


def _result(simulation: Simulation, reference_us: float) -> ExecutionResult:
    from mpk.simulate.report import idle

    moved = traffic(simulation)
    return ExecutionResult(simulation.latency_us, moved.total, moved.activations, 1 - sum(idle(simulation).values()),
                           reference_us / simulation.latency_us, simulation.timeline)
