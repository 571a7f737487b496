"""Cut a fused graph for several devices (ranks): every rank runs the result, each with its own part of the weights.

Runs after `fuse`, whose operators say where a product stands, and before attention is split, which depends on the heads of a rank.
Requires the operators that `fuse` makes. Products of queries, keys, values, gate and up are cut by outputs, those of attention's output
and of down by inputs: these leave partial sums, which `all_reduce` adds to the residual stream that every rank keeps whole. The
embedding and the head are cut by vocabulary (the last shares may be shorter or empty); logits meet in every rank, and all ranks sample
and plan alike. Where there are fewer key-value heads than ranks, several ranks hold the same one. (Shoeybi et al., arXiv 1909.08053.)

Guarantees that a graph of one rank is left as it is, and that all ranks have equal shapes. Declines (`ModelError` with the numbers
that work) where heads or the intermediate size do not divide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mpk.codegen.layout import MAX_RANKS
from mpk.errors import InternalError, ModelError
from mpk.graph.tensor_graph import Operator, Scalar, Shard, TensorGraph, Value, Weight
from mpk.models.config import DecoderConfig
from mpk.tasks.messages import CONTROL_COLUMNS, WORD_BYTES, two_shot_rows
from mpk.tasks.packing import PANEL

INTERMEDIATE_MULTIPLE = 8  # of a rank's part, as of the whole: what vector and 16-byte accesses of products rely on
LOGITS_PART = "peer_logits"


def run(graph: TensorGraph, ranks: int, two_shot_bytes: float) -> TensorGraph:
    """The graph of each of `ranks` ranks. two_shot_bytes: of a message that a rank sends in one shot at most."""
    if ranks == 1:
        return graph
    check(graph.config, ranks)
    return _Sharder(graph, ranks, two_shot_bytes).run()


def obstacle(config: DecoderConfig, ranks: int) -> str | None:
    """What keeps a model from being shared by so many ranks, or None."""
    c = config
    if c.num_heads % ranks:
        return f"{c.num_heads} query heads"
    if c.num_kv_heads % ranks and ranks % c.num_kv_heads:
        return f"{c.num_kv_heads} key-value heads"
    if c.intermediate_size % (ranks * INTERMEDIATE_MULTIPLE):
        return f"the intermediate size {c.intermediate_size}, in multiples of {INTERMEDIATE_MULTIPLE},"
    return None


def check(config: DecoderConfig, ranks: int) -> None:
    """Raise `ModelError` naming what does not divide and the numbers of ranks that work."""
    found = obstacle(config, ranks)
    if found is not None:
        possible = [str(n) for n in range(1, MAX_RANKS + 1) if obstacle(config, n) is None]
        raise ModelError(f"tensor_parallel_size {ranks}: {found} cannot be shared by {ranks} devices", remedy=f"sizes that work: {', '.join(possible)}")


class _Sharder:
    def __init__(self, graph: TensorGraph, ranks: int, two_shot_bytes: float) -> None:
        self.graph, self.ranks, self.two_shot_bytes = graph, ranks, two_shot_bytes
        c = graph.config
        self.heads, self.kv_heads = c.num_heads // ranks, max(1, c.num_kv_heads // ranks)
        self.intermediate = c.intermediate_size // ranks
        self.vocab_share = -(-c.vocab_size // (ranks * PANEL)) * PANEL
        self.values = dict(graph.values)
        self.weights = dict(graph.weights)
        self.out: list[Operator] = []
        self.messages = 2 + sum(op.attrs.get("epilogue") == "residual" for op in graph.operators)
        self.sent = 0

    def run(self) -> TensorGraph:
        handlers: dict[str, Callable[[Operator], None]] = {
            "embed": self._embed, "qkv": self._qkv, "attention": self._attention, "rotary_attention": self._attention, "linear": self._linear,
            "advance": self._advance, "rope_table": self.out.append, "sample": self.out.append}
        for op in self.graph.operators:
            if op.kind not in handlers:
                raise InternalError(f"operator {op.name} ({op.kind}) cannot be shared by ranks")
            handlers[op.kind](op)
        if self.sent != self.messages:
            raise InternalError(f"{self.sent} messages a step, expected {self.messages}")
        made = TensorGraph(self.graph.config, self.graph.values, self.weights, [])
        return made.with_operators(self.out, self.values).check()

    # ---- weights
    def _cut(self, name: str, axis: int, size: int, starts: tuple[int, ...]) -> None:
        """Give every rank `size` rows (axis 0) or columns (axis 1) of a weight."""
        weight = self.graph.weights[name]
        shape = list(weight.shape)
        shape[axis] = size
        made = Weight(name, tuple(shape), Shard(axis, starts, weight.shape))
        if self.weights[name] not in (weight, made):
            raise InternalError(f"weight {name} is shared among ranks in two ways")
        self.weights[name] = made

    def _equal_rows(self, names: tuple[str, ...], size: int) -> None:
        for name in names:
            self._cut(name, 0, size, tuple(rank * size for rank in range(self.ranks)))

    def _query_key_value(self, op: Operator) -> None:
        """Rows of whole heads; of keys and values those that the rank's query heads need."""
        c = self.graph.config
        first_kv = [rank * c.num_kv_heads // self.ranks for rank in range(self.ranks)]
        for role in ("weight", "bias"):
            for place, name in enumerate(op.weights.get(role, ())):
                if place == 0:
                    self._equal_rows((name,), self.heads * c.head_dim)
                else:
                    self._cut(name, 0, self.kv_heads * c.head_dim, tuple(first * c.head_dim for first in first_kv))

    # ---- values
    def _resize(self, name: str, columns: int) -> None:
        self.values[name] = replace(self.values[name], columns=columns)

    def _message(self, name: str, columns: int, rows: str) -> dict[str, Scalar]:
        """Declare the peer buffer of the next message; returns the attributes that sender and receiver share."""
        self.values[name] = Value(name, columns, rows, "peer", WORD_BYTES * self.ranks)
        attrs: dict[str, Scalar] = {"columns": columns, "ranks": self.ranks, "message": self.sent, "messages": self.messages}
        self.sent += 1
        return attrs

    def _summed(self) -> tuple[str, dict[str, Scalar]]:
        """Buffer and attributes of the next message that is summed into the residual stream.

        Two that follow each other use different buffers; so the last of an odd number, which the first of the next step follows, has its own.
        """
        hidden, sums = self.graph.config.hidden_size, self.messages - 1
        name = "peer2" if sums % 2 and self.sent == sums - 1 > 0 else f"peer{self.sent % 2}"
        attrs = self._message(name, hidden + CONTROL_COLUMNS, "tokens")
        return name, {**attrs, "two_shot_rows": two_shot_rows(self.two_shot_bytes, hidden, self.ranks)}

    # ---- operators
    def _embed(self, op: Operator) -> None:
        self._equal_rows(op.weights["weight"], self.vocab_share)
        part, attrs = self._summed()
        self.out.append(replace(op, outputs=(part,), attrs={**op.attrs, "vocab": self.vocab_share, **attrs}))
        self.values["agreed"] = Value("agreed", 1, "step", element_bytes=4, flagged=self.values[op.outputs[0]].flagged)
        self.out.append(Operator(f"{op.name}_reduce", "all_reduce", (part,), (op.outputs[0], "agreed"), {},
                                 {"n": self.graph.config.hidden_size, **attrs, "residual": False, "control": True}, op.layer))

    def _qkv(self, op: Operator) -> None:
        self._query_key_value(op)
        self._resize(op.outputs[0], self.heads * self.graph.config.head_dim)
        self._resize(op.outputs[1], 2 * self.kv_heads * self.graph.config.head_dim)
        self.out.append(replace(op, attrs={**op.attrs, "heads": self.heads, "kv_heads": self.kv_heads}))

    def _attention(self, op: Operator) -> None:
        head_dim = self.graph.config.head_dim
        self._resize(op.outputs[0], self.heads * head_dim)
        for cache in (*op.inputs[1:], *op.outputs[1:]):
            if self.values[cache].rows == "positions":
                self._resize(cache, 2 * self.kv_heads * head_dim)
        self.out.append(replace(op, attrs={**op.attrs, "heads": self.heads, "kv_heads": self.kv_heads}))

    def _linear(self, op: Operator) -> None:
        match op.attrs["epilogue"]:
            case "residual":
                self._cut_by_inputs(op)
            case "swiglu":
                self._equal_rows((*op.weights["weight"], *op.weights.get("bias", ())), self.intermediate)
                self._resize(op.outputs[0], self.intermediate)
                self.out.append(replace(op, attrs={**op.attrs, "n": self.intermediate}))
            case "store" if op.attrs["gather_logit_rows"]:
                self._head(op)
            case "store" if len(op.weights["weight"]) == 3:
                columns = (self.heads + 2 * self.kv_heads) * self.graph.config.head_dim
                self._query_key_value(op)
                self._resize(op.outputs[0], columns)
                self.out.append(replace(op, attrs={**op.attrs, "n": columns}))
            case _:
                raise InternalError(f"operator {op.name}: a product that ranks cannot share")

    def _cut_by_inputs(self, op: Operator) -> None:
        if op.weights.get("norm"):
            raise InternalError(f"operator {op.name}: a norm over an input of which a rank has a part")
        k = int(op.attrs["k"]) // self.ranks
        (weight,) = op.weights["weight"]
        self._cut(weight, 1, k, tuple(rank * k for rank in range(self.ranks)))
        n = int(op.attrs["n"])
        for bias in op.weights.get("bias", ()):  # is added by rank 0; to the others it is all zeros
            self._cut(bias, 0, n, (0, *[n] * (self.ranks - 1)))
        part, attrs = self._summed()
        self.out.append(replace(op, inputs=op.inputs[:1], outputs=(part,), attrs={**op.attrs, "k": k, "epilogue": "send", **attrs}))
        self.out.append(Operator(f"{op.name}_reduce", "all_reduce", (part, op.inputs[1]), op.outputs, {},
                                 {"n": n, **attrs, "residual": True, "control": False}, op.layer))

    def _head(self, op: Operator) -> None:
        self._equal_rows((*op.weights["weight"], *op.weights.get("bias", ())), self.vocab_share)
        attrs = self._message(LOGITS_PART, self.vocab_share, "logits")
        sent = {**op.attrs, "n": self.vocab_share, "epilogue": "send", **attrs, "two_shot_rows": 1 << 30}  # nothing to sum: always one shot
        self.out.append(replace(op, name=f"{op.name}_part", outputs=(LOGITS_PART,), attrs=sent))
        self.out.append(Operator(op.name, "all_gather", (LOGITS_PART,), op.outputs, {}, {"n": self.graph.config.vocab_size, **attrs}, op.layer))

    def _advance(self, op: Operator) -> None:
        self.out.append(replace(op, inputs=(*op.inputs, "agreed")))
