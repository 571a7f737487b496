"""`TensorGraph`: named operators on tensors with a symbolic number of token rows; no hardware in it.

Every activation is a matrix [rows, columns]; `rows` is symbolic: "tokens" (all rows of a step), "logits" (the rows whose
logits are wanted). Operators stand in program order, which is also the order that defines the meaning of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mpk.errors import InternalError
from mpk.models.config import DecoderConfig

Scalar = bool | int | float | str


@dataclass(frozen=True)
class Value:
    """An activation: [rows, columns]. `kind`: activation, state (lives across steps), cache (key-value cache) or peer.

    `peer`: memory of every rank into which all ranks write. Column c stands for column c of the parts that the ranks send, which
    stand side by side there; an element is one word of each of them.

    `element_bytes`: 4 for what must be float32 (or int32) on every target; 0: as wide as the target keeps activations. `flagged`: every
    word says itself whether it has been written in this step, so that readers need no event.
    """

    name: str
    columns: int
    rows: str = "tokens"
    kind: str = "activation"
    element_bytes: int = 0
    flagged: bool = False


@dataclass(frozen=True)
class Shard:
    """The part of a tensor that a rank holds: from `starts[rank]` along `axis`; what lies beyond the tensor is zero.

    `whole`: the tensor's shape in the source. Parts may overlap (replicated heads) and be empty (a bias that one rank adds).
    """

    axis: int
    starts: tuple[int, ...]
    whole: tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """A parameter of the model: its name in the source and its shape there ([out, in] for a matrix).

    With a `shard` every rank holds a part, and `shape` is that of the part, the same on all ranks.
    """

    name: str
    shape: tuple[int, ...]
    shard: Shard | None = None


@dataclass(frozen=True)
class Operator:
    """One operator. `weights` maps a role ("weight", "norm", "bias", ...) to one or several weight names (stacked by rows)."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attrs: Mapping[str, Scalar] = field(default_factory=dict)
    layer: int = -1


@dataclass
class TensorGraph:
    """Operators in program order over values and weights."""

    config: DecoderConfig
    values: dict[str, Value] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    operators: list[Operator] = field(default_factory=list)

    def check(self) -> TensorGraph:
        """Raise `InternalError` unless names are unique and every operand is defined before its use; returns self."""
        seen: set[str] = set()
        defined = {v.name for v in self.values.values() if v.kind != "activation"}
        for op in self.operators:
            if op.name in seen:
                raise InternalError(f"operator {op.name} stands twice")
            seen.add(op.name)
            for name in op.inputs:
                if name not in defined:
                    raise InternalError(f"operator {op.name} reads {name}, which nothing before it writes")
            for name in op.outputs:
                if name not in self.values:
                    raise InternalError(f"operator {op.name} writes {name}, which is not declared")
                defined.add(name)
            for names in op.weights.values():
                for weight in names:
                    if weight not in self.weights:
                        raise InternalError(f"operator {op.name} uses weight {weight}, which is not declared")
        return self

    def producer(self, value: str) -> Operator | None:
        """The last operator that writes `value`."""
        return next((op for op in reversed(self.operators) if value in op.outputs), None)

    def consumers(self, value: str) -> list[Operator]:
        return [op for op in self.operators if value in op.inputs]

    def with_operators(self, operators: list[Operator], values: dict[str, Value] | None = None) -> TensorGraph:
        """The same model with other operators (values that nothing mentions are dropped)."""
        values = {**self.values, **(values or {})}
        used = {n for op in operators for n in (*op.inputs, *op.outputs)}
        kept = {n: v for n, v in values.items() if n in used or v.kind != "activation"}
        return TensorGraph(self.config, kept, dict(self.weights), operators)

    def weight_bytes(self, bytes_per_element: int) -> int:
        total = 0
        for w in self.weights.values():
            n = 1
            for s in w.shape:
                n *= s
            total += n
        return total * bytes_per_element

    def to_text(self) -> str:
        """A stable text, one operator a line, for people and for diffs."""
        lines = [f"tensor_graph {self.config.architecture}"]
        for v in self.values.values():
            lines.append(f"value {v.name} [{v.rows}, {v.columns}] {v.kind}")
        for op in self.operators:
            weights = " ".join(f"{role}={'+'.join(names)}" for role, names in sorted(op.weights.items()))
            attrs = " ".join(f"{k}={v}" for k, v in sorted(op.attrs.items()))
            lines.append(f"{', '.join(op.outputs)} = {op.kind}({', '.join(op.inputs)}) {weights} {{{attrs}}} @{op.name}".replace("  ", " "))
        return "\n".join(lines) + "\n"


class GraphBuilder:
    """What a model family writes itself in terms of: each call adds one operator and returns the name of its result."""

    def __init__(self, config: DecoderConfig) -> None:
        self.graph = TensorGraph(config)
        self.config = config
        self.layer = -1
        self.graph.values["step"] = Value("step", 1, "step", "state")

    def _weight(self, name: str, *shape: int) -> str:
        known = self.graph.weights.get(name)
        if known is not None and known.shape != shape:
            raise InternalError(f"weight {name} used as {known.shape} and {shape}")
        self.graph.weights[name] = Weight(name, shape)
        return name

    def _add(self, kind: str, name: str, inputs: tuple[str, ...], columns: int, weights: Mapping[str, tuple[str, ...]] | None = None,
             attrs: Mapping[str, Scalar] | None = None, rows: str = "tokens") -> str:
        full = name if self.layer < 0 else f"l{self.layer}.{name}"
        self.graph.values[full] = Value(full, columns, rows)
        self.graph.operators.append(Operator(full, kind, inputs, (full,), weights or {}, attrs or {}, self.layer))
        return full

    def columns(self, value: str) -> int:
        return self.graph.values[value].columns

    def embedding(self, weight: str) -> str:
        """Rows of `weight` [vocab, hidden] chosen by the token ids of the step."""
        c = self.config
        return self._add("embedding", "embed", ("step",), c.hidden_size,
                         {"weight": (self._weight(weight, c.vocab_size, c.hidden_size),)}, {"vocab": c.vocab_size})

    def rms_norm(self, name: str, x: str, weight: str) -> str:
        """x / sqrt(mean(x^2) + eps) * weight, over the whole row."""
        n = self.columns(x)
        return self._add("rms_norm", name, (x,), n, {"weight": (self._weight(weight, n),)}, {"eps": self.config.rms_norm_eps})

    def head_norm(self, name: str, x: str, weight: str) -> str:
        """RMS norm over each head's `head_dim` columns (Qwen3's q/k norm)."""
        d = self.config.head_dim
        return self._add("head_norm", name, (x,), self.columns(x), {"weight": (self._weight(weight, d),)},
                         {"eps": self.config.rms_norm_eps, "head_dim": d})

    def linear(self, name: str, x: str, weight: str, columns: int, bias: str | None = None) -> str:
        """x @ weight.T (+ bias), weight [columns, columns of x]."""
        weights = {"weight": (self._weight(weight, columns, self.columns(x)),)}
        if bias is not None:
            weights["bias"] = (self._weight(bias, columns),)
        return self._add("linear", name, (x,), columns, weights)

    def rope(self, name: str, x: str) -> str:
        """Rotary embedding by position, halves of a head rotated against each other (the Llama convention)."""
        return self._add("rope", name, (x,), self.columns(x), attrs={"head_dim": self.config.head_dim})

    def attention(self, name: str, q: str, k: str, v: str) -> str:
        """Append k and v to the layer's cache, then causal softmax(q k^T / sqrt(head_dim)) v, grouped query heads."""
        c = self.config
        attrs: dict[str, Scalar] = {"heads": c.num_heads, "kv_heads": c.num_kv_heads, "head_dim": c.head_dim,
                                    "window": c.window(self.layer), "scale": c.head_dim**-0.5}
        return self._add("attention", name, (q, k, v), c.num_heads * c.head_dim, attrs=attrs)

    def silu_mul(self, name: str, gate: str, up: str) -> str:
        return self._add("silu_mul", name, (gate, up), self.columns(gate))

    def add(self, name: str, a: str, b: str) -> str:
        return self._add("add", name, (a, b), self.columns(a))

    def head(self, x: str, weight: str, bias: str | None = None) -> str:
        """Logits [logit rows, vocab] of the rows that are wanted: x @ weight.T."""
        self.layer = -1
        c = self.config
        weights = {"weight": (self._weight(weight, c.vocab_size, c.hidden_size),)}
        if bias is not None:
            weights["bias"] = (self._weight(bias, c.vocab_size),)
        return self._add("linear", "logits", (x,), c.vocab_size, weights, {"gather_logit_rows": True}, rows="logits")

    def finish(self, logits: str) -> TensorGraph:
        """Close the token loop: sample from the logits, feed back, decide what the next step computes."""
        self.layer = -1
        self.graph.values["choice"] = Value("choice", 1, "logits")
        ops = self.graph.operators
        ops.append(Operator("sample", "sample", (logits, "step"), ("choice",), {}, {"vocab": self.config.vocab_size}))
        ops.append(Operator("advance", "advance", ("choice", "step"), ("step",)))
        return self.graph.check()


def rename(op: Operator, **changes: Any) -> Operator:
    """A copy of `op` with fields changed."""
    return replace(op, **changes)
