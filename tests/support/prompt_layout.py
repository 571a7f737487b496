"""Layouts of the prompt graph's operands in numpy: packed weights and activations in chunks (mpk/targets/cuda/include/mpk/tiles.cuh)."""

from __future__ import annotations

import numpy as np

from mpk.tasks.stages import HALF_ROWS, TILE_ROWS, WARPS, stage_shape

CHUNK = 64


def packed(bits: np.ndarray, tile_rows: int = TILE_ROWS) -> np.ndarray:
    """Fragments uint16 [tiles, stages, stage bytes / 2] of a matrix of bf16 bits [rows, k]; rows and columns beyond it are zero."""
    shape = stage_shape(bits.shape[1], tile_rows)
    tiles, parts = -(-bits.shape[0] // tile_rows), shape.depth // WARPS // 32
    padded = np.zeros((tiles * tile_rows, shape.padded_columns), np.uint16)
    padded[: bits.shape[0], : bits.shape[1]] = bits
    if tile_rows == HALF_ROWS:  # tile, g, warp, stage, part, q, element
        return np.ascontiguousarray(padded.reshape(tiles, 8, WARPS, shape.count, parts, 4, 8).transpose(0, 3, 2, 4, 1, 5, 6)).reshape(tiles, shape.count, -1)
    # tile, half, g, warp, stage, part, q, s, j, e
    cut = padded.reshape(tiles, 2, 8, WARPS, shape.count, parts, 4, 2, 2, 2)
    return np.ascontiguousarray(cut.transpose(0, 4, 3, 5, 7, 2, 6, 8, 1, 9)).reshape(tiles, shape.count, -1)


def gated_rows(gate: np.ndarray, up: np.ndarray, turn: int = 8) -> np.ndarray:
    """Rows of gate and up in turns of so many, as swiglu tiles have them; padded with zeros to whole turns."""
    pad = ((0, -len(gate) % turn), (0, 0))
    return np.stack([np.pad(m, pad).reshape(-1, turn, m.shape[1]) for m in (gate, up)], axis=1).reshape(-1, gate.shape[1])


def chunked(bits: np.ndarray, room: int) -> np.ndarray:
    """Activations of bf16 bits [rows, k] as uint16 [chunks, room, 64]; padding columns are zero, rows beyond the step NaN."""
    rows, k = bits.shape
    padded = np.zeros((rows, -(-k // CHUNK) * CHUNK), np.uint16)
    padded[:, :k] = bits
    units = padded.reshape(rows, -1, 2, 4, 2, 2, 2).transpose(1, 0, 2, 4, 5, 3, 6).reshape(-1, rows, 8, 8)
    out = np.full((units.shape[0], room, 8, 8), 0x7FC5, np.uint16)
    for row in range(rows):
        out[:, row, np.arange(8) ^ (row % 8)] = units[:, row]
    return out.reshape(-1, room, CHUNK)


def unchunked(chunks: np.ndarray, rows: int) -> np.ndarray:
    """The inverse of `chunked`: bits [rows, chunks * 64]."""
    units = chunks.reshape(chunks.shape[0], -1, 8, 8)
    plain = np.stack([units[:, row, np.arange(8) ^ (row % 8)] for row in range(rows)], axis=1)
    return np.ascontiguousarray(plain.reshape(-1, rows, 2, 2, 2, 4, 2).transpose(1, 0, 2, 5, 3, 4, 6)).reshape(rows, -1)
