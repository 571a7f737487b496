"""Head sizes and ratios, windows, splits, and batches of different lengths around pages and blocks of rows."""

from __future__ import annotations

from mpk.tasks.case import Case, Segments, case, config

STEPS: tuple[Segments, ...] = (
    ((0, 0, 1),),
    ((0, 200, 1),),
    ((1, 63, 1), (0, 64, 1), (2, 5, 1), (3, 129, 1)),  # a batch that decodes
    ((0, 0, 33),),
    ((2, 40, 1), (0, 50, 34), (1, 100, 5), (3, 0, 16)),  # decode beside chunks
    ((0, 190, 100),),
)


def _case(heads: int, kv_heads: int, head_dim: int, window: int = 0, splits: int = 1) -> Case:
    label = f"attention {heads}/{kv_heads}x{head_dim} window {window} splits {splits}"
    out = heads * (head_dim if splits == 1 else splits * (head_dim + 2))
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return case(label, "attention", config(heads=heads, kv_heads=kv_heads, head_dim=head_dim),
                inputs={"q": heads * head_dim, "kv": 2 * kv_heads * head_dim}, outputs={"out": out}, weights={},
                attrs={**sizes, "window": window, "scale": head_dim**-0.5, "splits": splits},
                steps=STEPS)


CASES = (
    _case(9, 3, 64),
    _case(9, 3, 64, splits=2),
    _case(14, 2, 8, window=5),
    _case(16, 2, 24, splits=3),
    _case(2, 1, 40, window=70, splits=2),
    _case(4, 4, 128, window=64),
    _case(3, 1, 256),
)
