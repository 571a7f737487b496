"""The shard pass: what every rank holds, what is refused, and that the sharded graph means what the whole one means."""

from __future__ import annotations

import copy
import random
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mpk.codegen.weights import load_weights
from mpk.compiler import Compiler
from mpk.errors import GraphError, ModelError, RequestError
from mpk.frontend.shard_source import shard_sources
from mpk.frontend.source import LoadedModel
from mpk.graph.draw import layer_svg, schedule_svg
from mpk.graph.serialize import from_text, to_text
from mpk.graph.sm_task_graph import Allocation, Region, SMTaskGraph
from mpk.models.config import DecoderConfig
from mpk.models.registry import build_graph
from mpk.models.shapes import RandomWeights
from mpk.passes.shard import obstacle
from mpk.passes.verify import find_fault
from mpk.runtime.interpreter import ReferenceProgram
from tests.support.mutations import copy_graph
from tests.support.ranks import harm, harm_by_holding_any

FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"output_bias": True, "qkv_bias": True, "mlp_bias": True}, "Qwen2ForCausalLM": {"qkv_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True}, "MistralForCausalLM": {}}


def config(family: str = "LlamaForCausalLM", *, heads: int = 8, kv_heads: int = 4, hidden: int = 72, intermediate: int = 192, head_dim: int = 8,
           layers: int = 2, vocab: int = 131, **options: Any) -> DecoderConfig:
    settings = {**FAMILIES[family], "max_context": 64, **options}
    context = settings.pop("max_context")
    return DecoderConfig(family, vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, 1e-5, context, **settings)


def model(c: DecoderConfig, seed: int = 0) -> LoadedModel:
    return LoadedModel(c, RandomWeights(c, build_graph(c), seed), None, "random")


def lower(c: DecoderConfig, ranks: int, **options: Any) -> SMTaskGraph:
    given = {"dtype": "f32", "workers": 2, "max_rows": 16, "max_batch": 4, **options}
    return Compiler(given.pop("target", "cpp"), tensor_parallel_size=ranks, **given).lower_model(model(c))


# ---- meaning
@st.composite
def shapes(draw: st.DrawFn) -> tuple[DecoderConfig, int, int]:
    ranks = draw(st.sampled_from([2, 3, 4, 8]))
    kv_heads, group = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from([1, 2, 3, 8]))
    layers = draw(st.integers(1, 3))
    window = tuple(draw(st.sampled_from([0, 5])) for _ in range(layers)) if draw(st.booleans()) else ()
    c = config(draw(st.sampled_from(sorted(FAMILIES))), heads=kv_heads * group, kv_heads=kv_heads, hidden=8 * draw(st.integers(1, 14)),
               intermediate=8 * ranks * draw(st.integers(1, 4)), head_dim=draw(st.sampled_from([8, 24, 40])), layers=layers,
               vocab=draw(st.integers(20, 300)), sliding_window=window, tie_embeddings=draw(st.booleans()))
    return c, ranks, draw(st.sampled_from([1, 2, 3, 5]))


@settings(max_examples=40, deadline=None, derandomize=True, print_blob=True, suppress_health_check=list(HealthCheck))
@given(shapes())
def test_any_shape_that_divides_means_on_all_ranks_what_it_means_on_one(example: tuple[DecoderConfig, int, int]) -> None:
    c, ranks, workers = example
    assume(obstacle(c, ranks) is None)
    prompt = np.random.default_rng(7).integers(0, c.vocab_size, (1, 19))
    whole = ReferenceProgram(lower(c, 1, workers=workers), model(c).source).forward(prompt)
    graph = lower(c, ranks, workers=workers)
    shared = ReferenceProgram(graph, model(c).source, order_seed=5, share_memory=True).forward(prompt)
    assert np.linalg.norm(shared - whole) <= 1e-5 * np.linalg.norm(whole)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_graphs_for_gpus_mean_on_all_ranks_what_they_mean_on_one(family: str, ranks: int) -> None:
    c = config(family, heads=16, kv_heads=2 if ranks == 4 else 4, intermediate=256, hidden=64)
    prompt = np.random.default_rng(3).integers(0, c.vocab_size, (1, 11))
    graphs = [lower(c, n, target="h200", dtype="bf16", workers=5) for n in (1, ranks)]
    whole, shared = (ReferenceProgram(g, model(c).source, order_seed=2).forward(prompt) for g in graphs)
    assert np.linalg.norm(shared - whole) <= 2e-3 * np.linalg.norm(whole)  # keys and values are rounded to bf16, ties may fall the other way


# ---- parts
def test_each_rank_holds_its_heads_and_columns() -> None:
    c = config(heads=8, kv_heads=2, hidden=64, intermediate=128, layers=1)
    graph, source = lower(c, 4), model(c).source
    tensors = {name: source.read(name) for name in source.names()}
    layer = "model.layers.0."
    for rank, part in enumerate(shard_sources(graph, source)):
        q, k = tensors[f"{layer}self_attn.q_proj.weight"], tensors[f"{layer}self_attn.k_proj.weight"]
        assert np.array_equal(part.read(f"{layer}self_attn.q_proj.weight"), q[16 * rank : 16 * rank + 16])
        assert np.array_equal(part.read(f"{layer}self_attn.k_proj.weight"), k[8 * (rank // 2) : 8 * (rank // 2) + 8])
        assert np.array_equal(part.read(f"{layer}self_attn.o_proj.weight"), tensors[f"{layer}self_attn.o_proj.weight"][:, 16 * rank : 16 * rank + 16])
        assert np.array_equal(part.read(f"{layer}mlp.down_proj.weight", 3, 9), tensors[f"{layer}mlp.down_proj.weight"][3:9, 32 * rank : 32 * rank + 32])
        assert np.array_equal(part.read(f"{layer}mlp.down_proj.bias"), tensors[f"{layer}mlp.down_proj.bias"] * (rank == 0))
        assert np.array_equal(part.read("model.norm.weight"), tensors["model.norm.weight"])
    assert graph.buffers["l0.kv"].columns == 2 * 8


def test_a_vocabulary_that_does_not_divide_is_shared_unevenly() -> None:
    c = config(heads=8, kv_heads=8, intermediate=512, vocab=131)
    graph, source = lower(c, 8), model(c).source
    embedding = source.read("model.embed_tokens.weight")
    parts = [part.read("model.embed_tokens.weight") for part in shard_sources(graph, source)]
    assert [p.shape for p in parts] == [(32, 72)] * 8
    assert np.array_equal(np.concatenate(parts)[:131], embedding)
    assert not np.concatenate(parts)[131:].any()


class CountingSource(RandomWeights):
    """Notes which rows are read at a time."""

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        rows = super().read(name, begin, end)
        self.reads.setdefault(name, []).append((begin, begin + len(rows)))
        return rows


def test_weights_are_read_and_packed_part_by_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MPK_CACHE", str(tmp_path))
    c = config("MistralForCausalLM", heads=16, kv_heads=4, hidden=512, intermediate=4096, head_dim=32, layers=1, vocab=6000)
    graph = lower(c, 4)
    source = CountingSource(c, build_graph(c))
    source.reads = {}
    part = shard_sources(graph, source)[1]
    tracemalloc.start()
    packed = load_weights(graph, part)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    matrix = 4 * 512 * 4096  # bytes of one whole matrix of the feed-forward block
    assert packed.weights.nbytes < lower(c, 1).weight_bytes / 4 * 1.02
    assert peak < 3 * 1024 * max(4096, 512) * 4  # a few blocks of 1024 rows, whatever the matrix's size
    assert peak < 6 * matrix and sum(w.nbytes for w in (packed.weights,)) > 4 * 1024 * 512
    for name, first, last in (("mlp.gate_proj", 1024, 2048), ("self_attn.q_proj", 128, 256), ("self_attn.v_proj", 32, 64)):
        read = source.reads[f"model.layers.0.{name}.weight"]
        assert min(b for b, _ in read) == first and max(e for _, e in read) == last


# ---- refusals
@pytest.mark.parametrize(("changes", "ranks", "text"), [
    ({"heads": 9, "kv_heads": 3}, 2, "tensor_parallel_size 2: 9 query heads cannot be shared by 2 devices; sizes that work: 1, 3"),
    ({"heads": 12, "kv_heads": 3}, 2, "tensor_parallel_size 2: 3 key-value heads cannot be shared by 2 devices; sizes that work: 1, 3, 6"),
    ({"heads": 8, "kv_heads": 8, "intermediate": 200}, 8, "tensor_parallel_size 8: the intermediate size 200, in multiples of 8, cannot be shared by 8 "
                                                           "devices; sizes that work: 1"),
])
def test_sizes_that_do_not_divide_are_refused_with_those_that_work(changes: dict[str, int], ranks: int, text: str) -> None:
    with pytest.raises(ModelError) as error:
        lower(config(**changes), ranks)
    assert str(error.value) == text


@pytest.mark.parametrize(("size", "text"), [(0, "tensor_parallel_size 0, expected 1 to 8"), (9, "tensor_parallel_size 9, expected 1 to 8"),
                                            ("two", "tensor_parallel_size, expected a whole number, got 'two'")])
def test_other_numbers_of_devices_are_refused(size: Any, text: str) -> None:
    with pytest.raises(RequestError) as error:
        Compiler("cpp", tensor_parallel_size=size)
    assert str(error.value) == text


def test_a_graph_is_built_by_a_compiler_for_as_many_devices() -> None:
    graph = lower(config(), 2)
    with pytest.raises(GraphError) as error:
        Compiler("cpp", dtype="f32", workers=2).build(graph)
    assert str(error.value) == "graph lowered for 2 devices, expected 1, the compiler's tensor_parallel_size"


# ---- files and pictures
def test_sharded_graphs_are_saved_loaded_written_as_text_and_drawn(tmp_path: Path) -> None:
    graph = lower(config(), 4)
    graph.model = None
    graph.save(str(tmp_path / "graph"))
    loaded = SMTaskGraph.load(str(tmp_path / "graph"))
    assert loaded == graph and loaded.ranks == 4 and set(loaded.peers) == {"peer0", "peer1", "peer2", "peer_logits"}
    assert from_text(to_text(graph)) == graph
    assert find_fault(loaded) is None
    assert "all_reduce" in layer_svg(graph, 0) and "all_reduce" in schedule_svg(graph)


# ---- order among ranks
def merged(graph: SMTaskGraph, gone: str, into: str) -> SMTaskGraph:
    """One peer buffer takes the place of two."""
    def renamed(regions: tuple[Region, ...]) -> tuple[Region, ...]:
        return tuple(r._replace(buffer=into) if r.buffer == gone else r for r in regions)

    out = copy.deepcopy(graph)
    out.tensor_graph.operators = [replace(op, inputs=tuple(into if n == gone else n for n in op.inputs), outputs=tuple(into if n == gone else n for n in op.outputs))
                                  for op in out.tensor_graph.operators]
    for task in out.tasks:
        task.reads, task.writes = renamed(task.reads), renamed(task.writes)
    return out


@pytest.mark.parametrize(("gone", "into", "text"), [
    ("peer1", "peer0", "peer: task 8 (l0.o 0:2, worker 0) sends peer0[0:32] to all ranks, but nothing makes it wait until task 3 (embed_reduce 0:2"),
    ("peer2", "peer0", "of another rank has read peer0[0:48] in the step before"),
])
def test_too_few_buffers_for_messages_are_refused(gone: str, into: str, text: str) -> None:
    graph = merged(lower(config(hidden=64), 2), gone, into)
    fault = find_fault(graph)
    assert fault is not None and fault.kind == "peer" and fault.message.startswith("peer: ") and "another rank" in fault.message
    assert harm_by_holding_any(graph) is not None


def test_a_lost_dependency_within_a_rank_lets_ranks_overwrite_each_other() -> None:
    """A product that no longer waits for the sum before it: refused both for the rank itself and for the others."""
    graph = lower(config(hidden=64), 2)
    names = [op.name for op in graph.tensor_graph.operators]
    tasks = [t for t in graph.tasks if t.op == names.index("l0.gate_up")]
    assert all(t.waits for t in tasks)
    for t in tasks:
        t.waits = ()
    assert find_fault(graph, checks=("structure", "events", "deadlock", "accesses")) is not None
    fault = find_fault(graph, checks=("structure", "events", "deadlock", "peers"))
    assert (fault is not None) == (harm_by_holding_any(graph) is not None)


@pytest.mark.parametrize(("change", "text"), [
    ({"message": 3}, "sends message 3, which"), ({"message": 9}, "sends message 9 of 6, expected one below 6"),
    ({"messages": 7}, "of 7, expected one below 6"), ({"message": None}, "sends message None of 6"),
])
def test_numbers_of_messages_are_distinct(change: dict[str, Any], text: str) -> None:
    graph = copy.deepcopy(lower(config(hidden=64), 2))
    operators = graph.tensor_graph.operators
    at = next(i for i, op in enumerate(operators) if op.name == "l0.down")
    operators[at] = replace(operators[at], attrs={**operators[at].attrs, **change})
    fault = find_fault(graph, checks=("peers",))
    assert fault is not None and fault.kind == "message" and text in fault.message


def test_a_reader_of_another_message_and_a_place_that_is_not_there_are_refused() -> None:
    graph = copy.deepcopy(lower(config(hidden=64), 2))
    operators = graph.tensor_graph.operators
    at = next(i for i, op in enumerate(operators) if op.name == "l0.down_reduce")
    operators[at] = replace(operators[at], attrs={**operators[at].attrs, "message": 1})
    fault = find_fault(graph, checks=("peers",))
    assert fault is not None and "waits for message 1 in peer0[0:32], but" in fault.message and fault.message.endswith("sends message 2 there")
    graph = lower(config(hidden=64), 2)
    graph.peers["peer1"] = Allocation(graph.peers["peer0"].offset, graph.peers["peer1"].size)
    fault = find_fault(graph)
    assert fault is not None and fault.message.startswith("peer0 and peer1 overlap in bytes 0:")
    del graph.peers["peer1"]
    fault = find_fault(graph)
    assert fault is not None and fault.message == "peer1 has no place in peer memory"


def test_the_verifier_finds_what_goes_wrong_among_ranks() -> None:
    """Random damage: whatever loses a part of a message when some reader is late must be refused."""
    graph = lower(config("MistralForCausalLM", heads=4, kv_heads=2, hidden=32, intermediate=32, layers=1, vocab=30), 2)
    assert find_fault(graph) is None and harm_by_holding_any(graph) is None and harm(graph, None) is None
    tried, harmful = Counter[str](), Counter[str]()
    for seed in range(45):
        name, mutant = damaged(graph, random.Random(seed))
        found, fault = harm_by_holding_any(mutant), find_fault(mutant, checks=("structure", "events", "deadlock", "step", "accesses", "peers"))
        assert found is None or fault is not None, f"seed {seed}, {name}: accepted, but {found}"
        tried[name] += 1
        harmful[name] += found is not None
    assert min(tried.values()) >= 10 and harmful["merge"] == tried["merge"] and harmful["early"] > 3


def damaged(graph: SMTaskGraph, rng: random.Random) -> tuple[str, SMTaskGraph]:
    """A copy with one fault: buffers merged, waits dropped, a message moved to another buffer, or a task put first in its queue."""
    name = rng.choice(["merge", "waits", "early"])
    if name == "merge":
        gone, into = rng.sample([b for b in graph.peers if b != "peer_logits"], 2)
        return name, merged(graph, gone, into)
    out = copy_graph(graph)
    task = rng.choice([t for t in out.tasks if t.waits] if name == "waits" else out.tasks[:-1])
    if name == "waits":
        for other in (t for t in out.tasks if t.op == task.op):
            other.waits = tuple(e for e in other.waits if e == 0)
    else:
        queue = out.queues[task.worker]
        at = queue.index(task.id)
        queue.insert(max(0, at - rng.randint(1, 4)), queue.pop(at))
    return name, out
