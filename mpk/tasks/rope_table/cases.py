"""Head sizes, every kind of scaling, and positions far out."""

from __future__ import annotations

from mpk.models.config import RopeScaling
from mpk.tasks.case import Case, case, config


def _case(label: str, head_dim: int, rope: RopeScaling) -> Case:
    return case(f"rope_table {label}", "rope_table", config(head_dim=head_dim, rope=rope), inputs={"step": 1},
                outputs={"rope": head_dim}, weights={}, attrs={"head_dim": head_dim}, steps=(((0, 0, 1),), ((0, 0, 7), (1, 500, 2))))


CASES = (
    _case("8", 8, RopeScaling()),
    _case("128 theta 1e6", 128, RopeScaling(theta=1e6)),
    _case("40 linear", 40, RopeScaling(kind="linear", factor=4.0)),
    _case("64 llama3", 64, RopeScaling(theta=5e5, kind="llama3", factor=8.0, original_max_position=64)),
    _case("64 yarn", 64, RopeScaling(kind="yarn", factor=4.0, original_max_position=128)),
)
