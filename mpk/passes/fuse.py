"""Fuse plain operators into operators that are task kinds.

Runs first: everything after it works on task kinds only. Requires a checked `TensorGraph` of plain operators. Guarantees that
every operator is a task kind, that norms, biases, rotation, cache append, activation and residual additions are part of a
product's prologue or epilogue, and that the residual stream is ONE buffer `x` updated in place; with flagged buffers, whose words are
written once a step, every version of it has a buffer of its own (`x`, `l<n>.x1`, `l<n>.x2`). Declines (raises `ModelError` naming the
operator) where a model's operators do not have that form: nothing is left unfused silently.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpk.errors import ModelError
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph, Value
from mpk.tasks.packing import PANEL

RESIDUAL = "x"


def run(graph: TensorGraph, max_batch: int, append_in: str = "qkv", swiglu_columns: int = 16, flagged: bool = False) -> TensorGraph:
    """Plain operators -> task kinds, sampling for `max_batch` sequences; the result shares the weights of `graph`.

    append_in: which task normalises and rotates heads and appends to the cache. "qkv": the product itself, a head a tile.
    "attention": the product of q, k and v is a plain one, and `rotary_attention` does the rest. swiglu_columns: output columns of
    a tile of gate / up products. flagged: activations of all rows are flagged (see `Value`).
    """
    return _Fuser(graph, max_batch, append_in, swiglu_columns, flagged).run()


@dataclass
class _NormedInput:
    """A product's input: the buffer and, where an RMS norm stands before the product, its weight and epsilon."""

    source: str
    norm: tuple[str, ...] = ()
    eps: float = 0.0


class _Fuser:
    def __init__(self, graph: TensorGraph, max_batch: int, append_in: str, swiglu_columns: int, flagged: bool) -> None:
        self.graph, self.max_batch, self.append_in, self.swiglu_columns, self.flagged = graph, max_batch, append_in, swiglu_columns, flagged
        self.produced = {out: op for op in graph.operators for out in op.outputs if op.kind != "advance"}
        self.uses: dict[str, int] = {}
        for op in graph.operators:
            for name in op.inputs:
                self.uses[name] = self.uses.get(name, 0) + 1
        self.alias: dict[str, str] = {}  # plain value -> buffer after fusion
        self.taken: set[str] = set()  # operators already part of a fused one
        self.out: list[Operator] = []
        self.values: dict[str, Value] = {}
        self.residual, self.residual_buffer = "", RESIDUAL  # plain value that the residual stream holds now, and where

    def run(self) -> TensorGraph:
        handlers = {"embedding": self._embedding, "attention": self._attention, "add": self._residual_add,
                    "silu_mul": self._swiglu, "linear": self._plain_linear, "sample": self._sample, "advance": self._advance}
        consumed = self._operators_inside_others()
        for op in self.graph.operators:
            if op.name in consumed:
                continue
            if op.kind not in handlers:
                raise ModelError(f"operator {op.name} ({op.kind}) cannot be fused into a neighbour",
                                 expected="rms_norm before products, rope and head_norm before attention")
            handlers[op.kind](op)
        return self.graph.with_operators(self.out, self.values).check()

    def _operators_inside_others(self) -> set[str]:
        """Names of operators that become part of the fused operator made at a later one."""
        inside: set[str] = set()
        for op in self.graph.operators:
            if op.kind in ("rms_norm", "rope", "head_norm"):
                inside.add(op.name)
            if op.kind in ("attention", "silu_mul", "add"):
                inputs = op.inputs[1:] if op.kind == "add" else op.inputs
                for name in inputs:
                    producer = self._skip(name, ("rope", "head_norm"))
                    if producer is not None and producer.kind == "linear":
                        inside.add(producer.name)
        return inside

    def _skip(self, value: str, kinds: tuple[str, ...]) -> Operator | None:
        op = self.produced.get(value)
        while op is not None and op.kind in kinds:
            op = self.produced.get(op.inputs[0])
        return op

    def _value(self, name: str, columns: int, rows: str = "tokens", kind: str = "activation", element_bytes: int = 0) -> str:
        flagged = self.flagged and rows == "tokens" and kind == "activation"
        self.values[name] = Value(name, columns, rows, kind, element_bytes, flagged)
        return name

    def _emit(self, op: Operator, kind: str, inputs: tuple[str, ...], outputs: tuple[str, ...],
              weights: dict[str, tuple[str, ...]], attrs: dict[str, Scalar], name: str = "") -> None:
        self.out.append(Operator(name or op.name, kind, inputs, outputs, weights, attrs, op.layer))

    def _input(self, op: Operator) -> _NormedInput:
        """The input of a product, with the norm before it taken in."""
        producer = self.produced.get(op.inputs[0])
        if producer is not None and producer.kind == "rms_norm":
            return _NormedInput(self._buffer(producer.inputs[0]), producer.weights["weight"], float(producer.attrs["eps"]))
        return _NormedInput(self._buffer(op.inputs[0]))

    def _buffer(self, value: str) -> str:
        if value == self.residual:
            return self.residual_buffer
        if value not in self.alias:
            raise ModelError(f"value {value} is used where it no longer holds (the residual stream is updated in place)")
        return self.alias[value]

    # ---- one method a plain operator kind
    def _embedding(self, op: Operator) -> None:
        c = self.graph.config
        self.residual = op.outputs[0]
        self._emit(op, "embed", ("step",), (self._value(RESIDUAL, c.hidden_size),), dict(op.weights),
                   {"vocab": c.vocab_size, "hidden": c.hidden_size})
        self._emit(op, "rope_table", ("step",), (self._value("rope", c.head_dim, element_bytes=4),), {}, {"head_dim": c.head_dim}, name="rope")

    def _attention(self, op: Operator) -> None:
        c = self.graph.config
        linears, norms = [], []
        for value in op.inputs:
            chain = []
            producer = self.produced.get(value)
            while producer is not None and producer.kind in ("rope", "head_norm"):
                chain.append(producer)
                producer = self.produced.get(producer.inputs[0])
            if producer is None or producer.kind != "linear":
                raise ModelError(f"operator {op.name}: input {value} does not come from a product")
            linears.append(producer)
            norms.append(next((o.weights["weight"] for o in chain if o.kind == "head_norm"), ()))
            rotated = any(o.kind == "rope" for o in chain)
            if rotated != (len(linears) < 3):
                raise ModelError(f"operator {op.name}: queries and keys must be rotated, values not")
        sources = {lin.inputs[0] for lin in linears}
        if len(sources) != 1:
            raise ModelError(f"operator {op.name}: q, k and v have different inputs {sorted(sources)}")
        given = self._input(linears[0])
        weights = {"weight": tuple(lin.weights["weight"][0] for lin in linears)}
        if given.norm:
            weights["norm"] = given.norm
        biases = [lin.weights.get("bias") for lin in linears]
        if any(biases):
            if not all(biases):
                raise ModelError(f"operator {op.name}: q, k and v must all have a bias or none")
            weights["bias"] = tuple(b[0] for b in biases if b)
        if bool(norms[0]) != bool(norms[1]) or norms[2]:
            raise ModelError(f"operator {op.name}: head norm must stand on both q and k, and not on v")
        head_norms = {"q_norm": norms[0], "k_norm": norms[1]} if norms[0] else {}
        prefix = f"l{op.layer}."
        kv = self._value(f"{prefix}kv", 2 * c.num_kv_heads * c.head_dim, "positions", "cache")
        out = self._value(f"{prefix}attn", c.num_heads * c.head_dim)
        self.alias[op.outputs[0]] = out
        sizes: dict[str, Scalar] = {"heads": c.num_heads, "kv_heads": c.num_kv_heads, "head_dim": c.head_dim}
        softmax: dict[str, Scalar] = {"window": op.attrs["window"], "scale": op.attrs["scale"], "splits": 1}
        if self.append_in == "attention":
            columns = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
            qkv = self._value(f"{prefix}qkv", columns)
            attrs: dict[str, Scalar] = {"n": columns, "k": c.hidden_size, "eps": given.eps, "epilogue": "store", "gather_logit_rows": False}
            self._emit(op, "linear", (given.source,), (qkv,), weights, attrs, name=f"{prefix}qkv")
            # The positions of this step have a name of their own: tasks that read the past do not depend on the one that appends.
            new = self._value(f"{prefix}kv_new", 2 * c.num_kv_heads * c.head_dim, "positions", "state")
            self._emit(op, "rotary_attention", (qkv, "rope", kv), (out, new), head_norms, {**sizes, **softmax, "eps": c.rms_norm_eps, "share_rows": False},
                       name=f"{prefix}attention")
            return
        q = self._value(f"{prefix}q", c.num_heads * c.head_dim)
        self._emit(op, "qkv", (given.source, "rope"), (q, kv), {**weights, **head_norms},
                   {**sizes, "hidden": c.hidden_size, "eps": given.eps}, name=f"{prefix}qkv")
        self._emit(op, "attention", (q, kv), (out,), {}, {**sizes, **softmax}, name=f"{prefix}attention")

    def _linear(self, op: Operator, given: _NormedInput, epilogue: str, weights: dict[str, tuple[str, ...]], columns: int,
                out: str, extra_inputs: tuple[str, ...] = (), gather: bool = False, name: str = "") -> None:
        k = self.graph.weights[weights["weight"][0]].shape[1]
        if given.norm:
            weights = {**weights, "norm": given.norm}
        attrs: dict[str, Scalar] = {"n": columns, "k": k, "eps": given.eps, "epilogue": epilogue, "gather_logit_rows": gather}
        if epilogue == "swiglu" and self.swiglu_columns != PANEL:
            attrs["tile_columns"] = self.swiglu_columns
        self._emit(op, "linear", (given.source, *extra_inputs), (out,), weights, attrs, name=name)

    def _residual_add(self, op: Operator) -> None:
        stream, update = op.inputs
        producer = self.produced.get(update)
        if producer is None or producer.kind != "linear" or stream != self.residual:
            raise ModelError(f"operator {op.name}: expected the residual stream plus a product")
        given, before, hidden = self._input(producer), self.residual_buffer, self.graph.config.hidden_size
        if self.flagged:
            self.residual_buffer = self._value(f"l{op.layer}.x{2 if f'l{op.layer}.x1' in self.values else 1}", hidden)
        self._linear(producer, given, "residual", dict(producer.weights), hidden, self.residual_buffer, (before,))
        self.residual = op.outputs[0]

    def _swiglu(self, op: Operator) -> None:
        gate, up = (self.produced.get(v) for v in op.inputs)
        if gate is None or up is None or gate.kind != "linear" or up.kind != "linear" or gate.inputs != up.inputs:
            raise ModelError(f"operator {op.name}: gate and up must be products of the same input")
        if bool(gate.weights.get("bias")) != bool(up.weights.get("bias")):
            raise ModelError(f"operator {op.name}: gate and up must both have a bias or neither")
        weights: dict[str, tuple[str, ...]] = {role: (gate.weights[role][0], up.weights[role][0]) for role in gate.weights}
        columns = self.graph.values[op.outputs[0]].columns
        out = self._value(f"l{op.layer}.mlp", columns)
        self.alias[op.outputs[0]] = out
        self._linear(op, self._input(gate), "swiglu", weights, columns, out, name=f"l{op.layer}.gate_up")

    def _plain_linear(self, op: Operator) -> None:
        value = self.graph.values[op.outputs[0]]
        out = self._value(value.name, value.columns, value.rows, element_bytes=4)  # logits
        self.alias[op.outputs[0]] = out
        self._linear(op, self._input(op), "store", dict(op.weights), value.columns, out,
                     gather=bool(op.attrs.get("gather_logit_rows", False)))

    def _sample(self, op: Operator) -> None:
        choice = self._value(op.outputs[0], self.max_batch, "step", element_bytes=4)
        self.alias[op.outputs[0]] = choice
        inputs = tuple(v if v == "step" else self._buffer(v) for v in op.inputs)
        self._emit(op, "sample", inputs, (choice,), {}, {**op.attrs, "max_batch": self.max_batch})

    def _advance(self, op: Operator) -> None:
        inputs = tuple(v if v == "step" else self._buffer(v) for v in op.inputs)
        self._emit(op, "advance", inputs, op.outputs, {}, dict(op.attrs))
