"""How the vocabulary is cut into slices for sampling on many workers."""

from __future__ import annotations

SMALLEST_SLICE = 256  # logits: below that, reading them costs less than having one more part to merge
LARGEST_SLICE = 8192  # logits: a slice's marks of seen tokens fit a block's private memory
MOST_PARTS = 512
PART_COLUMNS = 8  # what a part leaves, see cuda.cuh


def slices(vocab: int, workers: int) -> tuple[int, int]:
    """(parts, logits of a part): equal slices, a multiple of 32 logits, the last one shorter."""
    parts = min(max(workers, -(-vocab // LARGEST_SLICE)), MOST_PARTS)
    size = max(-(-vocab // parts), SMALLEST_SLICE)
    size = -(-size // 32) * 32
    return -(-vocab // size), size
