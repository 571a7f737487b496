"""Vocabularies and widths that end inside a panel."""

from __future__ import annotations

from mpk.tasks.case import Case, case, config


def _case(vocab: int, hidden: int) -> Case:
    return case(f"embed {vocab}x{hidden}", "embed", config(hidden=hidden, vocab=vocab), inputs={"step": 1}, outputs={"x": hidden},
                weights={"weight": {"embedding": (vocab, hidden)}}, attrs={"vocab": vocab, "hidden": hidden},
                steps=(((0, 0, 1),), ((0, 0, 4), (2, 5, 3))))


CASES = (_case(33, 72), _case(16, 16), _case(5, 8), _case(100, 64))
