"""What the CUDA back end is given as data: stages of weights, loads and instructions of every block, memory by the target's description."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.resources import spills
from mpk import Compiler
from mpk.codegen import cuda_source, layout, nvrtc
from mpk.codegen.cuda_program import CudaProgramBuilder
from mpk.codegen.cuda_weights import fill_rows, fill_tiles
from mpk.errors import RequestError, TargetError
from mpk.frontend.source import LoadedModel
from mpk.graph.order import STEP_EVENT
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.models import registry, shapes
from mpk.models.config import DecoderConfig, RopeScaling, first_layers
from mpk.passes import pipeline
from mpk.passes.memory import lay_out_params
from mpk.passes.partition import Options, short_name
from mpk.runtime import cuda_device
from mpk.runtime.cuda_engine import earliest, launch_plan, weights_of_a_layer
from mpk.runtime.interpreter import ReferenceProgram
from mpk.targets import hardware
from mpk.tasks.base import kind_of
from mpk.tasks.matrices import matrix_bytes, matrix_key
from mpk.tasks.packing import from_bf16, to_bf16
from mpk.tasks.stages import groups, stage_order, stage_shape, stages_of

CONFIG = DecoderConfig("LlamaForCausalLM", 300, 72, 136, 2, 9, 3, 8, 1e-5, 128, RopeScaling())


def lowered(config: DecoderConfig = CONFIG, workers: int = 5) -> tuple[SMTaskGraph, shapes.RandomWeights]:
    source = shapes.RandomWeights(config, registry.build_graph(config))
    return Compiler("h200", workers=workers).lower_model(LoadedModel(config, source, None, "test")), source


def without_flags() -> tuple[SMTaskGraph, shapes.RandomWeights]:
    """The same model for a machine whose description orders everything by counters."""
    source = shapes.RandomWeights(CONFIG, registry.build_graph(CONFIG))
    target = replace(hardware.load("h200"), flagged=False, workers=5)
    return pipeline.lower(registry.build_graph(CONFIG), target, Options(16, 16, "bf16")), source


@pytest.mark.parametrize(("columns", "depth", "count"), [(1024, 1024, 1), (576, 1024, 1), (1100, 512, 3), (2560, 512, 5), (3072, 1024, 3), (14336, 1024, 14)])
def test_a_stage_of_eight_rows_has_twice_the_columns(columns: int, depth: int, count: int) -> None:
    shape = stage_shape(columns, 8)
    assert (shape.depth, shape.count) == (depth, count)
    assert shape.bytes == 16 * depth and shape.padded_columns >= columns


@pytest.mark.parametrize(("columns", "depth", "count"), [(64, 256, 1), (576, 256, 3), (896, 512, 2), (2560, 512, 5), (4864, 256, 19),
                                                         (4096, 512, 8), (14336, 512, 28), (25600, 512, 50)])
def test_a_stage_is_as_deep_as_it_can_be_without_padding_more(columns: int, depth: int, count: int) -> None:
    shape = stage_shape(columns)
    assert (shape.depth, shape.count) == (depth, count)
    assert shape.bytes == 32 * depth and shape.padded_columns >= columns


@pytest.mark.parametrize(("tiles", "expected"), [(1, [1]), (8, [8]), (9, [5, 4]), (14, [7, 7]), (61, [8, 8, 8, 8, 8, 7, 7, 7])])
def test_groups_are_as_equal_as_possible(tiles: int, expected: list[int]) -> None:
    assert groups(tiles) == expected


def test_all_tiles_of_a_group_use_a_part_of_the_input_before_the_next_part() -> None:
    order = stage_order(9, 2)
    assert order[:10] == [(t, 0) for t in range(5)] + [(t, 1) for t in range(5)]
    assert sorted(order) == [(t, s) for t in range(9) for s in range(2)]


def test_stages_fill_the_matrix_and_blocks_find_theirs_in_order() -> None:
    graph, _ = lowered()
    builder = CudaProgramBuilder(graph)
    assert {graph.tensor_graph.operators[i].kind for i in builder.plans} == {"linear", "head"}
    for index, plan in builder.plans.items():
        op = graph.tensor_graph.operators[index]
        assert sorted(plan.place.reshape(-1).tolist()) == list(range(0, plan.place.size * plan.shape.bytes, plan.shape.bytes))
        assert plan.place.size * plan.shape.bytes == matrix_bytes(kind_of(op), op, graph)
        for task in (t for t in graph.tasks if t.op == index):
            fetched = [r.offset + i * r.stride for r in plan.runs[task.id] for i in range(r.count)]
            used = [plan.place[task.tile_begin + t, s] for t, s in stage_order(task.tile_end - task.tile_begin, plan.shape.count)]
            assert fetched == used


def test_stages_that_blocks_use_at_the_same_time_stand_side_by_side() -> None:
    graph, _ = lowered()
    builder = CudaProgramBuilder(graph)
    index = next(i for i in builder.plans if graph.tensor_graph.operators[i].name == "logits")
    plan = builder.plans[index]
    firsts = sorted(plan.runs[t.id][0].offset for t in graph.tasks if t.op == index)
    assert firsts == [i * plan.shape.bytes for i in range(len(firsts))]


def test_every_block_loads_what_its_instructions_use() -> None:
    graph, source = lowered()
    lay_out_params(graph, source)
    tables = CudaProgramBuilder(graph).cuda_tables()
    for block, queue in enumerate(graph.queues):
        loads = tables.loads[tables.load_begin[block] : tables.load_begin[block + 1]]
        records = tables.records[tables.stream_begin[block] : tables.stream_begin[block + 1]]
        assert records["instruction"]["task"].tolist() == queue
        stages: Counter[int] = Counter()
        for load in loads:
            stages[queue[load["instruction"]]] += int(load["count"])
        wanted = {t: (graph.tasks[t].tile_end - graph.tasks[t].tile_begin) * stages_of(graph.operator(t)).count
                  for t in queue if graph.tasks[t].kind in ("linear", "head")}
        assert stages == wanted
        assert (np.diff(loads["instruction"]) >= 0).all()
    assert tables.planner == graph.tasks[-1].worker


def test_records_hold_their_waits_and_signals() -> None:
    graph, source = lowered()
    lay_out_params(graph, source)
    builder = CudaProgramBuilder(graph)
    tables = builder.cuda_tables()
    assert any(e.carried for e in graph.events) and not any(e.carried for e in without_flags()[0].events)
    for record in tables.records:
        task = graph.tasks[record["instruction"]["task"]]
        waits = [e for e in builder.counters(task.waits) if e != STEP_EVENT]
        signals = [e for e in builder.counters(task.signals) if e != STEP_EVENT]  # messages take its place
        assert record["instruction"]["wait_count"] == len(waits)
        assert record["waits"]["event"][: len(waits)].tolist() == waits[: layout.INLINE_EVENTS]
        assert record["waits"]["count"][: len(waits)].tolist() == [graph.events[e].threshold for e in waits][: layout.INLINE_EVENTS]
        begin, count = int(record["instruction"]["wait_begin"]), len(waits)
        assert tables.waits["event"][begin : begin + count].tolist() == waits
        assert record["instruction"]["signal_count"] == len(signals)
        assert record["signals"]["event"][: len(signals)].tolist() == signals[: layout.INLINE_EVENTS]


def test_threads_meet_between_instructions_unless_all_that_both_touch_waits_for_itself() -> None:
    for graph, source in (lowered(), without_flags()):
        lay_out_params(graph, source)
        tables = CudaProgramBuilder(graph).cuda_tables()
        together = {graph.operator(int(r["instruction"]["task"])).name.split(".")[-1] for r in tables.records if not r["apart"]}
        assert together == ({"gate_up", "down", "qkv"} if graph.flagged_bytes else set())


def tile_rows(op: Any, source: Any, begin: int, end: int) -> np.ndarray:
    """What is sent of tiles [begin, end), widened, from a buffer full of rubbish."""
    out = np.full(((end - begin) * 16, int(op.attrs["k"])), 0xDEAD, np.uint16)
    fill_tiles(op, source, begin, end, out)
    return from_bf16(out)


def rounded(values: np.ndarray) -> np.ndarray:
    return from_bf16(to_bf16(values))


def test_tiles_of_gate_and_up_alternate_by_eight_rows() -> None:
    graph, source = lowered()
    op = next(o for o in graph.tensor_graph.operators if o.name == "l0.gate_up")
    gate, up = (rounded(source.read(n)) for n in op.weights["weight"])
    rows = tile_rows(op, source, 1, 3)
    np.testing.assert_array_equal(rows, np.concatenate([gate[8:16], up[8:16], gate[16:24], up[16:24]]))
    last = tile_rows(op, source, 16, 17)  # 136 columns are 17 tiles of 8
    np.testing.assert_array_equal(last, np.concatenate([gate[128:136], up[128:136]]))


def test_a_last_tile_of_gate_and_up_is_filled_with_zeros() -> None:
    graph, source = lowered()
    op = next(o for o in graph.tensor_graph.operators if o.name == "l0.gate_up")
    short = replace(op, attrs={**op.attrs, "n": 133})
    gate, up = (rounded(source.read(n)) for n in op.weights["weight"])
    rows = tile_rows(short, source, 15, 17)
    nothing = np.zeros((3, gate.shape[1]), np.float32)
    np.testing.assert_array_equal(rows, np.concatenate([gate[120:128], up[120:128], gate[128:133], nothing, up[128:133], nothing]))


def test_stacked_matrices_are_read_across_their_borders() -> None:
    graph, source = lowered()
    op = next(o for o in graph.tensor_graph.operators if o.name == "l1.qkv")
    whole = np.concatenate([rounded(source.read(n)) for n in op.weights["weight"]])
    out = np.zeros((30, whole.shape[1]), np.uint16)
    fill_rows(op, source, 70, 100, out)
    np.testing.assert_array_equal(from_bf16(out), whole[70:100])
    assert len(tile_rows(op, source, 7, 8)) == 16 and len(whole) == 120
    np.testing.assert_array_equal(tile_rows(op, source, 7, 8)[8:], 0)  # beyond the last row


def test_a_gpu_keeps_activations_in_bf16_but_for_logits_and_statistics() -> None:
    graph, _ = lowered()
    sizes = {name: b.element_bytes for name, b in graph.buffers.items()}
    assert sizes["x"] == sizes["l0.qkv"] == sizes["l0.attn"] == sizes["l1.mlp"] == 2
    assert sizes["logits"] == sizes["rope"] == sizes["l0.partial"] == sizes["choice"] == 4
    assert graph.buffers["l0.kv_new"].kind == "state" and "l0.kv_new" not in graph.arena


def test_a_tied_head_has_its_own_form_of_the_embedding() -> None:
    config = DecoderConfig("LlamaForCausalLM", 300, 72, 136, 1, 9, 3, 8, 1e-5, 128, RopeScaling(), tie_embeddings=True)
    graph, _ = lowered(config)
    keys = {op.name: matrix_key(kind_of(op), op, graph) for op in graph.tensor_graph.operators if op.name in ("embed", "logits")}
    assert len(set(keys.values())) == 2 and set(keys.values()) <= set(graph.weight_offsets)


def test_what_a_gpu_target_cannot_do_is_refused() -> None:
    with pytest.raises(TargetError, match="dtype 'f32' on target h200, expected bf16"):
        Compiler("h200", dtype="f32")
    with pytest.raises(RequestError, match="max_rows 17, expected at most 16 on target h200"):
        Compiler("h200", max_rows=17)


@pytest.mark.skipif(cuda_device.device_count() > 0, reason="a machine with a GPU")
def test_without_a_gpu_auto_is_the_processor_and_building_for_one_is_refused() -> None:
    assert hardware.choose("auto") == "cpp"
    assert not hardware.runs_here(hardware.load("h200"))
    graph, source = lowered()
    with pytest.raises(TargetError, match="target h200, expected a CUDA device, got none on this machine"):
        Compiler("h200", workers=5).build(graph, LoadedModel(CONFIG, source, None, "test"))


@pytest.mark.parametrize("tile_columns", [8, 4])
def test_the_product_compiles_within_the_registers_of_its_threads(tile_columns: int) -> None:
    try:
        nvrtc.version()
    except TargetError as error:
        pytest.skip(str(error))
    constants = f"static constexpr int n = 96, k = 2048, epilogue = 2, tile_columns = {tile_columns}; static constexpr float eps = 1e-5f; "
    constants += "static constexpr bool norm = true, bias = true, gather_logit_rows = false;"
    source = f"""#include "mpk/program.cuh"
#include "linear/cuda.cuh"
struct Variant {{ {constants} }};
struct Dispatch {{
  __device__ __forceinline__ void operator()(const mpk::Context& c, const mpk::Instruction& i, mpk::Block& b) const {{ mpk::linear::run<Variant>(c, i, b); }}
}};
extern "C" __global__ void __launch_bounds__(mpk::BLOCK_THREADS, 1) mpk_run(const __grid_constant__ mpk::Arguments a) {{ mpk::run_program(a, Dispatch{{}}); }}
"""
    cubin = nvrtc.compile_cubin(source, cuda_source.headers(["linear"]), "sm_90a", cuda_source.OPTIONS)
    resources = cubin.resources["mpk_run"]
    assert resources.registers == 168  # what 384 threads can have at the start; the consumers take more from the loader's warps
    assert resources.spill_stores == resources.spill_loads == 0


def test_of_many_waits_that_stall_the_earliest_is_told() -> None:
    stalls = np.zeros(4, layout.dtype("Stall"))
    for block, (step, task) in {0: (8, 2), 1: (7, 40), 3: (7, 31)}.items():
        stalls[block]["worker"], stalls[block]["step"], stalls[block]["task"] = block, step, task
    assert earliest(stalls)["worker"] == 3


def test_a_step_begins_with_products_that_gather_their_embeddings() -> None:
    graph, source = lowered()
    operators = {op.name: op for op in graph.tensor_graph.operators}
    names = list(operators)
    assert operators["l0.qkv"].inputs == ("step",) and operators["l1.qkv"].inputs == ("l0.x2",)
    assert names.index("embed") == names.index("l0.qkv") + 1 and operators["l0.o"].inputs[1] == "x"
    lay_out_params(graph, source)
    for record in CudaProgramBuilder(graph).cuda_tables().records["instruction"]:
        if graph.tensor_graph.operators[record["op"]].name == "l0.qkv":
            assert record["iargs"][0] == 1 and record["weights"] == graph.weight_offsets["model.embed_tokens.weight.rows"]
    tokens = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (1, 6))
    plain = ReferenceProgram(without_flags()[0], source).forward(tokens)
    np.testing.assert_allclose(ReferenceProgram(graph, source).forward(tokens), plain, 1e-5, 1e-5)


def test_tasks_of_the_head_are_slices_and_the_planner_has_the_shortest() -> None:
    graph, _ = lowered(workers=4)
    heads = [t for t in graph.tasks if t.kind == "head"]
    size = int(graph.operator(heads[0]).attrs["slice"])
    assert [(t.tile_begin * 16, t.tile_end * 16) for t in heads] == [(i * size, min((i + 1) * size, 304)) for i in range(4)]  # 300 tokens, 19 tiles
    assert graph.tasks[-1].worker == heads[-1].worker
    closing = graph.events[graph.tasks[-1].waits[-1]]
    assert not closing.carried and not any(graph.operator(t).attrs.get("ephemeral") for t in closing.producers)
    assert {graph.tasks[t].worker for t in closing.producers} == {0, 1, 2, 3} - {graph.tasks[-1].worker}


@pytest.mark.parametrize(("name", "ranks", "expected"), [
    ("Llama-3.1-8B", 1, {("qkv", "o", "gate_up", "down")}), ("Qwen3-0.6B", 1, {("qkv", "o", "gate_up", "down")}),
    ("Llama-3.1-8B", 2, {("qkv",), ("gate_up",), ("o", "down"), ("logits_part",)}), ("SmolLM2-135M", 1, {("qkv", "o", "gate_up"), ("down",)})])
def test_products_that_are_cut_alike_share_a_body(name: str, ranks: int, expected: set[tuple[str, ...]]) -> None:
    config = first_layers(shapes.shape(name), 2)
    graph = pipeline.lower(registry.build_graph(config), hardware.load("h200"), Options(16, 16, "bf16", ranks))
    builder = CudaProgramBuilder(graph)
    assert sorted(opcode for body in builder.bodies for opcode in body.opcodes) == list(range(len(builder.variants)))
    of_opcode: dict[int, list[str]] = {}
    for op, opcode in zip(graph.tensor_graph.operators, builder.opcodes, strict=True):
        of_opcode.setdefault(opcode, []).append(short_name(op))
    found = {tuple(dict.fromkeys(name for opcode in body.opcodes for name in of_opcode[opcode])) for body in builder.bodies if body.shared}
    assert found == expected
    text = builder.text(10)
    for body in builder.bodies:
        assert text.count(f"mpk::{body.kind}::run<{body.struct}>(context, instruction, block") == 1
        assert (f"held({body.kind}_products[instruction.opcode])" in text) or not body.shared


def test_what_the_loader_may_bring_to_the_l2_stands_in_the_description() -> None:
    plan = hardware.load("h200").kernel
    assert plan is not None and plan.prefetch_bytes > plan.stages * plan.stage_bytes and plan.prefetch_ns > 0
    assert {"prefetch_bytes", "prefetch_ns"} <= set(layout.dtype("Kernel").names or ())
    assert hardware.load("b200").kernel is None or hardware.load("b200").kernel.prefetch_bytes == 0  # type: ignore[union-attr]


def test_spills_are_listed_by_the_lines_that_make_them() -> None:
    text = "\n".join(['\t.section\t.text.mpk_run,"ax",@progbits', '\t//## File "/src/mpk/program.cuh", line 7 inlined at "/src/program.cu", line 9',
                      '\t//## File "/src/program.cu", line 9', "        /*0010*/                   LDL R4, [R1+0x8] ;", "        /*0020*/                   IADD3 R4, R4, 0x1, RZ ;",
                      '\t//## File "/src/linear/cuda.cuh", line 3', "        /*0030*/                   STL [R1+0x8], R4 ;",
                      '\t.section\t.text.mpk_pack,"ax",@progbits', "        /*0000*/                   LDL R2, [R1] ;"])
    assert list(spills(text)) == [("LDL", "mpk/program.cuh:7 < src/program.cu:9"), ("STL", "linear/cuda.cuh:3")]


def test_a_graph_chooses_its_bytes_in_flight_and_without_pipelining_nothing_is_fetched_ahead() -> None:
    graph, _ = lowered()
    plan = hardware.load("h200").kernel
    assert plan is not None and plan.attention_bytes > 0
    small = replace(plan, attention_bytes=0)  # a layer of the ring's size: attention goes first
    assert launch_plan(graph, True) == small
    assert launch_plan(graph, False) == replace(small, prefetch_bytes=0)
    graph.flight = (49152, 16384)
    assert launch_plan(graph, True) == replace(small, flight_bytes=49152, flight_idle_bytes=16384)


@pytest.mark.parametrize(("name", "megabytes", "waits"), [("Qwen3-0.6B", 31.457280, False), ("Llama-3.1-8B", 436.207616, True)])
def test_only_weights_of_large_layers_are_fetched_while_attention_reads_a_short_context(name: str, megabytes: float, waits: bool) -> None:
    graph = pipeline.lower(registry.build_graph(first_layers(shapes.shape(name), 2)), hardware.load("h200"), Options(16, 16, "bf16"))
    assert weights_of_a_layer(graph) == int(megabytes * 1e6)
    assert (launch_plan(graph, True).attention_bytes > 0) == waits
