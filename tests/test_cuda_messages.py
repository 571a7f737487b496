"""Messages between ranks on the device: what a product, an embedding and a sum send, and what sums and gathers make of it, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from mpk.codegen import layout, nvrtc
from mpk.errors import TargetError
from mpk.graph.tensor_graph import Scalar
from mpk.runtime.cuda_device import device_count
from mpk.tasks.all_gather.cases import CASES as GATHER
from mpk.tasks.all_reduce.cases import CASES as REDUCE
from mpk.tasks.base import kind_of
from mpk.tasks.case import Case
from mpk.tasks.messages import in_two_shots, owner_of_tile
from mpk.tasks.packing import from_bf16, to_bf16
from tests.support.cuda_kinds import STEP, Machine, compiled, put_step, spread

EMBED: dict[str, Scalar] = {"bf16": True, "send": True, "hidden": 72, "vocab": 48, "columns": 80, "ranks": 3, "two_shot_rows": 4}
MESSAGE, MESSAGES, BASE = 3, 7, 1000
FLAG = BASE + STEP * MESSAGES + MESSAGE


def variants() -> list[tuple[str, dict[str, Scalar]]]:
    found = [(c.op.kind, dict(kind_of(c.op).variant(c.op, c.graph, "bf16"))) for c in (*REDUCE, *GATHER)]
    return [*found, ("embed", EMBED)]


@pytest.mark.parametrize(("kind", "constants"), variants(), ids=lambda v: v if isinstance(v, str) else ",".join(str(x) for x in v.values()))
def test_bodies_fit_the_registers_of_a_block(kind: str, constants: Mapping[str, Scalar]) -> None:
    try:
        nvrtc.version()
    except TargetError:
        pytest.skip("NVRTC is not installed")
    for resources in compiled(kind, constants).resources.values():
        assert resources.registers <= 232, "CONSUMER_REGISTERS of block.cuh"
        assert resources.spill_stores == 0


def words(values: np.ndarray, flag: int = FLAG) -> np.ndarray:
    """uint64: float32 values with a flag."""
    return values.astype(np.float32).view(np.uint32).astype(np.uint64) | np.uint64(flag) << np.uint64(32)


def floats(w: np.ndarray) -> np.ndarray:
    """Values of words, NaN where the flag is not that of the message."""
    return np.where(w >> np.uint64(32) == FLAG, (w & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32), np.float32(np.nan))


class Ranks:
    """Peer memory of all ranks, filled with what each of them would have sent; the machine runs one rank."""

    def __init__(self, rank: int, rows: int, ranks: int, columns: int) -> None:
        self.rank, self.shape = rank, (rows, ranks, columns)
        self.machine = Machine(emulated=device_count() == 0, max_batch=1)
        self.parts = np.random.default_rng(5).standard_normal(self.shape, dtype=np.float32)

    def put(self, memory: list[np.ndarray]) -> None:
        """Upload the peer memory of every rank (uint64 [rows, ranks, columns])."""
        for r, words_ in enumerate(memory):
            self.machine.put(f"peer_memory{r}", words_, field=False)
        addresses = np.array([self.machine.memory[f"peer_memory{r}"].address for r in range(len(memory))], np.uint64)
        self.machine.put("peers", addresses)
        self.machine.launch["rank"], self.machine.launch["flag_base"] = self.rank, BASE

    def memory(self, rank: int) -> np.ndarray:
        return self.machine.get(f"peer_memory{rank}")


@pytest.mark.parametrize("case", REDUCE, ids=lambda c: c.label)
def test_sums_are_those_of_the_reference_on_every_rank(case: Case) -> None:
    a, kind = case.op.attrs, kind_of(case.op)
    n, width, ranks = int(a["n"]), int(a["columns"]), int(a["ranks"])
    tiles = kind.tiles(case.op, case.graph)
    for rows in (1, 3, 7, 16):
        results = []
        for rank in (0, ranks - 1):
            run = Ranks(rank, rows, ranks, width)
            if a["control"]:
                run.parts[0, 0, n] = 1.0
            total = run.parts[:, 0, :n].copy()
            for r in range(1, ranks):
                total += run.parts[:, r, :n]
            own = np.zeros(run.shape, np.uint64)
            sent = run.parts.copy()
            two = in_two_shots(rows, a)
            for tile in range(tiles if two else 0):  # of tiles that others own their sums have come, and no parts
                owner, columns = owner_of_tile(tile, tiles, ranks), slice(tile * 16, min(tile * 16 + 16, n))
                if owner != rank:
                    sent[:, :, columns] = np.nan
                    sent[:, owner, columns] = total[:, columns]
            own[:] = np.where(np.isnan(sent), np.uint64(0), words(sent))
            run.put([own if r == rank else np.zeros(run.shape, np.uint64) for r in range(ranks)])
            before = to_bf16(np.random.default_rng(9).standard_normal((rows, n), dtype=np.float32))
            poison = np.full((rows, n), 0x7FC5, np.uint16)
            put_step(run.machine, ((0, 3, rows),), np.zeros(rows, np.int32), np.array([rows - 1]), rows)
            run.machine.buffers(("x", "residual", "agreed"), min(3, rows), x=poison, residual=before, agreed=np.full((1, 1), 7, np.int32))
            run.machine.offsets["part"] = 0
            run.machine.run("all_reduce", kind.variant(case.op, case.graph, "bf16"), kind.operands, spread(tiles, 2), iargs=(MESSAGE, MESSAGES))
            expected = from_bf16(before) + total if a["residual"] else total
            assert np.array_equal(run.machine.get("x"), to_bf16(expected)), f"{case.label}, {rows} rows, rank {rank}"
            assert run.machine.is_cleared("x")
            if a["control"]:
                assert run.machine.get("agreed")[0, 0] == 1 and run.machine.is_cleared("agreed")
            results.append(run.machine.get("x"))
            for r in range(ranks if two else 0):
                for tile in range(tiles):
                    columns = slice(tile * 16, min(tile * 16 + 16, n))
                    seen = floats(run.memory(r))[:, rank, columns]
                    if r != rank and owner_of_tile(tile, tiles, ranks) == rank:
                        assert np.array_equal(seen, total[:, columns])
        assert np.array_equal(*results)


@pytest.mark.parametrize("case", GATHER, ids=lambda c: c.label)
def test_shares_of_the_logits_stand_side_by_side(case: Case) -> None:
    a, kind = case.op.attrs, kind_of(case.op)
    n, width, ranks, rows = int(a["n"]), int(a["columns"]), int(a["ranks"]), 5
    run = Ranks(1, rows, ranks, width)
    run.put([words(run.parts) if r == 1 else np.zeros(run.shape, np.uint64) for r in range(ranks)])
    put_step(run.machine, ((0, 3, rows),), np.zeros(rows, np.int32), np.arange(rows), rows)
    run.machine.buffers((), 0, out=np.full((rows, n), np.nan, np.float32))
    run.machine.offsets["part"] = 0
    run.machine.run("all_gather", kind.variant(case.op, case.graph, "bf16"), kind.operands, spread(kind.tiles(case.op, case.graph), 3), iargs=(MESSAGE, MESSAGES))
    assert np.array_equal(run.machine.get("out"), run.parts.reshape(rows, -1)[:, :n])


@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("rank", [0, 2])
def test_embeddings_go_to_all_ranks_or_to_the_owner_of_a_tile(rank: int, rows: int) -> None:
    hidden, share, width, ranks = (int(EMBED[name]) for name in ("hidden", "vocab", "columns", "ranks"))
    matrix = to_bf16(np.random.default_rng(2).standard_normal((share, hidden), dtype=np.float32))
    tokens = np.random.default_rng(3).integers(0, share * ranks, rows).astype(np.int32)
    run = Ranks(rank, rows, ranks, width)
    run.put([np.zeros(run.shape, np.uint64) for _ in range(ranks)])
    run.machine.put("weights", matrix)
    run.machine.put("cancel", np.array([1], np.int32))
    put_step(run.machine, ((0, 3, rows),), tokens, np.array([rows - 1]), rows)
    run.machine.buffers((), 0, nothing=np.zeros((1, 1), np.float32))
    run.machine.offsets["part"] = 0
    run.machine.run("embed", EMBED, ("part",), spread(5, 2), iargs=(MESSAGE, MESSAGES))
    own = tokens // share == rank
    expected = np.where(own[:, None], from_bf16(matrix)[np.where(own, tokens - rank * share, 0)], np.float32(0))
    for to in range(ranks):
        seen = floats(run.memory(to))[:, rank, :hidden]
        for tile in range(5):
            columns = slice(tile * 16, min(tile * 16 + 16, hidden))
            if rows > int(EMBED["two_shot_rows"]) and owner_of_tile(tile, 5, ranks) != to:
                assert np.isnan(seen[:, columns]).all()
            else:
                assert np.array_equal(seen[:, columns], expected[:, columns])
        assert np.array_equal(floats(run.memory(to))[0, 0, hidden], np.float32(1.0) if rank == 0 else np.float32(np.nan), equal_nan=True)


def test_the_kernel_has_room_for_the_addresses_of_all_ranks() -> None:
    assert layout.dtype("Kernel")["peers"].shape == (layout.MAX_RANKS,)
