"""Several GPUs as one engine, as far as no GPU is needed: devices that are refused, flags over many runs, launching and stopping together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpk.codegen import cuda_source, layout, nvrtc
from mpk.codegen.cuda_program import CudaProgramBuilder
from mpk.codegen.nvrtc import compile_cubin
from mpk.errors import RequestError, TargetError
from mpk.runtime.cuda_group import CudaGroupEngine, CudaGroupExecutor
from mpk.runtime.cuda_peers import addresses, require_peer_access
from mpk.runtime.group import FLAGS, FlagBases, check_device_ids
from tests.test_shard import config, lower

DONE, STALLED = layout.RESULT["done"], layout.RESULT["stalled"]


class Linked:
    """A device that reaches those of `others`."""

    def __init__(self, index: int, others: tuple[int, ...]) -> None:
        self.index, self.others = index, others

    def can_reach(self, other: Linked) -> bool:
        return other.index == self.index or other.index in self.others


def test_the_pair_of_devices_without_access_is_named() -> None:
    devices: list[Any] = [Linked(0, (1, 2)), Linked(1, (0, 2)), Linked(2, (0,))]
    require_peer_access(devices[:2])
    with pytest.raises(TargetError) as error:
        require_peer_access(devices)
    assert str(error.value) == ("devices 2 and 1, expected access to each other's memory, got device 2 cannot reach device 1; choose device_ids that are "
                                "linked (nvidia-smi topo -p2p rw shows which)")


@pytest.mark.parametrize(("ids", "ranks", "known", "text"), [
    ([0], 2, 4, "device_ids [0] for tensor_parallel_size 2, expected 2 different devices out of 4; device_ids=[0, 1]"),
    ([1, 1], 2, 4, "device_ids [1, 1] for tensor_parallel_size 2, expected 2 different devices out of 4; device_ids=[0, 1]"),
    (None, 4, 2, "device_ids [0, 1, 2, 3] for tensor_parallel_size 4, expected 4 different devices out of 2; a smaller tensor_parallel_size, or a "
                 "machine with more devices"),
])
def test_devices_that_cannot_be_are_refused(ids: list[int] | None, ranks: int, known: int, text: str) -> None:
    with pytest.raises(TargetError) as error:
        check_device_ids(ids, ranks, known)
    assert str(error.value) == text
    assert check_device_ids([3, 1], 2, 4) == [3, 1]


def test_no_flag_comes_again_before_peer_memory_is_cleared() -> None:
    """Whatever the runs, between two clearings their flags are apart and fit a word."""
    rng, flags = np.random.default_rng(1), FlagBases(163)
    last, clearings = 0, 0
    for _ in range(1500):
        most = int(rng.integers(1, 200_000))
        base, clear = flags.begin(most)
        clearings += clear
        last = 0 if clear else last
        first, end = base + 163, base + most * 163 + 162  # of steps 1 to `most`
        assert first > last and end < FLAGS
        taken = int(rng.integers(1, most + 1))
        last = base + taken * 163 + 162
        flags.end(taken)
    assert clearings > 0
    flags.forget()
    assert flags.begin(10) == (0, True)


class Rank:
    """A rank's executor that notes what is asked of it."""

    def __init__(self, log: list[str], rank: int, ends_well: bool = True, launches: bool = True) -> None:
        self.log, self.rank, self.ends_well, self.launches = log, rank, ends_well, launches
        self.peer_memory, self.peers = SimpleNamespace(address=1000 + rank, clear=lambda: log.append(f"clear {rank}")), []
        self.state = SimpleNamespace(step=[{"number": 5}], stall=[rank], sequences=np.array([(3,)], [("max_length", int)]))
        self.program = SimpleNamespace(device=SimpleNamespace(use=lambda: None, synchronize=lambda: log.append(f"synchronize {rank}")))

    def launch(self) -> None:
        if not self.launches:
            raise RequestError("no launch")
        self.log.append(f"launch {self.rank}")

    def watch(self) -> bool:
        self.log.append(f"watch {self.rank}")
        return self.ends_well

    def tell_to_stop(self) -> None:
        self.log.append(f"stop {self.rank}")

    def collect(self) -> int:
        return DONE if self.ends_well else STALLED


def group(*ranks: Any) -> CudaGroupExecutor:
    graph = lower(config(hidden=64), 2, target="h200", dtype="bf16", workers=4)
    return CudaGroupExecutor(SimpleNamespace(graph=graph), list(ranks), 1.0)  # type: ignore[arg-type]


def test_all_kernels_are_launched_behind_all_copies_and_before_any_is_waited_for() -> None:
    log: list[str] = []
    executor = group(Rank(log, 0), Rank(log, 1))
    assert executor.run() == DONE
    assert log == ["synchronize 0", "synchronize 1", "launch 0", "launch 1", "watch 0", "watch 1"]
    assert executor.executors[0].peers == executor.executors[1].peers == [1000, 1001]
    assert executor.flags.next == (5 + 2) * executor.flags.messages


def test_a_rank_that_gave_up_stops_the_others_and_flags_begin_anew() -> None:
    log: list[str] = []
    executor = group(Rank(log, 0, ends_well=False), Rank(log, 1), Rank(log, 2))
    assert executor.run() == STALLED
    assert log[6:] == ["watch 0", "stop 1", "stop 2", "watch 1", "watch 2"]
    assert executor.flags.begin(1) == (0, True) and executor.stalls() == [0, 1, 2]


def test_a_launch_that_fails_stops_those_before() -> None:
    log: list[str] = []
    with pytest.raises(RequestError, match="no launch"):
        group(Rank(log, 0), Rank(log, 1, launches=False), Rank(log, 2)).run()
    assert log[3:] == ["launch 0", "stop 0"]


def test_ranks_have_tables_in_common_and_weights_of_their_own() -> None:
    graph = lower(config(hidden=64, head_dim=16, intermediate=256), 2, target="h200", dtype="bf16", workers=4)
    from mpk.frontend.shard_source import shard_sources
    from tests.test_shard import model

    source = model(config(hidden=64, head_dim=16, intermediate=256)).source
    engine = CudaGroupEngine(graph, None, None, builder=CudaProgramBuilder(graph), cubin=None, sources=shard_sources(graph, source))  # type: ignore[arg-type]
    first, second = engine.params
    assert first.shape == second.shape and not np.array_equal(first, second)
    numbers = {(int(r["instruction"]["iargs"][0]), int(r["instruction"]["iargs"][1])) for r in engine.tables.records}
    assert {m for m, count in numbers if count} == set(range(6)) and {count for _, count in numbers} == {0, 6}
    assert addresses([SimpleNamespace(address=5)]) == [5]  # type: ignore[list-item]


def test_a_product_that_sends_compiles_within_the_registers_of_its_threads() -> None:
    try:
        nvrtc.version()
    except TargetError:
        pytest.skip("NVRTC is not installed")
    source = """
#include "mpk/program.cuh"
#include "linear/cuda.cuh"
struct Variant { static constexpr int n = 4096, k = 2048, epilogue = 3, columns = 4104, ranks = 8, two_shot_rows = 4, tile_columns = 8; static constexpr float eps = 0;
                 static constexpr bool bf16 = true, norm = false, bias = true, gather_logit_rows = false; };
struct Dispatch {
  __device__ __forceinline__ void operator()(const mpk::Context& c, const mpk::Instruction& i, mpk::Block& b) const { mpk::linear::run<Variant>(c, i, b); }
};
extern "C" __global__ void __launch_bounds__(mpk::BLOCK_THREADS, 1) mpk_run(const __grid_constant__ mpk::Arguments a) { mpk::run_program(a, Dispatch{}); }
"""
    cubin = compile_cubin(source, cuda_source.headers(["linear"]), "sm_90a", cuda_source.OPTIONS)
    assert cubin.resources["mpk_run"].registers <= 168 and cubin.resources["mpk_run"].spill_stores < 400
