"""Tuning: candidates are verified before they are believed, the winner is kept and used by later builds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import mpk
from mpk.codegen import tuned
from mpk.errors import GraphError, TargetError
from mpk.frontend.source import LoadedModel
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.models import registry, shapes
from mpk.models.config import DecoderConfig, first_layers
from mpk.passes.partition import Options
from mpk.passes.verify import find_fault
from mpk.simulate import tune
from mpk.targets import hardware
from mpk.targets.hardware import Target
from tests.support.command import refused, run_json

CONFIG = replace(first_layers(shapes.shape("SmolLM2-135M"), 2), vocab_size=512)
TARGET = hardware.load("h200").with_workers(12)
GIVEN = Options(max_rows=16, max_batch=1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPK_CACHE", str(tmp_path / "cache"))


def broken(config: DecoderConfig, target: Target, options: Options) -> SMTaskGraph:
    """Lowers as it should, but one placement comes out without waits in its layers: fast, and wrong."""
    graph = tune.lower(config, target, options)
    if options.placement == "fixed":
        for task in graph.tasks[:-1]:
            if len(task.waits) and graph.operator(task).layer >= 0:
                task.waits = ()
        graph.tasks[0].waits = (0,)
    return graph


def test_a_candidate_that_the_verifier_refuses_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tune.Candidate] = []
    ranked = tune.search(CONFIG, TARGET, GIVEN, tune.Setting(), lower_with=broken, say=seen.append, rounds=1)
    fast_but_wrong = [c for c in seen if c.options.placement == "fixed"]
    assert fast_but_wrong and all(c.latency_us is None and "wait" in c.refusal for c in fast_but_wrong)
    assert all(c.options.placement != "fixed" for c in ranked)
    monkeypatch.setattr(tune.verify, "find_fault", lambda graph: None)  # without the proof it would be the winner
    believed = tune.evaluate(tune.Candidate(replace(GIVEN, placement="fixed")), CONFIG, TARGET, tune.Setting(), broken)
    default = tune.evaluate(tune.Candidate(GIVEN), CONFIG, TARGET, tune.Setting(), broken)
    assert believed.latency_us is not None and default.latency_us is not None and believed.latency_us < default.latency_us


def test_the_default_is_ranked_too_and_nothing_is_worse_than_it() -> None:
    ranked = tune.search(CONFIG, TARGET, GIVEN, tune.Setting(context=2048), rounds=1)
    times = [c.latency_us for c in ranked]
    assert times == sorted(times, key=lambda t: t or 0.0) and any(not c.changes for c in ranked)
    for c in ranked:
        assert find_fault(tune.lower(CONFIG, TARGET, c.options)) is None


def test_every_choice_changes_the_graph_and_passes_the_verifier() -> None:
    plain = tune.lower(CONFIG, TARGET, GIVEN)
    changed = [c for values in tune.choices(CONFIG, TARGET, GIVEN) for c in values]
    assert len(changed) > 20
    differing = 0
    for _, change in changed:
        graph = tune.lower(CONFIG, TARGET, replace(GIVEN, **change))
        assert find_fault(graph) is None
        differing += graph != plain or graph.flight is not None
    assert differing > len(changed) // 2


def test_a_default_that_is_refused_is_an_error() -> None:
    with pytest.raises(GraphError, match="the default schedule"):
        tune.search(CONFIG, TARGET, replace(GIVEN, placement="fixed"), tune.Setting(), lower_with=broken)


def unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("MPK_CACHE", str(blocked))
    return blocked


def test_a_folder_where_nothing_can_be_kept_is_told_before_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = unwritable_cache(tmp_path, monkeypatch)
    monkeypatch.setattr(tune, "search", lambda *given, **named: pytest.fail("searched"))
    line = refused("tune", "SmolLM2-135M", "--target", "h200")
    assert line.startswith(f"cache folder {blocked}/tuned cannot be written (") and "MPK_CACHE" in line


def test_a_simulator_that_cannot_be_compiled_is_no_fault_of_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = unwritable_cache(tmp_path, monkeypatch)

    def unavailable(*given: object, **named: object) -> None:
        tuned.require_writable()

    monkeypatch.setattr(tune, "simulate", unavailable)  # the library of the real one may be loaded already
    with pytest.raises(TargetError, match=f"^cache folder {blocked}"):
        tune.search(CONFIG, TARGET, GIVEN, tune.Setting())


def test_advice_for_a_model_that_does_not_fit_names_no_option_that_is_not_there() -> None:
    line = refused("tune", "Llama-3.1-70B", "--target", "rtx5090")
    assert line.endswith("GB of weights and cache; use a larger target") and "--tp" not in line


def test_a_gain_that_is_only_predicted_has_to_exceed_the_error_of_predictions() -> None:
    default, other = tune.Candidate(GIVEN, (), 100.0), tune.Candidate(GIVEN, ("x",), 98.0)
    assert tune.choose([other, default], {}) == 1
    assert tune.choose([replace(other, latency_us=90.0), default], {}) == 0
    assert tune.choose([other, default], {0: 97.0, 1: 99.0}) == 0
    assert tune.choose([replace(other, latency_us=90.0), default], {0: 101.0, 1: 99.0}) == 1


def test_what_was_kept_is_used_by_later_builds() -> None:
    loaded = LoadedModel(CONFIG, shapes.RandomWeights(CONFIG, registry.build_graph(CONFIG)), None, "two layers")
    compiler = mpk.Compiler("h200", workers=12, max_batch=1)
    before = compiler.lower_model(loaded)
    found = replace(compiler.options, attention_splits=3, flight=(32768, 16384), tasks=(("o", 12),))
    tuned.store(CONFIG, compiler.target, found, {"why": "test"})
    assert tuned.find(CONFIG, compiler.target, compiler.options) == found
    after = compiler.lower_model(loaded)
    assert after.flight == (32768, 16384) and "tuned" in after.notes[-1] and before.flight is None
    assert sum(t.kind == "rotary_attention" for t in after.tasks) == 2 * CONFIG.num_kv_heads * 3
    assert mpk.Compiler("h200", workers=12, max_batch=1, use_tuned=False).lower_model(loaded) == before
    assert mpk.Compiler("h200", workers=12, max_batch=2).lower_model(loaded).flight is None  # made for another batch
    assert mpk.Compiler("h100", workers=12, max_batch=1).lower_model(loaded).flight is None


def test_the_flight_of_a_graph_survives_its_file(tmp_path: Path) -> None:
    graph = tune.lower(CONFIG, TARGET, replace(GIVEN, flight=(65536, 16384)))
    graph.save(str(tmp_path / "graph"))
    assert SMTaskGraph.load(str(tmp_path / "graph")).flight == (65536, 16384)


def test_the_command_reports_against_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a target of threads, where candidates are measured too."""
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))

    def two(config: DecoderConfig, target: Target, start: Options, setting: tune.Setting, **_: object) -> list[tune.Candidate]:
        candidates = [tune.Candidate(start), tune.Candidate(replace(start, placement="fixed"), ("placement fixed",))]
        return [tune.evaluate(c, config, target, setting) for c in candidates]

    monkeypatch.setattr(tune, "search", two)
    report = run_json("tune", str(path), "--target", "cpp", "--context", "64", "--max-batch", "1", "--workers", "2", "--json")
    assert [r["changes"] for r in report["ranked"]] == [[], ["placement fixed"]] and report["refused"] == []
    assert min(r["measured_us"] for r in report["ranked"]) == report["best"]["measured_us"] > 0
    assert report["saved"] == bool(report["best"]["changes"])
    assert "expected 33 to" in refused("tune", str(path), "--context", "32")
