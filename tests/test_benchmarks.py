"""Benchmarks from outside: help, one line for what is refused, and a soak that compares something."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.soak import soak
from mpk.runtime import cuda_device
from mpk.targets import hardware

NAMES = sorted(p.stem for p in (Path(__file__).parent.parent / "benchmarks").glob("*.py") if p.stem != "entry")
REFUSED = [  # a call, and what its line says
    (("against_llama_cpp", "--rounds", "0"), "rounds, expected 1 or more"),
    (("calibrate", "fit", "no-such-file"), "measurements no-such-file"),
    (("calibrate", "record", "no-such-file"), "expected a CUDA device"),
    (("calibrate", "record", "no-such-file", "--target", "cpp"), "target cpp, expected a target for GPUs"),
    (("cpp_kernels", "--threads", "0"), "threads, expected 1 or more"),
    (("cpp_kernels", "--rows", "1000"), "rows, expected 256 or less"),
    (("cuda_kinds",), "expected a CUDA device"),
    (("decode", "Qwen3-0.6B"), "expected a CUDA device"),
    (("decode", "Qwen3-0.6B", "1", "8", "64"), "context, expected 33 or more"),
    (("first_token", "no-such-shape"), "no-such-shape"),
    (("first_token", "Qwen3-0.6B", "--target", "h200"), "expected a CUDA device"),
    (("gpu_check", "--output", "unused"), "expected a CUDA device"),
    (("prompt", "Qwen3-0.6B", "512", "2048"), "expected a CUDA device"),
    (("prompt", "Qwen3-0.6B", "--trace", "512"), "expected a CUDA device"),
    (("prompt", "no-such-shape", "--compile"), "no-such-shape"),
    (("resources", "no-such-shape"), "no-such-shape"),
    (("resources", "Qwen3-0.6B:0"), "Qwen3-0.6B:0"),
    (("soak", "--model", "no-such-model"), "no-such-model"),
    (("soak", "--cases", "0"), "cases, expected 1 or more"),
    (("tensor_parallel", "--tp", "2"), "expected a CUDA device"),
    (("tiles", "Qwen3-0.6B:x"), "Qwen3-0.6B:x"),
    (("tiles", "Qwen3-0.6B"), "expected a CUDA device"),
]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_device, "device_count", lambda: 0)
    monkeypatch.setattr(hardware, "_first_device", lambda: None)


def code_of(name: str, *arguments: str) -> object:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(sys, "argv", [name, *arguments])
        patch.delitem(sys.modules, f"benchmarks.{name}", raising=False)
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    return stopped.value.code


@pytest.mark.parametrize("name", NAMES)
def test_help_is_given_and_unknown_options_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(name, "--help") == 0
    assert "usage:" in capsys.readouterr().out
    assert code_of(name, "--no-such-option") == 2


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("call", "said"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_what_is_refused_is_one_line(call: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = code_of(*call)  # text as a code: printed on standard error, exit code 1
    assert isinstance(line, str)
    assert line.startswith(f"{call[0]}: ")
    assert said in line
    assert "\n" not in line
    assert not list(tmp_path.iterdir())


def generated(*texts: int) -> Iterator[SimpleNamespace]:
    return (SimpleNamespace(tokens=[[text] * 100]) for text in texts)


@pytest.mark.parametrize(("text", "changed"), [(1, []), (2, [0])])
def test_a_soak_whose_first_round_is_long_enough_still_compares(text: int, changed: list[int]) -> None:
    results = generated(1, text)
    found = soak(lambda **_: next(results), [{}], 50, lambda: 0)
    assert (found["tokens"], found["repeats"], found["changed"]) == (200, 1, changed)


def test_a_soak_goes_on_until_it_has_its_tokens() -> None:
    results = generated(*[1] * 5)
    assert soak(lambda **_: next(results), [{}, {}], 500, lambda: 0)["repeats"] == 3
