"""How the splits of attention share their work; the same rule as attention_math.hpp, which says why.

A row's softmax is made of `splits` chains: chain s takes the pages p of the context with p % splits == s. In a segment of few
rows task s computes chain s of every row. In one of many rows, blocks of `QUERY_ROWS` rows go around the tasks, and the owner of
a row computes all its chains and leaves one finished partial result.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpk.graph.tensor_graph import Scalar

QUERY_ROWS = 16


def rows_are_shared(segment_rows: int, splits: int) -> bool:
    """Whether rows, not pages of the context, are shared among the splits."""
    return splits > 1 and segment_rows >= QUERY_ROWS * splits


def owner_of_row(row_in_segment: int, splits: int) -> int:
    """The split that computes a row of a segment whose rows are shared."""
    return row_in_segment // QUERY_ROWS % splits


def partial_columns(attrs: Mapping[str, Scalar]) -> int:
    """Columns of the buffer of partial results, [kv_heads][splits][group][head_dim + 2]: sums, maximum, sum of exponentials."""
    return int(attrs["heads"]) * int(attrs["splits"]) * (int(attrs["head_dim"]) + 2)
