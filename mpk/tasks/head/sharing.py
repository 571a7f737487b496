"""How the vocabulary is cut into slices for sampling on many workers, and what a slice leaves."""

from __future__ import annotations

from mpk.tasks.packing import PANEL

PART_COLUMNS = 8  # 4-byte columns of a Part of sampling.cuh: what a slice leaves for a special row
MESSAGE_COLUMNS = 4  # of a message of 16 bytes: what it leaves for every row, and a choice


def slices(vocab: int, workers: int) -> tuple[int, int]:
    """(slices, logits of one): a slice is what one of so many workers computes, whole tiles of the product; the last one is shorter."""
    tiles = -(-vocab // PANEL)
    size = -(-tiles // workers) * PANEL
    return -(-vocab // size), size
