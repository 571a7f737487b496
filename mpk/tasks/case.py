"""One case that the test of a task kind tries: an operator in the smallest graph that holds it, and the steps to run it in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph, Value, Weight
from mpk.models.config import DecoderConfig, RopeScaling

Segments = tuple[tuple[int, int, int], ...]  # (slot, position of the first row, rows), in row order

# Row counts around the blocks of rows that products take (1 to 6, and several blocks).
ROW_COUNTS: tuple[Segments, ...] = tuple(((0, 3, rows),) for rows in (1, 2, 5, 7, 16, 33))


@dataclass(frozen=True)
class Case:
    """`label` names the case in reports; `steps` are run one by one on fresh memory."""

    label: str
    op: Operator
    graph: TensorGraph
    steps: tuple[Segments, ...]


def config(*, hidden: int = 64, heads: int = 1, kv_heads: int = 1, head_dim: int = 8, vocab: int = 33,
           rope: RopeScaling | None = None) -> DecoderConfig:
    """A small model's configuration with the given sizes."""
    return DecoderConfig("case", vocab, hidden, 64, 1, heads, kv_heads, head_dim, 1e-5, 512, rope or RopeScaling())


def case(label: str, kind: str, model: DecoderConfig, inputs: Mapping[str, int], outputs: Mapping[str, int],
         weights: Mapping[str, Mapping[str, tuple[int, ...]]], attrs: Mapping[str, Scalar], steps: tuple[Segments, ...]) -> Case:
    """Build a case. `inputs`, `outputs`: columns by value ("kv" is the cache); `weights`: role -> name -> shape."""
    op = Operator(label, kind, tuple(inputs), tuple(outputs), {role: tuple(shapes) for role, shapes in weights.items()}, dict(attrs), 0)
    values = {n: Value(n, columns, "positions" if n == "kv" else "tokens", "cache" if n == "kv" else "activation")
              for n, columns in {**inputs, **outputs}.items()}
    values["step"] = Value("step", 1, "step", "state")
    shapes = {n: Weight(n, shape) for group in weights.values() for n, shape in group.items()}
    return Case(label, op, TensorGraph(model, values, shapes, [op]), steps)
