"""Widths that end inside a tile, all numbers of ranks, with and without residual and control, in one shot and in two."""

from __future__ import annotations

from mpk.graph.tensor_graph import Scalar
from mpk.tasks.case import ROW_COUNTS, Case, case, config


def _case(n: int, ranks: int, *, residual: bool = True, control: bool = False, two_shot_rows: int = 5) -> Case:
    attrs: dict[str, Scalar] = {"n": n, "columns": n + 8 * control, "ranks": ranks, "residual": residual, "control": control,
                                "two_shot_rows": two_shot_rows, "message": 3, "messages": 7}
    label = f"all_reduce {n} of {ranks}" + " residual" * residual + " control" * control
    outputs = {"x": n, "agreed": 1} if control else {"x": n}
    return case(label, "all_reduce", config(), inputs={"part": n + 8 * control, **({"x": n} if residual else {})}, outputs=outputs, weights={},
                attrs=attrs, steps=ROW_COUNTS[:5])


CASES = (
    _case(72, 2),
    _case(8, 2, residual=False, control=True),
    _case(64, 3, control=True),
    _case(200, 4, two_shot_rows=0),
    _case(136, 8),
    _case(40, 8, residual=False, two_shot_rows=1000),
)
