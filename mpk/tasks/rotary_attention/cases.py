"""Head sizes and ratios, head norms, windows, splits, and batches of different lengths around pages and blocks of positions."""

from __future__ import annotations

from mpk.tasks.case import Case, Segments, case, config
from mpk.tasks.rotary_attention.sharing import STATISTICS

STEPS: tuple[Segments, ...] = (
    ((0, 0, 1),),
    ((0, 31, 1),),
    ((0, 200, 1),),
    ((1, 63, 1), (0, 64, 1), (2, 5, 1), (3, 129, 1)),  # a batch that decodes
    ((0, 0, 16),),
    ((2, 40, 1), (0, 50, 9), (1, 100, 5), (3, 0, 1)),  # decode beside chunks, 16 rows
    ((0, 1000, 1),),  # several blocks a warp
    ((1, 3, 1), (0, 30, 13), (2, 500, 2)),
)

# Batches that only decode: even and uneven lengths, the first token beside long contexts, slots in any order.
DECODING: tuple[Segments, ...] = (
    ((1, 700, 1), (0, 0, 1)),
    ((2, 95, 1), (0, 96, 1), (1, 31, 1)),
    tuple((slot, 127 + slot % 2, 1) for slot in (5, 2, 7, 0, 4, 1, 3)),
    tuple((slot, 64 + 3 * slot, 1) for slot in range(8)),
    ((9, 15, 1), (0, 640, 1), (3, 1, 1), (4, 77, 1), (1, 16, 1), (2, 130, 1), (5, 48, 1), (8, 200, 1), (7, 0, 1)),
    tuple((slot, 17 * (slot % 5) + 100 * (slot == 6), 1) for slot in range(15, -1, -1)),
)


def _case(heads: int, kv_heads: int, head_dim: int, window: int = 0, splits: int = 1, norm: bool = False) -> Case:
    label = f"rotary_attention {heads}/{kv_heads}x{head_dim} window {window} splits {splits}" + " norm" * norm
    out = heads * (head_dim if splits == 1 else splits * (head_dim + STATISTICS))
    weights = {role: {f"{role}.weight": (head_dim,)} for role in ("q_norm", "k_norm")} if norm else {}
    return case(label, "rotary_attention", config(heads=heads, kv_heads=kv_heads, head_dim=head_dim),
                {"qkv": (heads + 2 * kv_heads) * head_dim, "rope": head_dim, "kv": 2 * kv_heads * head_dim},
                {"out": out, "kv_new": 2 * kv_heads * head_dim}, weights,
                {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "window": window, "scale": head_dim**-0.5, "eps": 1e-6,
                 "splits": splits, "share_rows": False}, (*STEPS, *DECODING))


CASES = (
    _case(9, 3, 64),
    _case(9, 3, 64, splits=33, norm=True),
    _case(14, 2, 8, window=5),
    _case(16, 2, 24, splits=3),
    _case(2, 1, 40, window=70, splits=2, norm=True),
    _case(4, 4, 128, window=64, splits=4),
    _case(8, 1, 128, splits=16, norm=True),
    _case(4, 2, 128, splits=3),
    _case(3, 1, 256, splits=2),
    _case(14, 2, 192, norm=True),
)
