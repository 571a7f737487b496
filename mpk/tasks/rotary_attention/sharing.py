"""How the splits of `rotary_attention` share the context; the same rule as attention.cuh of the CUDA back end.

Past positions (before the segment's first one) are shared in blocks of `kv_block`, contiguous and equal, the first shares one block
larger. The step's own positions belong to the last split, which also appends their keys and values.
"""

from __future__ import annotations


def kv_block(head_dim: int) -> int:
    """Positions that a warp takes at a time."""
    return 32 if head_dim <= 64 else 16


def past_positions(position: int, window: int, split: int, splits: int, block: int) -> tuple[int, int]:
    """[begin, end) of the past positions of a split, for a segment that starts at `position`; `window` 0: unlimited."""
    first = max(position - window + 1, 0) if window else 0
    if first >= position:
        return 0, 0
    begin, end = first // block, -(-position // block)
    base, extra = divmod(end - begin, splits)
    own, count = begin + split * base + min(split, extra), base + (split < extra)
    return (max(own * block, first), min((own + count) * block, position)) if count else (0, 0)
