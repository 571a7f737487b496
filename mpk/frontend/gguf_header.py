"""The header of a GGUF file: metadata and the places of tensors.

Parsed here because it stands on the way to the first token: `gguf.GGUFReader` makes several arrays for each of the 100,000
strings of a vocabulary and takes 4 s for SmolLM2's file, this takes 0.05 s. Dequantisation is the `gguf` package's.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpk.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

# Value types of the format: number -> (struct code, bytes).
_SCALARS = {0: ("<B", 1), 1: ("<b", 1), 2: ("<H", 2), 3: ("<h", 2), 4: ("<I", 4), 5: ("<i", 4), 6: ("<f", 4), 7: ("<?", 1),
            10: ("<Q", 8), 11: ("<q", 8), 12: ("<d", 8)}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9


@dataclass(frozen=True)
class TensorType:
    """How elements are stored: `block` elements in `size` bytes."""

    name: str
    block: int
    size: int


# Types that are read, by the format's number.
TENSOR_TYPES = {
    0: TensorType("F32", 1, 4), 1: TensorType("F16", 1, 2), 2: TensorType("Q4_0", 32, 18), 3: TensorType("Q4_1", 32, 20),
    8: TensorType("Q8_0", 32, 34), 12: TensorType("Q4_K", 256, 144), 14: TensorType("Q6_K", 256, 210), 30: TensorType("BF16", 1, 2)}


@dataclass(frozen=True)
class TensorInfo:
    """Place of a tensor: type number, shape as in numpy (last dimension contiguous), byte offset in the file."""

    type_number: int
    shape: tuple[int, ...]
    offset: int


@dataclass
class GGUFHeader:
    """Metadata (numbers, strings, lists or arrays of them) and tensors of one file; `size` is the header's length in bytes."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    size: int


class _Cursor:
    """Reads values one after the other; a `ModelError` says where the file ends too early."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at, self.end = data, path, 0, len(data)

    def need(self, count: int) -> None:
        if count > self.end - self.at:
            raise ModelError(f"{self.path} is truncated", expected=f"{count} more bytes of header at offset {self.at}",
                             actual=f"a file of {self.end} bytes")

    def unpack(self, code: str, size: int) -> Any:
        self.need(size)
        value = struct.unpack_from(code, self.data, self.at)[0]
        self.at += size
        return value

    def u32(self) -> int:
        return int(self.unpack("<I", 4))

    def u64(self) -> int:
        return int(self.unpack("<Q", 8))

    def string(self) -> str:
        length = self.u64()
        self.need(length)
        raw = self.data[self.at:self.at + length]
        self.at += length
        return raw.decode("utf-8")

    def strings(self, count: int) -> list[str]:
        """`count` strings; the loop is written out because vocabularies hold hundreds of thousands."""
        self.need(8 * count)
        data, at, end, unpack = self.data, self.at, self.end, struct.Struct("<Q").unpack_from
        out = []
        for _ in range(count):
            if at + 8 > end:
                break
            begin = at + 8
            at = begin + unpack(data, at)[0]
            if at > end:
                break
            out.append(data[begin:at].decode("utf-8"))
        self.at = min(at, end)
        if len(out) < count:
            self.need(1 + self.end)
        return out

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.u32(), self.u64()
            if element == _STRING:
                return self.strings(count)
            if element not in _SCALARS:
                raise self.damaged(f"array of type {element}")
            code, size = _SCALARS[element]
            self.need(size * count)
            array = np.frombuffer(self.data[self.at:self.at + size * count], np.dtype(code))
            self.at += size * count
            return array
        if kind not in _SCALARS:
            raise self.damaged(f"value of type {kind}")
        value = self.unpack(*_SCALARS[kind])
        # The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path} has a damaged header", actual=f"{what} at offset {self.at}")


def read_header(path: Path) -> GGUFHeader:
    """Parse the header; `ModelError` for files that are missing, truncated, damaged, or of another format or version."""
    try:
        with open(path, "rb") as f:
            data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as e:
        raise ModelError(f"cannot read {path}", actual=e.strerror or str(e)) from e
    except ValueError as e:
        raise ModelError(f"{path} is empty", expected="a GGUF file") from e
    with data:
        try:
            return _parse(_Cursor(data, path))
        except UnicodeDecodeError as e:
            raise ModelError(f"{path} has a damaged header", actual=str(e)) from e


def _parse(c: _Cursor) -> GGUFHeader:
    magic = c.data[:4]
    c.at = 4
    if magic != MAGIC:
        raise ModelError(f"{c.path} is not a GGUF file", expected="the first bytes 'GGUF'", actual=repr(magic))
    version = c.u32()
    if version not in VERSIONS:
        big_endian = version & 0xFFFF == 0
        raise ModelError(f"{c.path}: GGUF {'in big-endian order' if big_endian else f'version {version}'}",
                         remedy="supported: little-endian versions 2 and 3")
    tensor_count, value_count = c.u64(), c.u64()
    metadata = {}
    for _ in range(value_count):
        key = c.string()
        metadata[key] = c.value(c.u32())
    raw = {}
    for _ in range(tensor_count):
        name = c.string()
        dimensions = c.u32()
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise c.damaged(f"tensor {name} with {dimensions} dimensions")
        shape = tuple(reversed([c.u64() for _ in range(dimensions)]))
        if 0 in shape:
            raise c.damaged(f"tensor {name} of shape {list(shape)}")
        raw[name] = (c.u32(), shape, c.u64())
    alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    if alignment <= 0 or alignment & (alignment - 1):
        raise c.damaged(f"alignment {alignment}")
    start = -(-c.at // alignment) * alignment
    tensors = {name: TensorInfo(kind, shape, start + offset) for name, (kind, shape, offset) in raw.items()}
    for name, t in tensors.items():
        _check_extent(c, name, t)
    return GGUFHeader(metadata, tensors, c.at)


def _check_extent(c: _Cursor, name: str, t: TensorInfo) -> None:
    kind = TENSOR_TYPES.get(t.type_number)
    if kind is None:
        return  # refused by name when it is needed
    elements = math.prod(t.shape)
    if t.shape[-1] % kind.block:
        raise c.damaged(f"tensor {name} {list(t.shape)} in blocks of {kind.block} ({kind.name})")
    end = t.offset + elements // kind.block * kind.size
    if end > c.end:
        raise ModelError(f"{c.path} is truncated", expected=f"{end} bytes up to tensor {name}", actual=f"{c.end} bytes")
