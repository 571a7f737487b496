"""How the splits of `rotary_attention` share the work of a step; the same rule as `Shares` in attention.cuh of the CUDA back end.

The work of a key-value head is a line: segment after segment, each with its blocks of `kv_block` positions times its tiles of
`TILE_QUERIES` queries. The line is cut into equal shares, one a split, at whole blocks; a short line is cut for fewer splits, so that
each has `LEAST_BLOCKS` at least. The step's own positions are part of the line: whoever has their block appends them to the cache.

Where the CUDA back end can, a step of one row is shared among single warps instead (`one_row`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

TILE_QUERIES = 8
LEAST_BLOCKS = 4
MOST_RESULTS = 4  # of a split in a step of one row; if there were more, its warps merge them first
WARPS = 8  # of a block of the CUDA back end
STATISTICS = 4  # columns behind the sums of a partial result: maximum, sum of exponentials, and two for alignment


def kv_block(head_dim: int) -> int:
    """Positions that a warp takes at a time."""
    return 32 if head_dim <= 64 else 16


def shares(segments: Sequence[tuple[int, int]], group: int, window: int, block: int, splits: int) -> list[list[tuple[int, int]]]:
    """Positions [begin, end) of every split of every segment, given as (position, rows); `window` 0: unlimited; empty: (0, 0)."""
    lines, work = [], 0
    for position, rows in segments:
        first = max(position - window + 1, 0) // block if window else 0
        count, tiles = (position + rows - 1) // block + 1 - first, -(-rows * group // TILE_QUERIES)
        lines.append((position + rows, first, count, tiles, work))
        work += count * tiles
    base, extra = divmod(work, min(-(-work // LEAST_BLOCKS), splits))
    out = []
    for end, first, count, tiles, before in lines:
        cuts = [min(max(-(-(s * base + min(s, extra) - before) // tiles), 0), count) for s in range(splits + 1)]
        out.append([((first + a) * block, min((first + b) * block, end)) if a < b else (0, 0) for a, b in pairwise(cuts)])
    return out


def has_one_row_form(group: int, head_dim: int, splits: int, max_rows: int) -> bool:
    """Whether a step of one row has a form of its own (`OneRow` of attention.cuh)."""
    return splits > 1 and group <= TILE_QUERIES and head_dim <= 128 and max_rows >= WARPS


def one_row(position: int, window: int, block: int, splits: int) -> list[tuple[int, int]]:
    """(row of the buffer, split) of every partial result of a step of one row, in the order in which they are merged."""
    blocks = position // block + 1 - (max(position - window + 1, 0) // block if window else 0)
    used = min(blocks, splits)
    return [(f // used, f % used) for f in range(used if blocks > MOST_RESULTS * splits else blocks)]
