"""Files of a model that change, disappear, or say something odd: noticed, as transformers reads them, or refused by name."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mpk.compiler import Compiler
from mpk.errors import ModelError
from mpk.frontend import load
from mpk.frontend.files import SAMPLE_BYTES, SAMPLES, files_fingerprint
from mpk.frontend.load import _possible_stops
from tests.support.models import tiny_model, write_gguf

EMBEDDING = "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny llama in one file."""
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A tiny llama in several files with an index."""
    tiny_model("llama").save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    return tmp_path / "sharded"


def set_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    (folder / "generation_config.json").unlink(missing_ok=True)


# ---- fingerprints
def test_a_file_replaced_with_its_size_and_time_kept_has_another_fingerprint(tmp_path: Path) -> None:
    path, other = tmp_path / "weights", tmp_path / "other"
    path.write_bytes(bytes(1 << 20))
    first = files_fingerprint([(path, 64)])
    assert files_fingerprint([(path, 64)]) == first
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    other.write_bytes(bytes(1 << 20))  # the same bytes even
    os.utime(other, ns=times)
    os.replace(other, path)
    assert path.stat().st_mtime_ns == times[1] and files_fingerprint([(path, 64)]) != first


def test_a_file_rewritten_in_place_with_its_time_set_back_has_another_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(1 << 20))
    first, times = files_fingerprint([(path, 64)]), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    with path.open("r+b") as file:
        file.seek(SAMPLE_BYTES + 1)
        file.write(b"x")
    os.utime(path, ns=times)
    assert files_fingerprint([(path, 64)]) != first


@pytest.mark.parametrize("size", [0, 1, SAMPLE_BYTES, SAMPLE_BYTES + 1, 3 << 20])
def test_samples_of_the_contents_are_in_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(size))
    stat = path.stat()
    monkeypatch.setattr(os, "fstat", lambda number: stat)  # a file system that tells nothing
    first = files_fingerprint([(path, 0)])
    places = {0, size - 1, (size - SAMPLE_BYTES) * 7 // (SAMPLES - 1)} & set(range(size))
    for place in places:
        path.write_bytes(bytes(place) + b"x" + bytes(size - place - 1))
        assert files_fingerprint([(path, 0)]) != first


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_model_that_is_gone_when_it_is_built_is_named(tmp_path: Path, folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPK_CACHE", str(tmp_path / "cache"))
    path = folder
    if kind == "gguf":
        path = tmp_path / "m.gguf"
        write_gguf(path, tiny_model("llama"))
    compiler = Compiler("cpp", dtype="f32", max_rows=8, max_batch=2, workers=2)
    graph = compiler.lower_model(path)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(ModelError, match=r"^cannot read .*, got No such file or directory; the model must stay in place until it is built$"):
        compiler.build(graph)


def test_a_file_that_changed_size_after_loading_is_refused(folder: Path) -> None:
    source, path = load(folder).source, folder / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelError, match=rf"model.safetensors changed after it was loaded, expected {size} bytes, got {size - 4}"):
        source.read(EMBEDDING)
    path.unlink()
    with pytest.raises(ModelError, match=r"cannot read .*model.safetensors, got No such file"):
        source.read(EMBEDDING)


# ---- the index
def test_a_single_file_wins_over_an_index_as_in_transformers(sharded: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model("llama")
    tensors = {name: p.detach().numpy() for name, p in model.named_parameters()}
    save_file({**tensors, EMBEDDING: tensors[EMBEDDING] + 1}, sharded / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(sharded).model.embed_tokens.weight.detach().numpy()
    np.testing.assert_array_equal(load(sharded).source.read(EMBEDDING), theirs)
    np.testing.assert_array_equal(theirs, tensors[EMBEDDING] + 1)


@pytest.mark.parametrize("name", [3, None, ["a"], {}, "", "../other.safetensors", "part/../../other.safetensors", "/other.safetensors"])
def test_an_index_that_names_no_file_of_the_folder_is_refused(sharded: Path, name: Any) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"][EMBEDDING] = name
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=rf"{INDEX}: file of tensor {EMBEDDING}, expected the name of a file in the folder, got "):
        load(sharded)


def test_an_index_whose_files_are_all_missing_does_not_become_random_weights(sharded: Path) -> None:
    for path in sharded.glob("*.safetensors"):
        path.unlink()
    for shapes in (False, True):
        with pytest.raises(ModelError, match=rf"safetensors is missing; .*{INDEX} names it; fetch all"):
            load(sharded, shapes=shapes)


# ---- stop tokens
@pytest.mark.parametrize(("stops", "kept", "named"), [([2, 131], (2,), r"\[131\]"), ([-1], (), r"\[-1\]"), (500, (), r"\[500\]")])
def test_stop_tokens_beyond_the_vocabulary_are_ignored_with_a_warning(folder: Path, stops: Any, kept: tuple[int, ...], named: str) -> None:
    set_config(folder, eos_token_id=stops)
    with pytest.warns(UserWarning, match=rf"stop tokens {named} are ignored, the vocabulary has ids 0 to 130"):
        assert load(folder).config.eos_tokens == kept
    (folder / "model.safetensors").unlink()
    with pytest.warns(UserWarning, match=rf"stop tokens {named} are ignored"):
        assert load(folder, shapes=True).config.eos_tokens == kept


def test_stop_tokens_within_the_vocabulary_are_kept_silently(folder: Path, recwarn: pytest.WarningsRecorder) -> None:
    config = replace(load(folder).config, eos_tokens=(0, 130))
    assert _possible_stops(config, "m") is config and not [w for w in recwarn if "stop tokens" in str(w.message)]
