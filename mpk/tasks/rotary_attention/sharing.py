"""How the splits of `rotary_attention` share the work of a step; the same rule as `Shares` in attention.cuh of the CUDA back end.

The work of a key-value head is a line: segment after segment, each with its blocks of `kv_block` positions times its tiles of
`TILE_QUERIES` queries. The line is cut into equal shares, one a split, at whole blocks; a short line is cut for fewer splits, so that
each has `LEAST_BLOCKS` at least. The step's own positions are part of the line: whoever has their block appends them to the cache.

Where the CUDA back end can, a step that only decodes is shared among single warps instead (`single_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

TILE_QUERIES = 8
LEAST_BLOCKS = 4
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


def has_single_rows_form(segments: Sequence[tuple[int, int]], group: int, head_dim: int, splits: int, max_rows: int) -> bool:
    """Whether the step is shared among single warps (`SingleRows` of attention.cuh); segments as (position, rows)."""
    possible = splits > 1 and group <= TILE_QUERIES and head_dim <= 128 and max_rows >= WARPS
    return possible and all(rows == 1 for _, rows in segments) and 2 * len(segments) <= WARPS * splits


def single_rows(positions: Sequence[int], window: int, block: int, splits: int) -> list[list[tuple[int, int]]]:
    """Where the partial results of each row of a step that only decodes are, in the order in which they are merged: (row of the buffer, split).

    A row has as many as it takes for none to be of more blocks than the least number for which there are `WARPS` a split at most.
    """
    blocks = [position // block + 1 - (max(position - window + 1, 0) // block if window else 0) for position in positions]
    most = 1
    while sum(-(-b // most) for b in blocks) > WARPS * splits:
        most += 1
    ends = list(accumulate(-(-b // most) for b in blocks))
    return [[divmod(f, splits) for f in range(begin, end)] for begin, end in pairwise([0, *ends])]
