"""Several ranks that share one model: what the engines of both back ends have in common, and the engine of thread groups.

The host speaks with rank 0 only. Before a run the other ranks get copies of its sequences; in the run all sample the same tokens from
the same logits and plan the same steps, so that rank 0's state is everyone's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mpk.codegen import layout
from mpk.codegen.weights import PackedWeights
from mpk.errors import TargetError
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.runtime.engine import Engine
from mpk.runtime.memory import address, available_bytes, zeroed
from mpk.runtime.state import State

FLAGS = 1 << 32  # that a word can bear


class FlagBases:
    """What the flags of each run start from, so that no flag in peer memory is one that a later run waits for."""

    def __init__(self, messages: int) -> None:
        self.messages, self.next = messages, 0

    def begin(self, most_steps: int) -> tuple[int, bool]:
        """(base of a run of at most so many steps, whether peer memory must be cleared before it)."""
        clear = self.next + (most_steps + 2) * self.messages >= FLAGS
        if clear:
            self.next = 0
        return self.next, clear

    def end(self, steps: int) -> None:
        """The run took so many steps."""
        self.next += (steps + 2) * self.messages

    def forget(self) -> None:
        """The run did not end well: clear before the next."""
        self.next = FLAGS


def messages_of(graph: SMTaskGraph) -> int:
    """Messages a step."""
    return max(int(op.attrs.get("messages", 0)) for op in graph.tensor_graph.operators)


def most_steps(state: State) -> int:
    """Most steps that the sequences of a state can take: each computes a token at least."""
    return int(state.sequences["max_length"].sum())


def copy_request(source: State, to: State) -> None:
    """Give another rank the sequences and prompts of rank 0."""
    to.reset()
    to.sequences[:] = source.sequences
    for slot, length in enumerate(source.sequences["length"].tolist()):
        to.tokens[slot, :length] = source.tokens[slot, :length]


def check_device_ids(device_ids: Sequence[int] | None, ranks: int, known: int) -> list[int]:
    """One different device a rank out of `known`; raises `TargetError` with what would work."""
    ids = list(range(ranks)) if device_ids is None else [int(i) for i in device_ids]
    if len(ids) != ranks or len(set(ids)) != ranks or not all(0 <= i < known for i in ids):
        raise TargetError(f"device_ids {ids} for tensor_parallel_size {ranks}", expected=f"{ranks} different devices out of {known}",
                          remedy=f"device_ids={list(range(ranks))}" if known >= ranks else "a smaller tensor_parallel_size, or a machine with more devices")
    return ids


def run_all(bodies: Sequence[Callable[[], int]]) -> int:
    """Run one function a rank at the same time, each in a thread of its own, and return the gravest of their codes (layout.RESULT)."""
    codes = [0] * len(bodies)
    failures: list[BaseException] = []

    def call(rank: int) -> None:
        try:
            codes[rank] = bodies[rank]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(rank,), name=f"mpk-rank-{rank}", daemon=True) for rank in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return max(codes)


@dataclass(repr=False)
class ThreadGroupEngine(Engine):
    """One program, and the packed weights of every rank; `weights` are those of rank 0."""

    shards: list[PackedWeights] = field(default_factory=list)

    def executor(self, batch: int, context: int, explicit: bool, device_ids: Sequence[int] | None, stall_limit_s: float) -> ThreadGroupExecutor:
        ranks = self.graph.ranks
        check_device_ids(device_ids, ranks, ranks)
        available = available_bytes()
        states = [State(self.graph, batch, context, explicit, available=None if available is None else available // ranks) for _ in range(ranks)]
        return ThreadGroupExecutor(self, states, stall_limit_s)


class ThreadGroupExecutor:
    """Runs the compiled library once a rank, each with memory of its own, and peer memory that all write.

    `halt`: (rank, step), a rank whose first worker stops working in that step; for tests.
    """

    def __init__(self, engine: ThreadGroupEngine, states: list[State], stall_limit_s: float) -> None:
        graph = engine.graph
        self.engine, self.states, self.stall_limit_s = engine, states, stall_limit_s
        self.state = states[0]
        pages = min(s.num_pages for s in states)
        for state in states:  # all ranks hand out the same pages
            state.num_pages = pages
        self.peer_memory = [zeroed((graph.peer_bytes,), np.uint8) for _ in states]
        self.peers = np.array([address(memory) for memory in self.peer_memory], np.uint64)
        self.group_stop = np.zeros(1, np.int32)
        self.flags = FlagBases(messages_of(graph))
        self.halt: tuple[int, int] | None = None

    def start(self, logits: np.ndarray | None, spans: np.ndarray | None, span_count: np.ndarray | None, watched: bool) -> None:
        """Copy the request to all ranks and make their launches; `spans`, `span_count`: rows of rank 0's workers, then of rank 1's, ..."""
        base, clear = self.flags.begin(most_steps(self.state))
        self.group_stop[0] = 0
        for memory in self.peer_memory if clear else ():
            memory[:] = 0
        for state in self.states[1:]:
            copy_request(self.state, state)
        self.arrays, self.launches = [], []
        for rank, state in enumerate(self.states):
            arrays, launch = self._launch(rank, state, logits if rank == 0 else None, spans, span_count)
            launch["flag_base"] = base
            self.arrays.append(arrays)
            self.launches.append(launch)

    def _launch(self, rank: int, state: State, logits: np.ndarray | None, spans: np.ndarray | None,
                span_count: np.ndarray | None) -> tuple[dict[str, np.ndarray | None], np.ndarray]:
        engine, graph = self.engine, self.engine.graph
        rows = slice(rank * graph.num_workers, (rank + 1) * graph.num_workers)
        arrays = state.arrays(engine.program.tables, engine.shards[rank], logits_out=logits, pipelining=engine.pipelining,
                              spans=None if spans is None else spans[rows], span_count=None if span_count is None else span_count[rows])
        launch = state.launch(arrays, engine.program.scratch_bytes, self.stall_limit_s, threads=graph.ranks * graph.num_workers)
        launch["rank"], launch["ranks"], launch["peers"] = rank, graph.ranks, address(self.peers)
        launch["group_stop"] = address(self.group_stop)
        if self.halt is not None and self.halt[0] == rank:
            launch["halt_step"] = self.halt[1]
        return arrays, launch

    def run(self) -> int:
        """Run all ranks until no sequence has work left."""
        bodies = [lambda launch=launch: self.engine.program.run(launch) for launch in self.launches]
        code = run_all(bodies)
        if code == layout.RESULT["done"]:
            self.flags.end(max(int(s.step[0]["number"]) for s in self.states))
        else:
            self.flags.forget()
        return code

    def stalls(self) -> list[np.void]:
        """What the ranks waited for when they gave up; zeros where one did not."""
        return [s.stall[0] for s in self.states]

    def poll(self, length: np.ndarray, finish: np.ndarray) -> None:
        self.engine.program.poll(self.state.sequences, length, finish)

    def cancel(self) -> None:
        """Rank 0 tells the others, so that all end after the same step."""
        self.engine.program.cancel(self.state.cancel)

    def now_ns(self) -> int:
        return self.engine.program.now_ns()

