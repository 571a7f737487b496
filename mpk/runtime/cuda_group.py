"""The engine of several GPUs that share one model: a kernel on each, launched together, that exchange messages in each other's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpk.codegen import layout
from mpk.codegen.cuda_program import CudaProgramBuilder, compile_cuda_program
from mpk.codegen.nvrtc import Cubin
from mpk.frontend.shard_source import shard_sources
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.passes.memory import lay_out_params
from mpk.runtime.cuda_device import Device, device_count
from mpk.runtime.cuda_engine import CudaExecutor, LoadedProgram, check_device, launch_plan, shared_bytes
from mpk.runtime.cuda_peers import PeerMemory, addresses, connect
from mpk.runtime.engine import BuildProgress, Engine
from mpk.runtime.group import FlagBases, check_device_ids, copy_request, messages_of, most_steps
from mpk.runtime.state import State
from mpk.targets import hardware
from mpk.tasks.base import WeightSource

RESERVE_BYTES = 256 << 20  # of a device's memory that stay free: outputs of a run, the driver's own


@dataclass(repr=False)
class CudaGroupEngine(Engine):
    """Engine of several GPUs. Weights are brought to the devices when the first instance on them is made (0, 1, ...: by `build`).

    `one_device`: run all ranks on this device, in streams of their own; for tests of everything but the links. The workers of all ranks must
    fit the device together.
    """

    builder: CudaProgramBuilder = None  # type: ignore[assignment]
    cubin: Cubin = None  # type: ignore[assignment]
    sources: list[WeightSource] = field(default_factory=list)
    random_seed: int | None = None
    one_device: int | None = None

    def __post_init__(self) -> None:
        self.params = [lay_out_params(self.graph, source) for source in self.sources]  # instructions hold their places
        self.tables = self.builder.cuda_tables()
        self.plan = launch_plan(self.graph, self.pipelining)
        self._loaded: dict[tuple[int, int], LoadedProgram] = {}

    def devices(self, device_ids: Sequence[int] | None) -> list[int]:
        """The device of every rank; raises `TargetError` for what cannot be."""
        if self.one_device is not None:
            return [self.one_device] * self.graph.ranks
        return check_device_ids(device_ids, self.graph.ranks, device_count())

    def on_devices(self, ids: Sequence[int], progress: Any = None) -> list[LoadedProgram]:
        """The program of every rank on its device, with its part of the weights, brought there first where it is not."""
        known = {index: Device(index) for index in set(ids)}
        connect(list(known.values()))
        for rank, index in enumerate(ids):
            if (rank, index) in self._loaded:
                continue
            known[index].use()
            program = LoadedProgram(known[index], self.graph, self.builder, self.cubin, self.tables, self.plan)
            seed = None if self.random_seed is None else self.random_seed + rank
            program.fill(self.params[rank], self.sources[rank], _part_of(progress, rank, self.graph.ranks), seed)
            self._loaded[rank, index] = program
        return [self._loaded[rank, index] for rank, index in enumerate(ids)]

    def executor(self, batch: int, context: int, explicit: bool, device_ids: Sequence[int] | None, stall_limit_s: float) -> CudaGroupExecutor:
        graph = self.graph
        ids = self.devices(device_ids)
        programs = self.on_devices(ids)
        free = []
        for program in programs:
            program.device.use()
            free.append(program.device.free_memory()[0] // ids.count(program.device.index))
        available = max(0, min(free) - graph.arena_bytes - graph.peer_bytes - RESERVE_BYTES)  # the same pages on all devices
        executors = []
        for rank, program in enumerate(programs):
            program.device.use()
            state = State(graph, batch, context, explicit, available=available, on_host=False)
            executors.append(CudaRankExecutor(self, program, state, stall_limit_s, rank))
        return CudaGroupExecutor(self, executors, stall_limit_s)


def _part_of(progress: Any, rank: int, ranks: int) -> Any:
    return None if progress is None else lambda done, total: progress(rank * total + done, ranks * total)


class CudaRankExecutor(CudaExecutor):
    """One rank's kernel and state."""

    def __init__(self, engine: CudaGroupEngine, program: LoadedProgram, state: State, stall_limit_s: float, rank: int) -> None:
        super().__init__(engine, program, state, stall_limit_s)  # type: ignore[arg-type]
        self.rank, self.ranks = rank, engine.graph.ranks
        self.peer_memory = PeerMemory(program.device, engine.graph.peer_bytes)
        self.peers: list[int] = []
        self.flag_base = 0
        if engine.one_device is not None:  # beside each other, which the driver promises for cooperative launches of one kernel only
            self.stream, self.cooperative = program.device.stream(), False

    def _arguments(self, logits: np.ndarray | None, spans: np.ndarray | None, watched: bool) -> np.ndarray:
        out = super()._arguments(logits, spans, watched)
        out["launch"]["rank"], out["launch"]["ranks"], out["launch"]["flag_base"] = self.rank, self.ranks, self.flag_base
        out["kernel"]["peers"][0, : self.ranks] = self.peers
        return out

    def watch(self) -> bool:
        """Return when the kernel has ended: whether it ended well. Raises `StallError` if a task of it does not end."""
        self.program.device.use()
        self._watch()
        return int(self.program.device.download_beside(self.side_stream, self.stop, np.int32, 1)[0]) == layout.RESULT["done"]

    def tell_to_stop(self) -> None:
        """Make the running kernel leave."""
        self.program.device.use()
        self.program.device.upload_beside(self.side_stream, self.stop, np.array([layout.RESULT["stalled"]], np.int32))


class CudaGroupExecutor:
    """Runs all ranks together; the host speaks with rank 0 (see `mpk.runtime.group`)."""

    def __init__(self, engine: CudaGroupEngine, executors: list[CudaRankExecutor], stall_limit_s: float) -> None:
        self.engine, self.executors, self.stall_limit_s = engine, executors, stall_limit_s
        self.state = executors[0].state
        self.flags = FlagBases(messages_of(engine.graph))
        peers = addresses([e.peer_memory for e in executors])
        for executor in executors:
            executor.peers = peers

    def start(self, logits: np.ndarray | None, spans: np.ndarray | None, span_count: np.ndarray | None, watched: bool) -> None:
        """Send the request to all ranks; `spans`, `span_count`: rows of rank 0's workers, then of rank 1's, ..."""
        base, clear = self.flags.begin(most_steps(self.state))
        workers = self.engine.graph.num_workers
        for rank, executor in enumerate(self.executors):
            if clear:
                executor.peer_memory.clear()
            if rank > 0:
                copy_request(self.state, executor.state)
            executor.flag_base = base
            rows = slice(rank * workers, (rank + 1) * workers)
            executor.start(logits if rank == 0 else None, None if spans is None else spans[rows], None if span_count is None else span_count[rows],
                           watched and rank == 0)

    def run(self) -> int:
        """Launch all kernels, wait for all, fetch what they made; returns the gravest of their codes."""
        launched: list[CudaRankExecutor] = []
        for executor in self.executors:  # what was sent and cleared is there before any kernel can write to another's memory
            executor.program.device.use()
            executor.program.device.synchronize()
        try:
            for executor in self.executors:
                executor.launch()
                launched.append(executor)
        except BaseException:
            for executor in launched:
                executor.tell_to_stop()
            raise
        running = list(self.executors)
        while running:
            if not running.pop(0).watch():
                for other in running:
                    other.tell_to_stop()
        code = max(executor.collect() for executor in self.executors)
        if code == layout.RESULT["done"]:
            self.flags.end(max(int(e.state.step[0]["number"]) for e in self.executors))
        else:
            self.flags.forget()
        return code

    def stalls(self) -> list[np.void]:
        """What the ranks waited for when they gave up; zeros where one did not."""
        return [e.state.stall[0] for e in self.executors]

    def poll(self, length: np.ndarray, finish: np.ndarray) -> None:
        self.executors[0].poll(length, finish)

    def cancel(self) -> None:
        """Rank 0 tells the others, so that all end after the same step."""
        self.executors[0].cancel()

    def now_ns(self) -> int:
        return self.executors[0].now_ns()


def build_cuda_group_engine(graph: SMTaskGraph, source: WeightSource, *, progress: BuildProgress | None = None, pipelining: bool = True,
                            random_seed: int | None = None, load: bool = True, one_device: int | None = None) -> CudaGroupEngine:
    """Compile the program and bring each rank's part of the weights to devices 0, 1, ... (`load`), or all to `one_device`.

    With `random_seed` matrices are random, made on the devices. Raises `TargetError` before a minute of compiling where devices are
    missing, too small, or cannot reach each other.
    """
    report = progress or (lambda stage, done, total: None)
    plan = hardware.load(graph.target).kernel
    assert plan is not None
    if load:
        ids = [one_device] if one_device is not None else check_device_ids(None, graph.ranks, device_count())
        devices = [Device(index) for index in ids]
        connect(devices)
        for device in devices:
            device.use()
            check_device(device, graph, plan, shared_bytes(plan), graph.peer_bytes)
    builder = CudaProgramBuilder(graph)
    report("compile the program", 0, 1)
    cubin = compile_cuda_program(builder, plan)
    report("compile the program", 1, 1)
    engine = CudaGroupEngine(graph, None, None, pipelining, builder=builder, cubin=cubin, sources=shard_sources(graph, source),  # type: ignore[arg-type]
                             random_seed=random_seed, one_device=one_device)
    if load:
        engine.on_devices(engine.devices(None), lambda done, total: report("bring the weights to the devices", done, total))
    return engine
