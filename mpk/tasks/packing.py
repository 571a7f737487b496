"""Packed panels of weights: 16 rows of a matrix side by side, in the order in which products read them.

bf16: [panels, k / 2, 16, 2] of uint16 (two k of a row side by side); f32: [panels, k, 16]. Rows beyond the matrix are zero.
"""

from __future__ import annotations

import numpy as np

from mpk.errors import InternalError
from mpk.tasks.base import WeightSource

PANEL = 16  # outputs of a panel
ELEMENT_BYTES = {"bf16": 2, "f32": 4}
BLOCK_ROWS = 1024  # rows of a source tensor held as float32 at a time


def panels_of(rows: int) -> int:
    """Panels that `rows` outputs take."""
    return -(-rows // PANEL)


def panel_bytes(k: int, dtype: str) -> int:
    """Bytes of one panel of depth `k`; raises `InternalError` for an odd depth, which has no pairs."""
    if k % 2:
        raise InternalError(f"packed weights of depth {k}, expected an even number")
    return PANEL * k * ELEMENT_BYTES[dtype]


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> bits of bf16 (uint16), rounded to nearest, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, (bits >> 16).astype(np.uint16) | np.uint16(0x40), rounded)


def read_bf16(source: WeightSource, name: str, begin: int, end: int) -> np.ndarray:
    """Rows [begin, end) of a tensor as bits of bf16 (uint16): as they are stored where the source can say so, else rounded."""
    stored = getattr(source, "read_bf16", None)
    return to_bf16(source.read(name, begin, end)) if stored is None else stored(name, begin, end)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """Bits of bf16 (uint16) -> float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values as they are after a round trip through the weight type."""
    return from_bf16(to_bf16(values)) if dtype == "bf16" else np.asarray(values, np.float32)


def panel_view(out: np.ndarray, k: int, dtype: str) -> np.ndarray:
    """`out` (uint8, contiguous, whole panels) as [panels, k / 2, 16, 2] uint16 or [panels, k, 16] float32."""
    if dtype == "bf16":
        return out.view(np.uint16).reshape(-1, k // 2, PANEL, 2)
    return out.view(np.float32).reshape(-1, k, PANEL)


def pack_rows(source: WeightSource, name: str, begin: int, end: int, panels: np.ndarray) -> None:
    """Pack rows [begin, end) of tensor `name` ([rows, k]) into `panels`, a (possibly strided) selection of `panel_view`."""
    bf16 = panels.dtype == np.uint16
    for first in range(begin, end, BLOCK_ROWS):
        last = min(first + BLOCK_ROWS, end)
        rows = source.read(name, first, last)
        count = panels_of(last - first)
        padded = np.zeros((count * PANEL, rows.shape[1]), panels.dtype)
        padded[: last - first] = to_bf16(rows) if bf16 else rows
        at = (first - begin) // PANEL
        if bf16:
            panels[at : at + count] = padded.reshape(count, PANEL, -1, 2).transpose(0, 2, 1, 3)
        else:
            panels[at : at + count] = padded.reshape(count, PANEL, -1).transpose(0, 2, 1)


def padded_vector(source: WeightSource, name: str) -> np.ndarray:
    """A bias as float32, padded with zeros to whole panels."""
    values = source.read(name).reshape(-1)
    out = np.zeros(panels_of(values.size) * PANEL, np.float32)
    out[: values.size] = values
    return out
