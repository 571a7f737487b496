"""Costs as data: descriptions with sources, files of costs, fitting to measurements, refusals."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from mpk.commands.simulate import _print as show_report
from mpk.errors import RequestError, TargetError
from mpk.simulate import calibrate, measurement
from mpk.simulate.machine import COSTS, load_costs, machine, save_costs
from mpk.simulate.measurement import Measurement, OperatorTimes, operator_times
from mpk.simulate.simulator import simulate
from mpk.targets import hardware
from tests.support.command import refused, run_json

SIMULATED = ("a100-80g", "b200", "rtx5090")
CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
          "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def figures(data: object, path: str = "") -> list[tuple[str, dict[str, object]]]:
    if not isinstance(data, dict):
        return []
    if "value" in data:
        return [(path, data)]
    return [f for key, value in data.items() for f in figures(value, f"{path}.{key}")]


@pytest.mark.parametrize("name", hardware.names())
def test_every_figure_says_where_it_comes_from(name: str) -> None:
    found = figures(hardware.description(name))
    assert len(found) > 8
    for path, figure in found:
        assert str(figure["source"]).split(":")[0] in ("measured", "cited", "guessed", "0"), path
        assert len(str(figure["source"])) > 6 and str(figure["date"]).startswith("20"), path
    assert machine(name).kinds


@pytest.mark.parametrize("name", SIMULATED)
def test_what_can_only_be_simulated_is_refused_by_what_runs_programs(name: str, model: str) -> None:
    assert hardware.load(name).simulation_only and not hardware.runs_here(hardware.load(name))
    for arguments in (("generate", "--target", name), ("bench", "--model", model, "--target", name), ("trace", model, "--target", name)):
        assert f"target {name}, expected a target that programs are generated for" in refused(*arguments)
    assert run_json("simulate", model, "--target", name, "--json")["latency_us"] > 0


def test_a_gpu_has_another_name_too() -> None:
    assert hardware.load("h100-sxm") is not None and hardware.load("h100-sxm").name == "h100"
    assert "h100-sxm" not in hardware.names()


def test_more_memory_bandwidth_and_a_higher_clock_are_faster(model: str) -> None:
    times = {name: run_json("simulate", model, "--target", name, "--json")["latency_us"] for name in ("a100-80g", "h100", "h200")}
    assert times["a100-80g"] > times["h100"] >= times["h200"]


@pytest.mark.parametrize(("rate", "shown"), [(0.5437, "0.544"), (12.34, "12.3"), (99.96, "100"), (1234.5, "1234")])
def test_a_rate_is_printed_with_enough_digits(model: str, capsys: pytest.CaptureFixture[str], rate: float, shown: str) -> None:
    report = run_json("simulate", model, "--target", "h200", "--json")
    show_report({**report, "tokens_per_second": rate})
    assert f", {shown} tokens/s" in capsys.readouterr().out


def test_a_model_that_does_not_fit_is_refused() -> None:
    assert "GB of weights and cache with --tp 1; use more devices" in refused("simulate", "Llama-3.1-70B", "--target", "rtx5090")
    assert "--context 0, expected 1 to" in refused("simulate", "SmolLM2-135M", "--context", "0")
    assert "--batch 17" in refused("simulate", "SmolLM2-135M", "--batch", "17")


def test_the_table_of_execution_models(model: str) -> None:
    report = run_json("simulate", model, "--target", "h200", "--compare", "--json")
    rows = {r["model"]: r for r in report["comparison"]}
    assert rows["mega-kernel"]["kernels"] == 1 and rows["eager"]["kernels"] > rows["fused, CUDA graph"]["kernels"]
    assert rows["mega-kernel"]["ms_per_token"] < rows["fused, CUDA graph"]["ms_per_token"] < rows["CUDA graph"]["ms_per_token"] < rows["eager"]["ms_per_token"]
    assert report["memory_bytes"]["activations"] == 0 and sum(report["memory_bytes"][k] for k in ("weights", "cache")) == report["memory_bytes"]["total"]


def test_costs_survive_their_file(tmp_path: Path) -> None:
    costs = load_costs("hopper")
    save_costs(costs, tmp_path / "hopper.toml")
    text = (tmp_path / "hopper.toml").read_text()
    assert text.startswith("# Written by") and text.count("[[kind]]") == len(costs.kinds)
    assert tomllib.loads(text)["worker"] == tomllib.loads((COSTS / "hopper.toml").read_text())["worker"] | {"flag_us": costs.worker.flag_us}
    with pytest.raises(TargetError, match="no costs 'nothing'"):
        load_costs("nothing")


def test_a_fit_finds_costs_that_explain_what_was_measured(model: str) -> None:
    """Measurements made by the simulator with other costs; the fit begins from the usual ones."""
    usual = load_costs("hopper")
    kinds = tuple(replace(k, end=k.end * 2.0, stage=k.stage * 1.5) if k.name in ("linear", "attention_combine") else k for k in usual.kinds)
    true = replace(usual, kinds=kinds, worker=replace(usual.worker, event_us=usual.worker.event_us + 0.6))
    settings = [Measurement(model, "h200", batch, context, 1.0, max_batch=8, options={"flagged": False}) for batch, context in ((1, 512), (8, 512), (1, 4000))]
    measured = []
    for case in calibrate.cases(settings):
        step_us, operators = case.predict(true)
        counts = {name: case.names.count(name) for name in operators}
        measured.append(replace(case.measured, step_us=step_us, operators={n: OperatorTimes(counts[n], *operators[n]) for n in operators}))
    given = calibrate.cases(measured)
    before = [abs(c.predict(usual)[0] / c.measured.step_us - 1) for c in given]
    fitted = calibrate.fit(usual, given, 3, lambda line: None)
    after = [abs(c.predict(fitted)[0] / c.measured.step_us - 1) for c in given]
    assert min(before) > 0.1 and max(after) < 0.02
    assert fitted.worker.event_us == pytest.approx(true.worker.event_us, rel=0.25)


def test_the_times_of_operators_are_read_from_a_timeline(model: str) -> None:
    [case] = calibrate.cases([Measurement(model, "h200", 1, 512, 1.0, max_batch=1)])
    s = simulate(case.graphs[-1], context=512)
    found = operator_times(s.timeline)
    places = [i for i, t in enumerate(s.program.ids) if case.names[t] == "gate_up"]
    assert found["gate_up"].tasks == len(places)
    ran = (s.records["published"] - s.records["ready"] - s.records["starved"])[1:, places]
    assert found["gate_up"].run_us == pytest.approx(ran.mean() / 1e6, abs=0.01)
    assert found["gate_up"].run_quantiles[0] <= found["gate_up"].run_us <= found["gate_up"].run_quantiles[2]


def test_measurements_survive_their_file(tmp_path: Path) -> None:
    m = Measurement("Qwen3-0.6B", "h200", 1, 512, 950.0, {"o": OperatorTimes(64, 2.0, 5.0, (1.0, 2.0, 3.0))}, flight=(65536, 32768), options={"flagged": False})
    measurement.save([m], tmp_path / "m.jsonl")
    assert measurement.load(tmp_path / "m.jsonl") == [m]
    (tmp_path / "other").write_text("{}")
    with pytest.raises(RequestError, match="measurements"):
        measurement.load(tmp_path / "other")


def test_the_kept_measurements_are_complete() -> None:
    kept = measurement.load(Path(__file__).parent.parent / "benchmarks" / "results" / "h200_traces.jsonl")
    assert len({(m.model, m.batch, m.context) for m in kept if m.flight is None}) == 20
    assert all(m.device and m.commit and m.date for m in kept)
    assert all(sum(o.tasks for o in m.operators.values()) > 1000 for m in kept if m.operators)
