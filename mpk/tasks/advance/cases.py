"""What the tests of this kind try: (prompt lengths, new tokens of each, max_rows), around chunk and page edges."""

from __future__ import annotations

CASES = (
    ((1,), (1,), 4),
    ((4,), (3,), 4),  # the prompt fills one chunk exactly
    ((5,), (3,), 4),  # one row beyond
    ((63, 64, 65), (3, 3, 3), 16),  # around a page edge
    ((1, 9, 2, 30), (5, 1, 7, 2), 8),  # decode rows of some beside prompt chunks of others
    ((7,) * 16, (4,) * 16, 16),  # as many sequences as rows
)
