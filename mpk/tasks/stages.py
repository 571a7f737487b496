"""How a matrix is cut into stages: what the CUDA back end streams through shared memory, one bulk copy each.

A tile is 16 rows of weights, or 8 where that shares a product better among workers (`mpk.passes.cut_tiles`). Its columns are split over the
8 warps of a block, each a contiguous eighth; a stage holds `depth` / 8 columns of every warp, in the order [warp][32 columns][mma
step][lane][16 bytes], or, of tiles of 8 rows, [warp][32 columns][lane][16 bytes] (see `linear/tiles.cuh`).
"""

from __future__ import annotations

from dataclasses import dataclass

from mpk.graph.tensor_graph import Operator

TILE_ROWS, HALF_ROWS = 16, 8
WARPS = 8
DEPTHS = (512, 256)  # columns of a stage of 16 rows: the larger, unless the smaller wastes less on padding; of 8 rows twice as many
GROUP = 8  # tiles whose sums a block holds at a time


@dataclass(frozen=True)
class StageShape:
    """`depth`: columns of a stage; `count`: stages of a tile (columns beyond the matrix are zero); `rows`: of a tile."""

    depth: int
    count: int
    rows: int = TILE_ROWS

    @property
    def bytes(self) -> int:
        return self.rows * self.depth * 2

    @property
    def padded_columns(self) -> int:
        return self.depth * self.count


def stage_shape(columns: int, rows: int = TILE_ROWS) -> StageShape:
    """Stages of a matrix with so many columns, in tiles of so many rows."""
    depth = min((d * TILE_ROWS // rows for d in DEPTHS), key=lambda d: (-(-columns // d) * d, -d))
    return StageShape(depth, -(-columns // depth), rows)


def stages_of(op: Operator) -> StageShape:
    """Stages of a product's matrix on a target whose tiles are rows of weights: `tile_columns` of each of the matrices side by side in a tile."""
    matrices = 2 if op.attrs.get("epilogue") == "swiglu" else 1
    return stage_shape(int(op.attrs["k"]), int(op.attrs.get("tile_columns", TILE_ROWS)) * matrices)


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
    """Tiles of a matrix with so many outputs, `tile_columns` a tile."""
    return -(-n // tile_columns)
