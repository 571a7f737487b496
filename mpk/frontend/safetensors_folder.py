"""Weights from a folder in transformers' layout: `config.json` and safetensors, in one file or sharded with an index.

The format: 8 bytes little-endian length of the header, a JSON header (name -> dtype, shape, byte range), raw data. Files are
mapped into memory; only the rows that are asked for are read and widened to float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from mpk.errors import ModelError
from mpk.frontend.files import files_fingerprint, read_json
from mpk.frontend.source import TensorSource

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: Mapping[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}  # bf16 as its bit pattern
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
PREFIX = "model."  # missing where the decoder was saved without its head


@dataclass(frozen=True)
class _Tensor:
    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int  # byte offset in the file
    end: int


class SafetensorsFolder(TensorSource):
    """The tensors of all safetensors files of a folder, by name."""

    def __init__(self, folder: Path) -> None:
        """Read the headers; raises `ModelError` for missing, truncated or damaged files."""
        super().__init__()
        self.folder = folder
        self._files: dict[Path, int] = {}  # file -> length of its header
        self._sizes: dict[Path, int] = {}
        self._tensors: dict[str, _Tensor] = {}
        self._maps: dict[Path, np.ndarray] = {}
        for path in _shards(folder):
            self._read_header(path)
        if "embed_tokens.weight" in self._tensors:
            self._tensors = {name if name.startswith("lm_head.") else PREFIX + name: t for name, t in self._tensors.items()}

    def _read_header(self, path: Path) -> None:
        try:
            size = path.stat().st_size
            with open(path, "rb") as f:
                prefix = f.read(8)
                length = int.from_bytes(prefix, "little")
                if len(prefix) < 8:
                    raise ModelError(f"{path} is truncated or not a safetensors file",
                                     actual=f"a file of {size} bytes, too short for a safetensors header")
                if length > min(size - 8, MAX_HEADER_BYTES):
                    raise ModelError(f"{path} is truncated or not a safetensors file", expected=f"a header of {length} bytes",
                                     actual=f"a file of {size} bytes")
                header: dict[str, Any] = json.loads(f.read(length))
        except OSError as e:
            raise ModelError(f"cannot read {path}", actual=e.strerror or str(e)) from e
        except ValueError as e:
            if isinstance(e, ModelError):
                raise
            raise ModelError(f"{path} has a damaged header", actual=str(e)) from e
        start = 8 + length
        self._files[path], self._sizes[path] = start, size
        header.pop("__metadata__", None)
        for name, entry in header.items():
            self._tensors[name] = _tensor(path, name, entry, start, size)

    def names(self) -> list[str]:
        return list(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def where(self, name: str) -> str:
        return str(self._tensors[name].path if name in self._tensors else next(iter(self._files), self.folder))

    def _shape(self, name: str) -> tuple[int, ...]:
        t = self._tensors[name]
        if t.dtype not in DTYPES:
            raise ModelError(f"tensor {name} in {t.path} is of type {t.dtype}", remedy=f"supported: {', '.join(DTYPES)}")
        return t.shape

    def _rows(self, name: str, begin: int, end: int) -> np.ndarray:
        stored = self._stored(name)[begin:end]
        if self._tensors[name].dtype == "BF16":
            return np.asarray((stored.astype(np.uint32) << np.uint32(16)).view(np.float32))
        return np.asarray(stored, np.float32)

    def _bf16_rows(self, name: str, begin: int, end: int) -> np.ndarray | None:
        return self._stored(name)[begin:end] if self._tensors[name].dtype == "BF16" else None

    def _stored(self, name: str) -> np.ndarray:
        """The tensor as it stands in its file."""
        t = self._tensors[name]
        if t.path not in self._maps:
            self._maps[t.path] = self._map(t.path)
        return self._maps[t.path][t.begin:t.end].view(DTYPES[t.dtype]).reshape(t.shape)

    def _map(self, path: Path) -> np.ndarray:
        """The file as bytes; `ModelError` if it is no longer the one whose header was read."""
        try:
            data = np.asarray(np.memmap(path, np.uint8, "r"))
        except (OSError, ValueError) as e:  # ValueError: it is empty now
            reason = e.strerror if isinstance(e, OSError) else None
            raise ModelError(f"cannot read {path}", actual=reason or str(e), remedy="the model must stay in place until it is built") from e
        if len(data) != self._sizes[path]:
            raise ModelError(f"{path} changed after it was loaded", expected=f"{self._sizes[path]} bytes", actual=str(len(data)))
        return data

    def fingerprint(self) -> str:
        return files_fingerprint(sorted(self._files.items()))


def _shards(folder: Path) -> list[Path]:
    """The files to read; a single file wins over an index, as in transformers."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise ModelError(str(folder / INDEX), expected="a 'weight_map' from tensors to files")
        for tensor, name in index.items():
            if not isinstance(name, str) or not name or PurePath(name).is_absolute() or ".." in PurePath(name).parts:
                raise ModelError(f"{folder / INDEX}: file of tensor {tensor}", expected="the name of a file in the folder", actual=repr(name))
        shards = [folder / name for name in sorted(set(index.values()))]
        for shard in shards:
            if not shard.is_file():
                raise ModelError(f"{shard} is missing", remedy=f"{folder / INDEX} names it; fetch all {len(shards)} files of the model")
        return shards
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return others
    raise ModelError(f"no weights in {folder}", expected=f"{SINGLE}, or {INDEX} and its files", remedy="supported: safetensors, GGUF")


def _tensor(path: Path, name: str, entry: Any, start: int, size: int) -> _Tensor:
    try:
        dtype, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
        begin, end = (start + int(n) for n in entry["data_offsets"])
    except (TypeError, KeyError, ValueError, OverflowError) as e:
        raise ModelError(f"{path} has a damaged header", actual=f"tensor {name}: {entry!r}") from e
    if end > size:
        raise ModelError(f"{path} is truncated", expected=f"{end} bytes up to tensor {name}", actual=f"{size} bytes")
    expected = math.prod(shape) * DTYPES[dtype].itemsize if dtype in DTYPES else end - begin
    if not start <= begin <= end or end - begin != expected:
        raise ModelError(f"{path} has a damaged header", expected=f"{expected} bytes for tensor {name} {list(shape)} {dtype}",
                         actual=f"{end - begin}")
    return _Tensor(path, dtype, shape, begin, end)
