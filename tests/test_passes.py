"""The passes on real model graphs: what each guarantees to the next."""

from __future__ import annotations

import re
import resource
import time
from itertools import pairwise
from pathlib import Path

import pytest

from mpk.errors import InternalError
from mpk.graph.order import Order
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.models import registry, shapes
from mpk.passes import dependencies, fuse, partition, pipeline, schedule, split_attention, verify
from mpk.passes.partition import Options
from mpk.targets import hardware


def lower(name: str = "SmolLM2-135M", workers: int = 4, target: str = "cpp") -> SMTaskGraph:
    machine = hardware.load(target)
    return pipeline.lower(registry.build_graph(shapes.shape(name)), machine.with_workers(workers) if target == "cpp" else machine, Options())


@pytest.fixture(scope="module")
def graph() -> SMTaskGraph:
    return lower()


@pytest.mark.parametrize(("name", "biases", "head_norms"), [("SmolLM2-135M", 0, 0), ("Qwen2.5-0.5B", 24, 0), ("Qwen3-0.6B", 0, 28)])
def test_fusion_leaves_six_operators_a_layer_and_no_plain_ones(name: str, biases: int, head_norms: int) -> None:
    config = shapes.shape(name)
    fused = fuse.run(registry.build_graph(config), 16)
    layer = [op.kind for op in fused.operators if op.layer == 3]
    assert layer == ["qkv", "attention", "linear", "linear", "linear"]
    epilogues = [op.attrs["epilogue"] for op in fused.operators if op.layer == 3 and op.kind == "linear"]
    assert epilogues == ["residual", "swiglu", "residual"]
    assert sum("bias" in op.weights for op in fused.operators if op.kind == "qkv") == biases
    assert sum("q_norm" in op.weights for op in fused.operators if op.kind == "qkv") == head_norms
    assert sum("norm" in op.weights for op in fused.operators) == 2 * config.num_layers + 1
    assert [op.kind for op in fused.operators if op.layer < 0] == ["embed", "rope_table", "linear", "sample", "advance"]


@pytest.mark.parametrize(("kv_heads", "workers", "splits"), [(3, 2, 2), (4, 2, 1), (8, 132, 16), (2, 132, 65), (1, 1, 1), (8, 4, 1)])
def test_attention_is_split_only_as_far_as_workers_would_idle(kv_heads: int, workers: int, splits: int) -> None:
    chosen = split_attention.choose_splits(kv_heads, workers)
    tasks = kv_heads * chosen
    assert tasks / (-(-tasks // workers) * workers) >= 0.95
    assert chosen <= splits


def test_tasks_of_an_operator_cover_its_tiles_once_in_equal_shares(graph: SMTaskGraph) -> None:
    by_op: dict[int, list[tuple[int, int]]] = {}
    for t in graph.tasks:
        by_op.setdefault(t.op, []).append((t.tile_begin, t.tile_end))
    for tiles in by_op.values():
        assert tiles[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(tiles))
        sizes = [end - begin for begin, end in tiles]
        assert max(sizes) - min(sizes) <= 1


def test_ranges_rotate_so_that_no_worker_always_has_the_larger_share() -> None:
    assert partition.ranges(7, 3, 0) == [(0, 3), (3, 5), (5, 7)]
    assert partition.ranges(7, 3, 1) == [(0, 2), (2, 5), (5, 7)]
    assert partition.ranges(8, 3, 2) == [(0, 3), (3, 5), (5, 8)]


def test_overlapping_writes_within_an_operator_are_an_internal_error() -> None:
    raw = partition.run(fuse.run(registry.build_graph(shapes.shape("SmolLM2-135M")), 16), hardware.load("cpp").with_workers(2), Options())
    first, second = [t for t in raw.tasks if raw.operator(t).name == "l0.gate_up"]
    second.writes = (first.writes[0],)
    with pytest.raises(InternalError, match=r"l0\.gate_up: tasks \d+ and \d+ both write l0\.mlp"):
        dependencies.run(raw)


def test_every_dependency_holds_after_event_fusion() -> None:
    machine = hardware.load("cpp").with_workers(5)
    raw = partition.run(split_attention.run(fuse.run(registry.build_graph(shapes.shape("SmolLM2-135M")), 16), 5), machine, Options())
    raw = schedule.run(dependencies.run(raw), machine)
    wanted = {task: frozenset().union(*sets) for task, sets in raw.dependencies.items()}
    fused = dict(pipeline.task_passes(machine))["event_fusion"](raw)
    order = Order(fused)
    assert sum(len(s) for s in wanted.values()) > 5000
    for task, before in wanted.items():
        assert all(order.happens_before(p, task) for p in before)
    assert max(len(t.signals) for t in fused.tasks) <= machine.max_signals_per_task + 1


def test_buffers_of_different_layers_share_memory(graph: SMTaskGraph) -> None:
    sizes = sum(a.size for a in graph.arena.values())
    assert graph.arena_bytes < sizes / 2
    assert graph.arena_bytes >= max(a.size for a in graph.arena.values())


def test_queues_follow_the_sequential_order_and_hold_every_task(graph: SMTaskGraph) -> None:
    assert sorted(t for q in graph.queues for t in q) == list(range(len(graph.tasks)))
    assert all(q == sorted(q) for q in graph.queues)


def test_dumps_are_written_for_every_pass_and_stop_after_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPK_DUMP", str(tmp_path))
    monkeypatch.setenv("MPK_STOP_AFTER", "schedule")
    stopped = lower()
    names = [p.stem.split("_", 1)[1] for p in sorted(tmp_path.iterdir())]
    assert names[0] == "model" and names[-1] == "schedule" and {"fuse", "partition", "dependencies"} <= set(names)
    assert stopped.queues and not stopped.events
    assert re.search(r"l0\.qkv", (tmp_path / "01_fuse.txt").read_text())


def test_lowering_twice_gives_the_same_text() -> None:
    assert lower(workers=3).to_text() == lower(workers=3).to_text()


def test_llama_70b_on_132_sms_is_lowered_and_verified_in_twenty_seconds_and_four_gigabytes() -> None:
    started = time.process_time()  # of this process: other work on the machine does not count
    big = lower("Llama-3.1-70B", target="h200")
    assert time.process_time() - started < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # in kB
    assert len(big.tasks) > 30_000 and big.num_workers == 132
    assert sum(not e.carried for e in big.events) < 2 * len(big.tensor_graph.operators)
    verify.run(big)


def test_ready_tasks_walk_through_the_whole_step(graph: SMTaskGraph) -> None:
    first = graph.ready_tasks([])
    assert first and {graph.operator(t).name for t in first} <= {"embed", "rope"}
    done: set[int] = set()
    waves = 0
    while len(done) < len(graph.tasks):
        ready = graph.ready_tasks(done)
        assert ready and all(graph.predecessors(t) - {len(graph.tasks) - 1} <= done for t in ready)
        done.update(ready)
        waves += 1
    assert waves >= graph.critical_path_length()
    assert graph.ready_tasks(done) == []


@pytest.mark.parametrize(("workers", "ranks"), [(1, 1), (2, 3), (4, 1)])
def test_the_critical_path_follows_queues_and_messages_too(workers: int, ranks: int) -> None:
    config = shapes.shape("SmolLM2-135M")
    graph = pipeline.lower(registry.build_graph(config), hardware.load("cpp").with_workers(workers), Options(16, 16, "bf16", ranks))
    assert graph.critical_path_length() >= 5 * config.num_layers  # no layer can begin before the one ahead of it has ended
    assert (graph.critical_path_length() == len(graph.tasks)) == (workers == 1)
