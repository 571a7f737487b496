"""What the tests of this kind try: (vocabulary, workers), as for the head."""

from __future__ import annotations

from mpk.tasks.head.cases import CASES

__all__ = ["CASES"]
