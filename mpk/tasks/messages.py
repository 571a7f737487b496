"""Messages between the ranks that share a model: the same rules as peer.hpp and peer.cuh.

A message is a matrix [rows, columns] of which every rank has a part. Parts travel as words of 8 bytes, a float32 value and a flag, so
that a reader sees with the value that it has come. In the memory of every rank a buffer of kind "peer" holds the parts of all ranks
side by side, [rows][ranks][columns] words. The flag of message m in step s is `base + s * messages + m`: it never comes twice in a run, so
nothing is reset. Two messages that follow each other use different buffers (`mpk.graph.peers` proves that this is enough).

One shot: every rank sends its part to all, and everyone sums them in the order of ranks. Two shots, for many rows: tiles have owners; a
part goes to the tile's owner alone, who sums it in the same order and sends the sum to all, in the place of its own part.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpk.graph.tensor_graph import Scalar

WORD_BYTES = 8
CONTROL_COLUMNS = 8  # columns beyond the hidden size by which rank 0 tells the others whether the host has cancelled


def owner_of_tile(tile: int, tiles: int, ranks: int) -> int:
    """The rank that sums a tile of a message that goes in two shots."""
    return tile * ranks // tiles


def in_two_shots(rows: int, attrs: Mapping[str, Scalar]) -> bool:
    """Whether a message of so many rows goes in two shots."""
    return rows > int(attrs["two_shot_rows"])


def two_shot_rows(most_bytes: float, columns: int, ranks: int) -> int:
    """Most rows of a message that go in one shot: those for which a rank sends at most `most_bytes` of float32 values."""
    return int(most_bytes // (4 * columns * (ranks - 1)))


def message_of(attrs: Mapping[str, Scalar]) -> tuple[int, int]:
    """Number of the message among those of a step, and how many these are: an instruction's two arguments."""
    return int(attrs["message"]), int(attrs["messages"])
