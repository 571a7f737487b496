"""Turn a fused graph into the one that reads prompts: the same layers, cut for steps of many rows.

Runs on what `fuse` leaves (with a residual stream that is not flagged), before `partition`. Every version of the residual stream gets a
buffer, norms become operators of their own, products read activations in chunks, keys and values go to the cache before attention
reads them there. There is no sampling: the last token of a prompt is left to the decode graph, so all that a step leaves is the cache.
What only sequences that want the logits of all positions need is marked with `only_logits`, and skipped in other steps.
Declines (raises `InternalError`) what is no operator of a fused decoder.
"""

from __future__ import annotations

from mpk.errors import InternalError
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph, Value
from mpk.tasks.prompt import padded

Weights = dict[str, tuple[str, ...]]


def run(graph: TensorGraph, workers: int) -> TensorGraph:
    """The prompt graph of a fused graph, for so many workers; it shares the weights."""
    return _Rewriter(graph, workers).run()


class _Rewriter:
    def __init__(self, graph: TensorGraph, workers: int) -> None:
        self.graph, self.workers = graph, workers
        self.values: dict[str, Value] = {}
        self.out: list[Operator] = []
        self.names: dict[str, str] = {}  # buffer of the fused graph -> present buffer
        attentions = [op for op in graph.operators if op.kind == "rotary_attention"]
        self.last_layer = max((op.layer for op in attentions), default=-1)
        self.behind = False  # the last append

    def run(self) -> TensorGraph:
        handlers = {"embed": self._embed, "linear": self._linear, "rotary_attention": self._attention, "advance": self._advance}
        for op in self.graph.operators:
            if op.kind in handlers:
                handlers[op.kind](op)
            elif op.kind not in ("rope_table", "sample"):
                raise InternalError(f"operator {op.name} ({op.kind}) has no place in a graph that reads prompts")
        return self.graph.with_operators(self.out, self.values).check()

    def _value(self, name: str, columns: int, element_bytes: int = 0, kind: str = "activation", rows: str = "tokens") -> str:
        self.values[name] = Value(name, columns, rows, kind, element_bytes)
        return name

    def _emit(self, op: Operator, kind: str, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], weights: Weights, attrs: dict[str, Scalar]) -> None:
        """Every share writes an own part of every output, so there are no more of them than columns."""
        shares = min(self.workers, *(self.values[o].columns for o in outputs))
        extra: dict[str, Scalar] = {"only_logits": True} if self.behind else {}
        self.out.append(Operator(name, kind, inputs, outputs, weights, {**attrs, "shares": shares, **extra}, op.layer))

    def _embed(self, op: Operator) -> None:
        c = self.graph.config
        x, rope = self._value("x", c.hidden_size), self._value("rope", c.head_dim, 4)
        self.names[op.outputs[0]] = x
        self._emit(op, "prompt_embed", op.name, ("step",), (x, rope), dict(op.weights), {"hidden": c.hidden_size, "head_dim": c.head_dim})

    def _normed(self, op: Operator, gather: bool) -> str:
        """The input of a product, normed where the product has a norm before it."""
        source, hidden = self.names[op.inputs[0]], int(op.attrs["k"])
        if "norm" not in op.weights:
            return source
        out = self._value(f"{op.name}.normed", padded(hidden))
        self._emit(op, "prompt_norm", f"{op.name}.norm", (source,), (out,), {"norm": op.weights["norm"]},
                   {"hidden": hidden, "eps": float(op.attrs["eps"]), "all_logits": gather})
        return out

    def _linear(self, op: Operator) -> None:
        a, gather = op.attrs, bool(op.attrs["gather_logit_rows"])
        given = self._normed(op, gather)
        epilogue, n = ("logits" if gather else str(a["epilogue"])), int(a["n"])
        inputs: tuple[str, ...] = (given,)
        if epilogue == "logits":
            out = self._value("logits", n, 4, kind="state")  # of the host: they take no place among activations
        elif epilogue == "residual":
            inputs = (given, self.names[op.inputs[1]])
            out = self._value(f"{op.name}.x", n)
        else:
            out = self._value(f"{op.name}.out", padded(n) if epilogue == "swiglu" else n)
        self.names[op.outputs[0]] = out
        weights = {role: names for role, names in op.weights.items() if role != "norm"}
        attrs: dict[str, Scalar] = {"n": n, "k": int(a["k"]), "epilogue": epilogue}
        if "tile_columns" in a:
            attrs["tile_columns"] = a["tile_columns"]
        self._emit(op, "prompt_linear", op.name, inputs, (out,), weights, attrs)

    def _attention(self, op: Operator) -> None:
        a = op.attrs
        sizes: dict[str, Scalar] = {n: a[n] for n in ("heads", "kv_heads", "head_dim", "eps")}
        qkv, cache = self.names[op.inputs[0]], self.graph.values[op.inputs[2]]
        kv = self._value(cache.name, cache.columns, cache.element_bytes, "cache", cache.rows)
        norms = [{role: op.weights[role]} if role in op.weights else {} for role in ("k_norm", "q_norm")]
        self._emit(op, "prompt_append", f"{op.name}.append", (qkv, "rope"), (kv,), norms[0], sizes)
        self.behind = op.layer == self.last_layer
        out = self._value(op.outputs[0], padded(int(a["heads"]) * int(a["head_dim"])))
        self.names[op.outputs[0]] = out
        self._emit(op, "prompt_attention", op.name, (qkv, "rope", kv), (out,), norms[1], {**sizes, "window": a["window"], "scale": a["scale"]})

    def _advance(self, op: Operator) -> None:
        self.out.append(Operator(op.name, "prompt_advance", ("step",), ("step",), {}, {}, op.layer))
