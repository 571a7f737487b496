"""The commands as a user types them: output, JSON, exit codes, one line for a wrong input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.perfetto_file import Read

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model saved by transformers, without a tokenizer."""
    pytest.importorskip("transformers")
    from tests.support.models import tiny_model

    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    return folder


def mpk(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "mpk", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=250,
                          env={**os.environ, **environment})


def refusal(*arguments: str, **environment: str) -> str:
    done = mpk(*arguments, **environment)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("mpk: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_generate_prints_one_json_object_with_ids_and_text() -> None:
    done = mpk("generate", "--prompt", "The capital of France is", "--max-new-tokens", "8", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {"target", "model", "prompt_tokens", "tokens", "text", "first_token_ms", "ms_per_token"} <= set(report)
    assert report["target"] == "cpp" and len(report["tokens"]) == 8 and "Paris" in report["text"]
    assert 0 < report["ms_per_token"] < 1000


def test_generate_streams_text_and_ends_with_a_summary(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Once upon a time")
    done = mpk("generate", "--prompt-file", str(prompt), "--max-new-tokens", "6", "--temperature", "0.8", "--top-k", "40", "--seed", "7")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("[6 tokens, first after") and last.endswith("tokens per second]")
    again = mpk("generate", "--prompt-file", str(prompt), "--max-new-tokens", "6", "--temperature", "0.8", "--top-k", "40", "--seed", "7")
    assert again.stdout == done.stdout


@pytest.mark.parametrize(("arguments", "text"), [
    (("generate", "--model", "/no/such/model"), "no model '/no/such/model'"),
    (("generate", "--model", "qwen3-8b"), "qwen3-8b is known as a shape without weights, for mpk bench, inspect, simulate, trace and tune"),
    (("simulate", "tests/support"), "folder tests/support, expected config.json in it, or a named shape"),
    (("generate", "--target", "h9000"), "target 'h9000'; known targets: auto, a100-80g, b200, cpp, h100, h200, rtx5090"),
    (("generate", "--prompt", ""), "the prompt is empty"),
    (("generate", "--prompt", "a", "--prompt-file", "b"), "--prompt and --prompt-file, expected only one of them"),
    (("generate", "--prompt-file", "/no/such/file"), "prompt file /no/such/file"),
    (("generate", "--prompt", "a", "--temperature", "-1"), "temperature, expected a number from 0, got -1.0"),
    (("generate", "--prompt", "a", "--top-p", "1.5"), "top_p, expected a number above 0 up to 1, got 1.5"),
    (("generate", "--prompt", "a", "--max-new-tokens", "0"), "max_new_tokens, expected a whole number from 1, got 0"),
    (("generate", "--prompt", "a", "--max-new-tokens", "100000"), "prompt and new tokens, expected at most 8192 (the context)"),
    (("generate", "--prompt", "a", "--dtype", "int3"), "dtype 'int3', expected bf16 or f32"),
    (("generate", "--prompt", "a", "--workers", "0"), "workers 0, expected 1 to 256 on target cpp"),
    (("generate", "--prompt", "a", "--target", "cpp", "--workers", "257"), "workers 257, expected 1 to 256 on target cpp"),
    (("inspect", "SmolLM2-135M", "--target", "h200", "--workers", "133"), "workers 133, expected 1 to 132 on target h200"),
    (("inspect", "--json", "--text"), "--json and --text, expected only one of them"),
    (("inspect", "--layer", "1"), "--layer 1 without --picture"),
    (("inspect", "SmolLM2-135M", "--picture", "/no/such/folder/a.svg"), "--picture /no/such/folder/a.svg cannot be written"),
    (("inspect", "SmolLM2-135M", "--schedule", "/no/such/folder/a.svg"), "--schedule /no/such/folder/a.svg cannot be written"),
    (("inspect", "SmolLM2-135M", "--save", "/no/such/folder/a.mpk"), "/no/such/folder/a.mpk cannot be written"),
    (("trace", "--output", "/no/such/folder/a.json"), "--output /no/such/folder/a.json cannot be written (No such file or directory)"),
    (("trace", "--output", "/dev/null", "--html", "/no/such/folder/a.html"), "--html /no/such/folder/a.html cannot be written (No such file or directory)"),
    (("trace", "--steps", "0"), "--steps 0, expected 1 or more"),
    (("trace", "--context", "0"), "--context 0, expected 1 or more"),
    (("trace", "--batch", "0"), "--batch 0, expected 1 to 16"),
    (("trace", "--batch", "17"), "--batch 17, expected 1 to 16"),
    (("trace", "--context", "8191", "--output", "/dev/null"), "--context 8191 and --steps 8, expected at most 8192"),
    (("bench", "--model", "SmolLM2-135M", "--repeats", "0"), "--repeats 0, expected 1 or more"),
    (("bench", "--model", "SmolLM2-135M", "--output", "/dev/null/a.jsonl"), "--output /dev/null/a.jsonl cannot be written"),
    (("bench", "--model", "SmolLM2-135M", "--output", "/no/such/folder/a.jsonl"), "--output /no/such/folder/a.jsonl cannot be written (No such file"),
    (("inspect", "no-such-shape"), "no-such-shape"),
    (("bench", "--model", "SmolLM2-135M", "--batch", "0"), "--batch 0, expected positive numbers"),
    (("bench", "--model", "SmolLM2-135M", "--context", "9999999"), "--context 9999999, expected"),
    (("bench", "--model", "SmolLM2-135M", "--against", "nobody"), "--against nobody, expected"),
    (("verify", "/no/such/graph.mpk"), "/no/such/graph.mpk"),
])
def test_a_wrong_input_is_refused_in_one_line(arguments: tuple[str, ...], text: str) -> None:
    assert text in refusal(*arguments)


def test_a_model_without_tokenizer_is_refused_by_generate(small_folder: Path) -> None:
    assert "has no tokenizer" in refusal("generate", "--model", str(small_folder), "--prompt", "a")


def test_an_unwritable_cache_and_a_missing_compiler_are_refused(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert "MPK_CACHE" in refusal("generate", "--prompt", "a", MPK_CACHE=str(blocked))
    line = refusal("generate", "--prompt", "a", MPK_CACHE=str(tmp_path / "cache"), CXX="no-such-compiler")
    assert "C++ compiler 'no-such-compiler'" in line


def test_inspect_reports_saves_and_draws_and_verify_accepts(tmp_path: Path, small_folder: Path) -> None:
    saved, picture, schedule = tmp_path / "g.mpk", tmp_path / "layer.svg", tmp_path / "schedule.svg"
    done = mpk("inspect", str(small_folder), "--workers", "3", "--json", "--save", str(saved), "--picture", str(picture), "--schedule",
               str(schedule))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["workers"] == 3 and report["tasks"] == sum(report["tasks_per_kind"].values())
    assert report["events"] < report["events_before_fusion"]
    assert report["critical_path_tasks"] > 0 and report["memory"]
    assert picture.read_text().startswith("<svg") and schedule.read_text().startswith("<svg")
    checked = mpk("verify", str(saved), "--json")
    assert checked.returncode == 0 and json.loads(checked.stdout)["valid"] is True


def test_verify_names_the_first_fault_of_a_saved_graph(tmp_path: Path, small_folder: Path) -> None:
    from mpk.compiler import Compiler

    graph = Compiler("cpp", workers=3).lower_model(str(small_folder))
    victim = next(t for t in graph.tasks if graph.operator(t).name == "l1.down" and t.waits)
    victim.waits = ()
    graph.save(str(tmp_path / "broken.mpk"))
    done = mpk("verify", str(tmp_path / "broken.mpk"))
    assert done.returncode == 1
    assert "read-after-write" in done.stdout and f"task {victim.id}" in done.stdout and "l1.mlp" in done.stdout


def test_trace_writes_pictures_of_every_operator_and_sums_them_up(tmp_path: Path) -> None:
    trace, page = tmp_path / "a.pftrace", tmp_path / "a.html"
    done = mpk("trace", "--output", str(trace), "--html", str(page), "--steps", "2", "--context", "5", "--json")
    assert done.returncode == 0, done.stderr
    slices = Read(trace).slices
    names = {name for _, name, *_ in slices}
    assert {"l0.qkv", "l29.down", "logits", "sample", "advance", "wait for an event: l29.down"} <= names
    assert any(n.startswith("wait for the step: ") for n in names)
    assert sum(name == "advance" for _, name, *_ in slices) == 2  # the step that read the prompt is left out
    assert sum(name == "l5.down" and arguments["first tile"] == 0 for _, name, _, _, _, arguments in slices) == 2
    report = json.loads(done.stdout)
    times = report["per_operator"]
    assert times["gate_up"]["task_us"] > 0 and times["gate_up"]["bytes"] == 30 * 2 * 1536 * 576 * 2
    assert times["gate_up"]["gb_s"] == pytest.approx(times["gate_up"]["bytes"] / times["gate_up"]["active_us"] / 1e3, rel=0.01)
    assert all(row["task_us"] <= row["active_us"] + 0.02 for row in times.values())
    assert report["in_tasks"] + sum(report["idle"].values()) == pytest.approx(1.0, abs=1e-3)
    assert "SmolLM2" in page.read_text() or "smollm2" in page.read_text()


def test_targets_lists_figures_with_sources() -> None:
    targets = {t["name"]: t for t in json.loads(mpk("targets", "--json").stdout)}
    assert {"cpp", "h100", "h200"} <= set(targets)
    for target in targets.values():
        for figure in target["figures"].values():
            assert figure["source"].split(":")[0] in ("measured", "cited", "guessed", "0") and figure["date"]


def test_bench_prints_a_line_a_measurement(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 131, "hidden_size": 72, "intermediate_size": 104, "num_hidden_layers": 2,
              "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 128, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "results.jsonl"
    done = mpk("bench", "--model", str(tmp_path / "config.json"), "--target", "cpp", "--batch", "1,2", "--context", "40", "--repeats", "1",
               "--json", "--output", str(out))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(text) for text in done.stdout.splitlines()]
    keys = {"system", "model", "target", "device", "tp", "dtype", "batch", "context", "ms_per_token", "q1", "q3", "floor_ms", "ratio",
            "commit", "date"}
    assert [line["batch"] for line in lines] == [1, 2] and all(keys <= set(line) for line in lines)
    assert all(line["q1"] <= line["ms_per_token"] <= line["q3"] for line in lines)
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.parametrize(("model", "target", "fits"), [("Qwen3-32B", "rtx5090", False), ("Qwen3-0.6B", "rtx5090", True), ("Qwen3-0.6B", "cpp", True)])
def test_inspect_says_what_does_not_fit(model: str, target: str, fits: bool) -> None:
    done = mpk("inspect", model, "--target", target)
    assert done.returncode == 0 and ("does not fit" in done.stdout) != fits
    assert fits or ("65.6 GB" in done.stdout and "of 32 GB" in done.stdout)
