"""How a matrix is cut into stages: what the CUDA back end streams through shared memory, one bulk copy each.

A tile is 16 rows of weights. Its columns are split over the 8 warps of a block, each a contiguous eighth; a stage holds `depth` / 8
columns of every warp, in the order [warp][32 columns][mma step][lane][16 bytes] (see `linear/cuda.cuh`).
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_ROWS = 16
WARPS = 8
DEPTHS = (512, 256)  # columns of a stage: the larger, unless the smaller wastes less on padding
GROUP = 8  # tiles whose sums a block holds at a time


@dataclass(frozen=True)
class StageShape:
    """`depth`: columns of a stage; `count`: stages of a tile (columns beyond the matrix are zero)."""

    depth: int
    count: int

    @property
    def bytes(self) -> int:
        return TILE_ROWS * self.depth * 2

    @property
    def padded_columns(self) -> int:
        return self.depth * self.count


def stage_shape(columns: int) -> StageShape:
    """Stages of a matrix with so many columns."""
    depth = min(DEPTHS, key=lambda d: (-(-columns // d) * d, -d))
    return StageShape(depth, -(-columns // depth))


def groups(tiles: int) -> list[int]:
    """Sizes of the groups that a task of so many tiles computes one after the other: as equal as possible, at most `GROUP`."""
    count = -(-tiles // GROUP)
    return [tiles // count + (i < tiles % count) for i in range(count)]


def stage_order(tiles: int, count: int) -> list[tuple[int, int]]:
    """(tile, stage of the tile) in the order in which a task of `tiles` tiles with `count` stages each uses them.

    Group by group; within a group stage by stage, and for each all tiles of the group, so that a part of the input serves them all.
    """
    order, first = [], 0
    for size in groups(tiles):
        order += [(first + t, stage) for stage in range(count) for t in range(size)]
        first += size
    return order


def packed_tiles(n: int, tile_columns: int) -> int:
    """Tiles of a matrix with so many outputs, `tile_columns` (8 gate and 8 up rows, or 16 rows) a tile."""
    return -(-n // tile_columns)
