"""Engine: a compiled program with its packed weights, ready to make instances."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mpk.codegen.compile import compile_program
from mpk.codegen.program import ProgramBuilder, Tables
from mpk.codegen.weights import PackedWeights, load_weights
from mpk.errors import InternalError, TargetError
from mpk.frontend.shard_source import shard_sources
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.models.shapes import RandomWeights
from mpk.passes.memory import scratch_bytes
from mpk.runtime.memory import address
from mpk.targets.hardware import backend_of
from mpk.tasks.base import WeightSource

if TYPE_CHECKING:
    from mpk.runtime.instance import Instance
    from mpk.runtime.state import State

BuildProgress = Callable[[str, int, int], None]


class Program:
    """A compiled library and the tables it runs. Calls release Python's global lock."""

    def __init__(self, library: Path, tables: Tables, scratch: int) -> None:
        self.tables, self.scratch_bytes, self.library = tables, scratch, library
        try:
            lib = ctypes.CDLL(str(library))
        except OSError as error:
            raise InternalError(f"the compiled program {library} cannot be loaded: {error}") from error
        lib.mpk_run.argtypes, lib.mpk_run.restype = [ctypes.c_void_p], ctypes.c_int
        lib.mpk_poll.argtypes, lib.mpk_poll.restype = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p], None
        lib.mpk_cancel.argtypes, lib.mpk_cancel.restype = [ctypes.c_void_p], None
        lib.mpk_now_ns.argtypes, lib.mpk_now_ns.restype = [], ctypes.c_int64
        self._lib = lib

    def run(self, launch: np.ndarray) -> int:
        """Run until no sequence has work left; `launch` is one Launch. Returns one of `layout.RESULT`."""
        return int(self._lib.mpk_run(address(launch)))

    def poll(self, sequences: np.ndarray, length: np.ndarray, finish: np.ndarray) -> None:
        """Copy length and finish of every sequence into int32 vectors, while the program runs or after."""
        self._lib.mpk_poll(address(sequences), len(sequences), address(length), address(finish))

    def cancel(self, flag: np.ndarray) -> None:
        """Ask the running program to stop after its current step."""
        self._lib.mpk_cancel(address(flag))

    def now_ns(self) -> int:
        """The clock of token times and trace spans."""
        return int(self._lib.mpk_now_ns())


@dataclass(repr=False)
class Engine:
    """What `Compiler.build` returns. One engine serves any number of instances; weights and program are shared and constant."""

    graph: SMTaskGraph
    program: Program
    weights: PackedWeights
    pipelining: bool = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.graph!r})"

    def locate(self, task: int) -> tuple[SMTaskGraph, int]:
        """The graph that a task's number, as programs report it, belongs to, and its number there."""
        return self.graph, task

    def prompt_tasks(self, tokens: int) -> int:
        """Most tasks that a worker runs to read prompts of so many tokens before the first step."""
        return 0

    def executor(self, batch: int, context: int, explicit: bool, device_ids: Sequence[int] | None, stall_limit_s: float) -> Executor:
        """Memory for a batch and what runs the program on it; raises as `create_instance` does."""
        from mpk.runtime.state import State

        if device_ids is not None and list(device_ids) != [0]:
            raise TargetError("device_ids", expected="None or [0], as this target is one device", actual=str(list(device_ids)))
        return ThreadExecutor(self, State(self.graph, batch, context, explicit), stall_limit_s)

    def create_instance(self, max_batch: int | None = None, max_context: int | None = None, *, device_ids: Sequence[int] | None = None,
                        stall_limit_s: float = 10.0, trace_spans: int = 0) -> Instance:
        """Memory to run `max_batch` sequences of up to `max_context` tokens (defaults: what the graph was lowered for, the model's).

        `device_ids`: the devices to run on, one a rank (None: the first; on a target of threads they are groups of threads). A run in which no task finishes for
        `stall_limit_s` seconds raises `StallError`. `trace_spans`: spans kept per worker and run, 0 switches the trace off. Raises
        `RequestError` for sizes out of range, `TargetError` when the key-value cache does not fit the machine's memory.
        """
        from mpk.runtime.instance import Instance

        return Instance(self, max_batch=max_batch, max_context=max_context, device_ids=device_ids, stall_limit_s=stall_limit_s,
                        trace_spans=trace_spans)


class Executor(Protocol):
    """Runs a program on one instance's state."""

    state: State

    def start(self, logits: np.ndarray | None, spans: np.ndarray | None, span_count: np.ndarray | None, watched: bool) -> None:
        """Prepare a run that writes logits and trace into these arrays; `watched`: somebody polls while it runs."""

    def run(self) -> int:
        """Run until no sequence has work left; returns one of `layout.RESULT`."""

    def poll(self, length: np.ndarray, finish: np.ndarray) -> None:
        """Update length and finish of every sequence (int32 vectors), while the program runs or after; tokens below are in the state."""

    def cancel(self) -> None:
        """Ask the running program to stop after its current step."""

    def now_ns(self) -> int:
        """The clock of token times."""

    def stalls(self) -> Sequence[np.void]:
        """After a run that stalled: what each rank waited for (a Stall)."""


class ThreadExecutor:
    """Runs the compiled library in this process, on the state's own arrays."""

    def __init__(self, engine: Engine, state: State, stall_limit_s: float) -> None:
        self.engine, self.state, self.stall_limit_s = engine, state, stall_limit_s
        self.arrays: dict[str, np.ndarray | None] = {}

    def start(self, logits: np.ndarray | None, spans: np.ndarray | None, span_count: np.ndarray | None, watched: bool) -> None:
        program = self.engine.program
        self.arrays = self.state.arrays(program.tables, self.engine.weights, logits_out=logits, pipelining=self.engine.pipelining,
                                        spans=spans, span_count=span_count)
        self.launch = self.state.launch(self.arrays, program.scratch_bytes, self.stall_limit_s)

    def run(self) -> int:
        return self.engine.program.run(self.launch)

    def poll(self, length: np.ndarray, finish: np.ndarray) -> None:
        self.engine.program.poll(self.state.sequences, length, finish)

    def cancel(self) -> None:
        self.engine.program.cancel(self.state.cancel)

    def now_ns(self) -> int:
        return self.engine.program.now_ns()

    def stalls(self) -> Sequence[np.void]:
        return [self.state.stall[0]]


def build_engine(graph: SMTaskGraph, source: WeightSource, *, progress: BuildProgress | None = None, pipelining: bool = True,
                 portable: bool = False, sanitize: str | None = None) -> Engine:
    """Compile the program and pack the weights of a verified graph, or take both from the cache.

    `progress(stage, done, total)`: compilation with total 1, packing in bytes. `pipelining`: workers fetch the weights of their next
    task while they wait. `portable` compiles without the
    machine's own vector extensions; `sanitize` ("thread") is for tests. Raises `TargetError` (no compiler, cache not writable).
    """
    if backend_of(graph.target) == "cuda":
        from mpk.runtime.cuda_engine import build_cuda_engine

        # Billions of random numbers take minutes on the host, so those of a named shape are made on the device (and are others there).
        seed = source.seed + 1 if isinstance(source, RandomWeights) else None
        return build_cuda_engine(graph, source, progress=progress, pipelining=pipelining, random_seed=seed)
    report = progress or (lambda stage, done, total: None)
    builder = ProgramBuilder(graph)
    report("compile the program", 0, 1)
    with ThreadPoolExecutor(1) as pool:  # the compiler is a process of its own: weights are packed meanwhile
        compiled = pool.submit(compile_program, builder.source(), portable=portable, sanitize=sanitize)
        shards = [load_weights(graph, part, _part_of(report, rank, graph.ranks)) for rank, part in enumerate(shard_sources(graph, source))]
        library = compiled.result()
    report("compile the program", 1, 1)
    program = Program(library, builder.tables(), scratch_bytes(graph))
    if graph.ranks > 1:
        from mpk.runtime.group import ThreadGroupEngine

        return ThreadGroupEngine(graph, program, shards[0], pipelining, shards)
    return Engine(graph, program, shards[0], pipelining)


def _part_of(report: BuildProgress, rank: int, ranks: int) -> Callable[[int, int], None]:
    """Progress of packing one rank's weights as progress of all."""
    return lambda done, total: report("pack the weights", rank * total + done, ranks * total)
