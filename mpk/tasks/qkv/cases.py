"""Head sizes and ratios of real families and awkward ones, bias, head norm, pages and their edges."""

from __future__ import annotations

from mpk.tasks.case import ROW_COUNTS, Case, Segments, case, config

PAGES: Segments = ((2, 62, 1), (0, 60, 9), (1, 127, 2))  # decode rows and a chunk around the edges of pages


def _case(hidden: int, heads: int, kv_heads: int, head_dim: int, *, norm: bool = True, bias: bool = False, head_norm: bool = False) -> Case:
    rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    weights: dict[str, dict[str, tuple[int, ...]]] = {"weight": {name: (n, hidden) for name, n in rows.items()}}
    if norm:
        weights["norm"] = {"norm": (hidden,)}
    if bias:
        weights["bias"] = {f"{name}.bias": (n,) for name, n in rows.items()}
    if head_norm:
        weights["q_norm"], weights["k_norm"] = {"q.norm": (head_dim,)}, {"k.norm": (head_dim,)}
    label = f"qkv {hidden} {heads}/{kv_heads}x{head_dim}" + " norm" * norm + " bias" * bias + " head_norm" * head_norm
    return case(label, "qkv", config(hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim),
                inputs={"hidden": hidden, "rope": head_dim},
                outputs={"queries": heads * head_dim, "kv": 2 * kv_heads * head_dim}, weights=weights,
                attrs={"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "hidden": hidden, "eps": 1e-6},
                steps=(*ROW_COUNTS, PAGES))


CASES = (
    _case(72, 9, 3, 64),
    _case(64, 14, 2, 8, bias=True),
    _case(576, 2, 1, 24, head_norm=True),
    _case(40, 4, 2, 40, norm=False),
    _case(48, 2, 2, 128, bias=True, head_norm=True),
)
