"""Lowered graphs come from the cache where nothing that they depend on has changed, and only proven ones are built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpk.codegen import graph_cache
from mpk.compiler import Compiler
from mpk.errors import GraphError
from mpk.frontend.source import LoadedModel
from mpk.graph.serialize import fingerprint
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.models import registry, shapes
from mpk.passes import pipeline, verify

CONFIG = shapes.config_from_mapping({
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 50, "max_position_embeddings": 64, "rms_norm_eps": 1e-5})


@pytest.fixture(autouse=True)
def lowerings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Targets of the lowerings that were really made, with an empty cache."""
    monkeypatch.setenv("MPK_CACHE", str(tmp_path / "cache"))
    made: list[str] = []
    original = pipeline.lower

    def counted(graph: Any, target: Any, options: Any) -> SMTaskGraph:
        made.append(target.name)
        return original(graph, target, options)

    monkeypatch.setattr(pipeline, "lower", counted)
    return made


def lower(**options: Any) -> SMTaskGraph:
    compiler = Compiler(options.pop("target_hardware", "cpp"), workers=2, **options)
    return compiler.lower_model(LoadedModel(CONFIG, shapes.RandomWeights(CONFIG, registry.build_graph(CONFIG)), None, "tiny"))


def test_the_second_lowering_is_read_and_equal(lowerings: list[str]) -> None:
    first, second = lower(), lower()
    assert lowerings == ["cpp"]
    assert first == second and first.to_text() == second.to_text()
    assert second.proof == first.proof == fingerprint(second) != ""
    assert second.model is not None


def test_other_options_and_targets_have_their_own(lowerings: list[str]) -> None:
    graphs = [lower(), lower(max_rows=32), lower(dtype="f32"), lower(target_hardware="h200"), lower(max_rows=32)]
    assert lowerings == ["cpp", "cpp", "cpp", "h200"]
    assert len({g.proof for g in graphs}) == 4


def test_changed_code_lowers_again(lowerings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lower()
    monkeypatch.setattr(graph_cache, "_sources", lambda: "other code")
    lower()
    assert lowerings == ["cpp", "cpp"]


def test_a_damaged_entry_is_made_again(lowerings: list[str], tmp_path: Path) -> None:
    lower()
    (entry,) = (tmp_path / "cache" / "graphs").glob("*.npz")
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    entry.write_bytes(data)
    assert lower() == lower()
    assert lowerings == ["cpp", "cpp"]


def test_a_cache_that_cannot_be_written_only_costs_time(lowerings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MPK_CACHE", str(tmp_path / "file"))
    assert lower() == lower()
    assert lowerings == ["cpp", "cpp"]


def test_debugging_switches_lower_anew(lowerings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower()
    monkeypatch.setenv("MPK_DUMP", str(tmp_path / "dump"))
    lower()
    assert lowerings == ["cpp", "cpp"] and any((tmp_path / "dump").iterdir())


def test_a_graph_changed_after_its_proof_is_proven_again() -> None:
    lower()
    graph = lower()
    verify.require_proof(graph)
    task = next(t for t in graph.tasks if t.waits and t.kind == "linear")
    event = graph.events[task.waits[-1]]
    task.waits = task.waits[:-1]
    assert event.id not in task.waits
    with pytest.raises(GraphError):
        Compiler("cpp", workers=2).build(graph)
