"""Vocabularies that the ranks share evenly, unevenly, and so that some have nothing."""

from __future__ import annotations

from mpk.tasks.case import ROW_COUNTS, Case, case, config


def _case(vocab: int, columns: int, ranks: int) -> Case:
    return case(f"all_gather {vocab} of {ranks}", "all_gather", config(), inputs={"part": columns}, outputs={"out": vocab}, weights={},
                attrs={"n": vocab, "columns": columns, "ranks": ranks, "message": 2, "messages": 3}, steps=ROW_COUNTS[:3])


CASES = (_case(64, 32, 2), _case(131, 80, 2), _case(131, 32, 8), _case(33, 16, 3))
