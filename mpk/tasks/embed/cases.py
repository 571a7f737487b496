"""Vocabularies and widths that end inside a panel."""

from __future__ import annotations

from mpk.tasks.case import Case, case, config


def _case(vocab: int, hidden: int) -> Case:
    return case(f"embed {vocab}x{hidden}", "embed", config(hidden=hidden, vocab=vocab), {"step": 1}, {"x": hidden},
                {"weight": {"embedding": (vocab, hidden)}}, {"vocab": vocab, "hidden": hidden}, (((0, 0, 1),), ((0, 0, 4), (2, 5, 3))))


CASES = (_case(33, 72), _case(16, 16), _case(5, 8), _case(100, 64))
