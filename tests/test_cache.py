"""The cache of compiled programs and packed weights: found again, noticed when damaged, never served stale."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpk.codegen import compile as compile_module
from mpk.codegen.cache import Store, checksum, digest
from mpk.codegen.compile import compile_program, find_compiler
from mpk.codegen.program import BACKEND, ProgramSource
from mpk.codegen.weights import load_weights
from mpk.errors import InternalError, TargetError
from tests.support.toy import ToySource, toy_graph
from tests.support.toy_engine import toy_kinds

SOURCE = ProgramSource('extern "C" int answer() { return 42; }\n', (BACKEND / "include",))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    with toy_kinds(tmp_path / "cache"):
        yield tmp_path / "cache"


def store_text(store: Store, key: str, text: str) -> Path:
    made = store.temporary(key)
    made.write_text(text)
    return store.commit(key, made, {"made of": text}).path


# ---- the store
def test_an_entry_is_found_with_its_notes(cache: Path) -> None:
    store = Store("things", ".txt")
    assert store.find("key") is None
    path = store_text(store, "key", "contents")
    entry = Store("things", ".txt").find("key")
    assert entry is not None and entry.path == path and path.read_text() == "contents"
    assert entry.notes == {"made of": "contents"} and path.parent == cache / "things"
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(".")] == []


def damage_payload(payload: Path, manifest: Path) -> None:
    data = bytearray(payload.read_bytes())
    data[3] ^= 1
    payload.write_bytes(data)


def truncate_payload(payload: Path, manifest: Path) -> None:
    payload.write_bytes(payload.read_bytes()[:-1])


def remove_payload(payload: Path, manifest: Path) -> None:
    payload.unlink()


def truncate_manifest(payload: Path, manifest: Path) -> None:
    manifest.write_text(manifest.read_text()[:-20])


def empty_manifest(payload: Path, manifest: Path) -> None:
    manifest.write_bytes(b"")


def binary_manifest(payload: Path, manifest: Path) -> None:
    manifest.write_bytes(b"\xff\xfe\x00")


def alter_notes(payload: Path, manifest: Path) -> None:
    manifest.write_text(manifest.read_text().replace("made of", "made off"))


def other_format(payload: Path, manifest: Path) -> None:
    data = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**data, "format": 0}))


DAMAGES = [damage_payload, truncate_payload, remove_payload, truncate_manifest, empty_manifest, binary_manifest, alter_notes, other_format]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_reported_and_made_again(damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    store = Store("things", ".txt")
    payload = store_text(store, "key", "contents")
    damage(payload, payload.parent / "key.json")
    with caplog.at_level(logging.WARNING):
        assert store.find("key") is None
    assert "key.json is damaged and will be made again" in caplog.text
    assert not (payload.parent / "key.json").exists()
    store_text(store, "key", "contents")
    assert store.find("key") is not None


def test_a_cache_that_cannot_be_written_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MPK_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(TargetError, match=r"cache folder .*/file/cache/programs cannot be written \(.*\); set MPK_CACHE to a folder that can"):
        compile_program(SOURCE)


def test_too_little_disk_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 2**30))  # type: ignore[attr-defined]
    with pytest.raises(TargetError, match=r"expected 3.00 GiB of free space, got 1.00; .*MPK_CACHE"):
        Store("weights", ".bin").require_space(3 * 2**30)


@pytest.mark.parametrize("place", ["key.json", "payload"])
def test_a_directory_in_an_entrys_place_is_healed_when_empty_and_named_when_not(cache: Path, place: str) -> None:
    store = Store("things", ".txt")
    made = store.temporary("key")
    made.write_text("contents")
    payload = store.commit("key", made, {})
    obstacle = payload.path if place == "payload" else payload.path.parent / "key.json"
    obstacle.unlink()
    obstacle.mkdir()
    assert store.find("key") is None and store_text(store, "key", "contents").is_file()
    obstacle.unlink()
    obstacle.mkdir()
    (obstacle / "file").write_text("somebody's")
    assert store.find("key") is None
    with pytest.raises(TargetError, match=r"^cache folder .*/cache/things cannot be written \(.*\); set MPK_CACHE to a folder"):
        store_text(store, "key", "contents")
    assert [p.name for p in payload.path.parent.glob(".*.json")] == []


def test_a_disk_that_fills_while_writing_is_named_and_leaves_no_drafts(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, text: str) -> None:
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = Store("things", ".txt")
    made = store.temporary("key")
    made.write_bytes(b"contents")
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(TargetError, match=r"cannot be written \(No space left on device\); set MPK_CACHE"):
        store.commit("key", made, {})
    assert [p.name for p in (cache / "things").iterdir()] == [made.name]


def limited(code: str, cache: Path) -> str:
    """Run code in a process that can write files of 64 KiB at most; returns its output."""
    start = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
    environment = {**os.environ, "MPK_CACHE": str(cache)}
    done = subprocess.run([sys.executable, "-c", start + code], env=environment, check=True, capture_output=True, text=True)
    return done.stdout


def test_files_larger_than_allowed_are_refused_by_name(cache: Path) -> None:
    said = limited("from pathlib import Path\nfrom mpk.codegen.cache import Store\nfrom mpk.codegen.weights import _reserve\n"
                   "store = Store('weights', '.bin')\nmade = store.temporary('key')\n"
                   "try:\n with store.writing(): _reserve(made, 1 << 20)\nexcept ValueError as e: print(type(e).__name__, e)", cache)
    assert said.startswith(f"TargetError cache folder {cache}/weights cannot be written (File too large); set MPK_CACHE")


def test_a_compiler_that_cannot_write_its_output_is_refused(cache: Path) -> None:
    said = limited("from mpk.codegen.compile import compile_program\nfrom mpk.codegen.program import ProgramSource\n"
                   "text = 'extern \"C\" const unsigned char data[1 << 20] = {1};'\n"
                   "try: compile_program(ProgramSource(text, ()))\nexcept ValueError as e: print(type(e).__name__, e)", cache)
    assert said.startswith("TargetError C++ compiler ") and "cannot write" in said and "; set MPK_CACHE and TMPDIR" in said
    assert list((cache / "programs").iterdir()) == []


def test_checksum_sees_every_byte_and_digest_where_parts_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = np.random.default_rng(0).integers(0, 256, 20 << 20, dtype=np.uint8)
    data.tofile(path)
    first = checksum(path)
    data[-1] ^= 1
    data.tofile(path)
    assert checksum(path) != first
    assert digest("ab", "c") != digest("a", "bc") and digest("ab", "c") == digest(b"ab", b"c")
    path.write_bytes(b"")
    assert len(checksum(path)) == 16


def test_files_of_killed_processes_are_removed_after_a_day() -> None:
    store = Store("things", ".txt")
    old, fresh = store.temporary("a"), store.temporary("b")
    old.write_text("half")
    fresh.write_text("half")
    os.utime(old, (0, 0))
    store.temporary("c")
    assert not old.exists() and fresh.exists()


# ---- programs
def test_a_program_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    path = compile_program(SOURCE)
    monkeypatch.setattr(compile_module, "build_library", lambda *a: pytest.fail("compiled again"))
    assert compile_program(SOURCE) == path


def test_a_damaged_program_is_compiled_again() -> None:
    path = compile_program(SOURCE)
    good = path.read_bytes()
    path.write_bytes(good[:-100])
    again = compile_program(SOURCE)
    assert len(again.read_bytes()) >= len(good) - 16
    assert compile_program(SOURCE) == again


def test_flags_source_and_headers_are_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    include = tmp_path / "include"
    include.mkdir()
    (include / "part.hpp").write_text("#define ANSWER 1\n")
    source = ProgramSource('#include "part.hpp"\nextern "C" int answer() { return ANSWER; }\n', (include,))
    paths = [compile_program(source), compile_program(source, portable=True), compile_program(source, extra_flags=("-O0",))]
    (include / "part.hpp").write_text("#define ANSWER 2\n")
    paths.append(compile_program(source))
    paths.append(compile_program(ProgramSource(source.text + "\n", source.include_dirs)))
    monkeypatch.setattr(compile_module, "processor", lambda: "another")
    paths.append(compile_program(source))
    assert len({p.name.split("-")[0] for p in paths}) == 6


def test_no_compiler_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TargetError, match=r"no C\+\+ compiler found, expected c\+\+, g\+\+ or clang\+\+ in PATH; install one"):
        find_compiler()
    monkeypatch.setenv("CXX", "no-such-compiler -x")
    with pytest.raises(TargetError, match=r"'no-such-compiler -x' \(from CXX\) is not there"):
        find_compiler()


def test_a_compiler_command_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", '"')
    with pytest.raises(TargetError, match=r"C\+\+ compiler '\"' \(from CXX\) is no command line \(No closing quotation\); set CXX"):
        find_compiler()


@pytest.mark.parametrize("version", ["echo c++ 1.0", "true"])
def test_a_compiler_without_output_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str) -> None:
    idle = tmp_path / "idle-c++"
    idle.write_text(f"#!/bin/sh\n{version}\n")
    idle.chmod(0o755)
    monkeypatch.setenv("CXX", str(idle))
    with pytest.raises(TargetError, match=r"idle-c\+\+' reports success but makes no output; set CXX"):
        compile_program(SOURCE)


def test_a_temporary_folder_that_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(TargetError, match=r"cannot be compiled in the temporary folder \(No such file or directory\); set TMPDIR"):
        compile_program(SOURCE)


def test_a_compiler_that_cannot_do_the_language_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "old-c++"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "old 1.0" && exit 0\necho "error: unknown option -std=c++17" >&2\nexit 1\n')
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    with pytest.raises(TargetError, match=r"cannot compile C\+\+17 with threads"):
        compile_program(SOURCE)


def test_a_compiler_without_native_tuning_is_used_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    tool = tmp_path / "plain-c++"
    tool.write_text(f'#!/bin/sh\nfor a in "$@"; do [ "$a" = -march=native ] && echo "error: bad -march" >&2 && exit 1; done\nexec {real} "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("CXX", str(tool))
    assert compile_program(SOURCE).stat().st_size > 1000


def test_source_that_does_not_compile_is_our_error() -> None:
    with pytest.raises(InternalError, match=r"does not compile: .*error.*nonsense"):
        compile_program(ProgramSource("nonsense;\n", ()))


# ---- weights
class CountingSource(ToySource):
    """Counts reads, and may hold a NaN that it warns about."""

    reads = 0
    broken = False

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        self.reads += 1
        if self.broken:
            warnings.warn("tensor table holds NaN", UserWarning, stacklevel=2)
        return super().read(name, begin, end)


def test_weights_are_packed_once_and_mapped_read_only() -> None:
    graph, source = toy_graph(), CountingSource(97)
    progress: list[tuple[int, int]] = []
    packed = load_weights(graph, source, lambda done, total: progress.append((done, total)))
    assert source.reads == 1 and progress == [(0, 97 * 64), (97 * 64, 97 * 64)]
    assert (packed.weights.view(np.float32).reshape(97, 16)[:, 0] == source.table).all()
    assert packed.params.view(np.float32)[:3].tolist() == [31, 17, 101]
    again = load_weights(toy_graph(), source, lambda done, total: pytest.fail("packed again"))
    assert source.reads == 1 and again.path == packed.path and (again.weights == packed.weights).all()
    with pytest.raises(ValueError, match="read-only"):
        again.weights[0] = 1
    assert graph.param_offsets == {"logits": 0}


def test_other_contents_another_place_or_another_packing_are_packed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_weights(toy_graph(), ToySource(97)).path
    assert load_weights(toy_graph(), ToySource(97, seed=1)).path != first
    moved = toy_graph()
    moved.weight_offsets = {"table": 64}
    moved.weight_bytes += 64
    assert load_weights(moved, ToySource(97)).path != first
    assert load_weights(toy_graph(workers=7), ToySource(97)).path == first  # the schedule does not matter


@pytest.mark.parametrize("damage", [damage_payload, truncate_payload, remove_payload, truncate_manifest])
def test_damaged_weights_are_packed_again(damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    source = CountingSource(97)
    packed = load_weights(toy_graph(), source)
    path = packed.path
    del packed
    damage(path, path.parent / f"{path.name.split('-')[0]}.json")
    again = load_weights(toy_graph(), source)
    assert source.reads == 2 and "damaged" in caplog.text
    assert (again.weights.view(np.float32).reshape(97, 16)[:, 0] == source.table).all()


def test_what_a_source_warns_about_is_repeated_at_every_load() -> None:
    source = CountingSource(97)
    source.broken = True
    for _ in range(2):
        with pytest.warns(UserWarning, match="tensor table holds NaN"):
            load_weights(toy_graph(), source)
    assert source.reads == 1


def test_a_failed_packing_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: ToySource, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        raise OSError("disk went away")

    monkeypatch.setattr(ToySource, "read", fail)
    with pytest.raises(OSError, match="disk went away"):
        load_weights(toy_graph(), ToySource(97))
    assert os.listdir(cache / "weights") == []
