"""Tiles of 8 rows of weights: which products get them, and that such graphs are what every later pass and the packing expect."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpk.codegen.cuda_program import CudaProgramBuilder
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.graph.tensor_graph import Operator
from mpk.models import registry, shapes
from mpk.models.config import DecoderConfig, RopeScaling, first_layers
from mpk.passes import cut_tiles, pipeline
from mpk.passes.partition import Options, most_tasks, short_name
from mpk.targets import hardware
from mpk.tasks.base import kind_of
from mpk.tasks.matrices import matrix_bytes
from mpk.tasks.stages import TILE_ROWS, stages_of

H200 = hardware.load("h200")


def lower(config: DecoderConfig, ranks: int = 1, workers: int = H200.workers, half: bool = True) -> SMTaskGraph:
    return pipeline.lower(registry.build_graph(config), H200.with_workers(workers), Options(16, 16, "bf16", ranks, half_tiles=half))


def products(graph: SMTaskGraph) -> dict[int, Operator]:
    return {i: op for i, op in enumerate(graph.tensor_graph.operators) if kind_of(op).halves}


def halved(graph: SMTaskGraph) -> set[str]:
    """Products, without their layer, in tiles of 8 rows."""
    return {short_name(op) for op in products(graph).values() if stages_of(op).rows < TILE_ROWS}


def most_rows(graph: SMTaskGraph, index: int) -> int:
    """Rows of weights of the largest task of an operator."""
    return stages_of(graph.tensor_graph.operators[index]).rows * max(t.tile_end - t.tile_begin for t in graph.tasks if t.op == index)


@pytest.mark.parametrize(("name", "ranks", "expected"), [
    ("Qwen3-0.6B", 1, {}), ("Qwen3-1.7B", 1, {}), ("Llama-3.2-1B", 1, {}), ("Llama-3.1-8B", 1, {}),
    ("Llama-3.1-8B", 2, {"qkv": (32, 24)}), ("Llama-3.1-70B", 2, {"qkv": (48, 40)}), ("Llama-3.1-70B", 8, {"gate_up": (64, 56)})])
def test_products_get_such_tiles_where_the_largest_share_becomes_smaller(name: str, ranks: int, expected: dict[str, tuple[int, int]]) -> None:
    config = first_layers(shapes.shape(name), 1)
    whole, graph = lower(config, ranks, half=False), lower(config, ranks)
    assert halved(whole) == set() and halved(graph) == set(expected)
    for index, op in products(graph).items():
        before, after = most_rows(whole, index), most_rows(graph, index)
        assert (before, after) == expected.get(short_name(op), (before, before))
    assert graph.weight_bytes == whole.weight_bytes
    assert any("tiles of 8 rows" in note for note in graph.notes) == bool(expected)


def test_a_target_that_does_not_say_so_has_whole_tiles_only() -> None:
    config = first_layers(shapes.shape("Llama-3.1-8B"), 1)
    assert halved(pipeline.lower(registry.build_graph(config), replace(H200, half_tiles=False), Options(16, 16, "bf16", 2))) == set()


def test_a_product_stays_whole_where_idle_workers_make_its_input() -> None:
    config = replace(first_layers(shapes.shape("Llama-3.1-8B"), 1), hidden_size=1024)  # 64 tiles of o and down
    assert not halved(lower(config)) & {"o"}


def test_a_sum_over_ranks_is_cut_as_what_is_sent() -> None:
    graph = lower(first_layers(shapes.shape("Llama-3.1-8B"), 1), 2, workers=110)
    assert "down" in halved(graph)
    operators = graph.tensor_graph.operators
    for index, op in products(graph).items():
        if op.attrs["epilogue"] == "send":
            own = [(t.tile_begin, t.tile_end, t.worker) for t in graph.tasks if t.op == index]
            assert own == [(t.tile_begin, t.tile_end, t.worker) for t in graph.tasks if t.op == index + 1]
            assert kind_of(operators[index + 1]).tiles(operators[index + 1], graph.tensor_graph) == own[-1][1]


@st.composite
def models(draw: st.DrawFn) -> tuple[DecoderConfig, int, int]:
    ranks, kv_heads = draw(st.sampled_from([1, 1, 2, 4])), draw(st.sampled_from([4, 8]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
    config = DecoderConfig("LlamaForCausalLM", draw(st.integers(50, 9000)), 8 * draw(st.integers(1, 300)), 32 * draw(st.integers(1, 120)), 1, heads, kv_heads,
                           draw(st.sampled_from([32, 64, 128])), 1e-5, 128, RopeScaling())
    return config, ranks, draw(st.integers(2, 140))


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(models())
def test_any_model_is_proven_and_packed_the_better_of_both_ways(example: tuple[DecoderConfig, int, int]) -> None:
    config, ranks, workers = example
    target, options = H200.with_workers(workers), Options(16, 16, "bf16", ranks)
    graph = lower(config, ranks, workers)  # the verifier passes it
    whole = {op.name: op for op in lower(config, ranks, workers, half=False).tensor_graph.operators}
    builder = CudaProgramBuilder(graph)
    for index, op in products(graph).items():
        tensors, plan, before = graph.tensor_graph, builder.plans[index], whole[op.name]
        tiles = kind_of(op).tiles(op, tensors)
        sizes = sorted(t.tile_end - t.tile_begin for t in graph.tasks if t.op == index)
        assert sum(sizes) == tiles and sizes[-1] - sizes[0] <= 1 and len(sizes) == most_tasks(op, tensors, target, options)
        if stages_of(op).rows < TILE_ROWS:
            share = TILE_ROWS * -(-kind_of(before).tiles(before, tensors) // most_tasks(before, tensors, target, options))
            assert stages_of(op).rows * sizes[-1] <= share * (1 - cut_tiles.WORTH)
            assert (plan.shape.bytes, plan.place.size) == (stages_of(before).bytes, tiles // 2 * stages_of(before).count + tiles % 2 * plan.shape.count)
        assert sorted(plan.place.reshape(-1).tolist()) == list(range(0, matrix_bytes(kind_of(op), op, graph), plan.shape.bytes))
        assert plan.place.shape == (tiles, plan.shape.count)
