"""Widths and depths that end inside a panel or a block of k, every epilogue, norm, bias and gathered rows."""

from __future__ import annotations

from mpk.graph.tensor_graph import Scalar
from mpk.tasks.case import ROW_COUNTS, Case, Segments, case, config

MIXED: Segments = ((1, 4, 1), (0, 0, 5), (2, 9, 3))


def _case(n: int, k: int, epilogue: str = "store", *, norm: bool = False, bias: bool = False, gather: bool = False) -> Case:
    names = ("gate", "up") if epilogue == "swiglu" else ("weight",)
    weights: dict[str, dict[str, tuple[int, ...]]] = {"weight": {name: (n, k) for name in names}}
    if norm:
        weights["norm"] = {"norm": (k,)}
    if bias:
        weights["bias"] = {f"{name}.bias": (n,) for name in names}
    residual = epilogue == "residual"
    attrs: dict[str, Scalar] = {"n": n, "k": k, "eps": 1e-5 if norm else 0.0, "epilogue": epilogue, "gather_logit_rows": gather}
    label = f"linear {n}x{k} {epilogue}" + " norm" * norm + " bias" * bias + " gather" * gather
    return case(label, "linear", config(), inputs={"input": k, "x": n} if residual else {"input": k},
                outputs={"x" if residual else "out": n}, weights=weights, attrs=attrs, steps=(*ROW_COUNTS, MIXED))


CASES = (
    _case(33, 72),
    _case(8, 8, bias=True),
    _case(200, 1048),  # two panel groups, three blocks of k
    _case(104, 3080, norm=True),  # more stages than are asked for at a time
    _case(72, 40, "residual"),
    _case(136, 520, "residual", bias=True),
    _case(40, 64, "residual", norm=True),
    _case(104, 72, "swiglu", norm=True),
    _case(24, 16, "swiglu", norm=True, bias=True),
    _case(33, 72, norm=True, gather=True),
    _case(50, 24, gather=True, bias=True),
)
