"""The cases of `attention` with several splits, and more splits than pages; a long context, of which all splits have several parts."""

from __future__ import annotations

from mpk.tasks.attention.cases import STEPS
from mpk.tasks.case import Case, case, config
from mpk.tasks.rotary_attention.cases import DECODING


def _case(heads: int, kv_heads: int, head_dim: int, splits: int) -> Case:
    return case(f"attention_combine {heads}/{kv_heads}x{head_dim} splits {splits}", "attention_combine",
                config(heads=heads, kv_heads=kv_heads, head_dim=head_dim), inputs={"partial": heads * splits * (head_dim + 2)},
                outputs={"out": heads * head_dim}, weights={},
                attrs={"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "window": 0, "scale": head_dim**-0.5, "splits": splits},
                steps=(*STEPS, ((0, 5000, 1),), *DECODING))


CASES = (_case(9, 3, 64, 2), _case(16, 2, 24, 3), _case(2, 1, 40, 2), _case(4, 2, 8, 7), _case(8, 1, 128, 33), _case(3, 1, 256, 40), _case(4, 2, 128, 16), _case(4, 4, 64, 32), _case(4, 1, 128, 32))
