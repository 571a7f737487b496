"""What the tests of this kind try: (vocabulary, workers), with slices that end inside and one part alone."""

from __future__ import annotations

CASES = ((33, 132), (256, 4), (1000, 3), (49152, 132), (128256, 132), (151936, 132))
