"""Files that commands write: each is named once, written whole or not at all, and asked for before long work is done."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpk.commands.common import writing
from mpk.errors import RequestError
from tests.support.command import refused, run_json


@contextmanager
def small_files() -> Iterator[None]:
    """No file of this process may grow beyond 4 KB, as on a disk that is full. (Not a fixture: the report of the tests is a file as well.)"""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("command", "one", "other"), [
    ("simulate", "--html", "--png"), ("simulate", "--html", "--perfetto"), ("trace", "--output", "--html"), ("inspect", "--save", "--picture"),
    ("inspect", "--picture", "--schedule")])
def test_two_outputs_in_one_file_are_refused(tmp_path: Path, command: str, one: str, other: str) -> None:
    path = tmp_path / "a"
    line = refused(command, "SmolLM2-135M", one, str(path), other, str(tmp_path / "." / "a"))
    assert f"{one} and {other} both name" in line and "a file each" in line
    assert not path.exists()


def test_outputs_may_be_thrown_away_together() -> None:
    found = run_json("simulate", "SmolLM2-135M", "--target", "cpp", "--workers", "2", "--html", "/dev/null", "--perfetto", "/dev/null", "--json")
    assert found["latency_us"] > 0


def test_a_file_that_cannot_be_written_whole_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    with small_files():
        line = refused("simulate", "SmolLM2-135M", "--target", "cpp", "--workers", "2", "--html", str(path))
    assert f"--html {path} cannot be written" in line and "there is room" in line
    assert not path.exists()


def test_a_graph_that_cannot_be_kept_is_simulated_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPK_CACHE", str(tmp_path))
    with small_files():
        found = run_json("inspect", "SmolLM2-135M", "--target", "h200", "--workers", "7", "--json")
    assert found["workers"] == 7
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix == ".npz"]


def test_an_interrupt_leaves_no_half_of_a_file_and_lines_that_were_there_before_stay(tmp_path: Path) -> None:
    half, lines = tmp_path / "half", tmp_path / "lines"
    with pytest.raises(KeyboardInterrupt), writing("--html", half):
        half.write_text("<html>")
        raise KeyboardInterrupt
    assert not half.exists()
    lines.write_text("one\n")
    with pytest.raises(RequestError, match="--output"), writing("--output", lines, appends=True):
        raise OSError(28, "No space left on device")
    assert lines.read_text() == "one\n"


def test_folders_are_looked_at_before_a_model_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("lowered")

    monkeypatch.setattr("mpk.compiler.Compiler.lower_model", never)
    for option in ("--save", "--picture", "--schedule"):
        assert f"{option} /no/such/folder/a cannot be written" in refused("inspect", "SmolLM2-135M", option, "/no/such/folder/a")


@pytest.mark.parametrize(("arguments", "text"), [
    (("simulate", "SmolLM2-135M", "--context", "8192"), "--context 8192, expected 1 to 8191 tokens before the step (the context of SmolLM2-135M is 8192)"),
    (("tune", "Llama-3.1-70B", "--target", "h200"), "expected at most 139 GB on each device, got 141.3 GB"),
    (("simulate", "Llama-3.1-70B", "--target", "h200"), "expected at most 139 GB on each device, got 141.3 GB")])
def test_what_would_not_fit_is_not_simulated(arguments: tuple[str, ...], text: str) -> None:
    assert text in refused(*arguments)
