"""torch-compile: a plain decoder under torch.compile (max-autotune), the whole step in one CUDA graph.

Compiled in pieces that every layer shares (output projection, MLP and the next layer's norm, q/k/v and rotation; attention apart),
so that compiling is short and no fusion across a layer boundary is lost. The step includes embedding, head, argmax and feedback.
Steps are timed by CUDA events around replays queued back to back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from mpk.commands.peers.cuda_graph import capture, replay
from mpk.errors import RequestError
from mpk.models.config import DecoderConfig

Tensor = torch.Tensor
SPAN = 128  # attention reads the cache in whole multiples of this many positions


class Sizes(NamedTuple):
    """What the compiled pieces need as constants."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    qk_norm: bool


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, heads, head_dim]; cos, sin [1, head_dim / 2]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def qkv(z: Sizes, x: Tensor, w: dict[str, Tensor], cos: Tensor, sin: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    y = F.linear(norm(x, w["norm1"], z.eps), w["qkv"], w.get("bias")).view(x.shape[0], z.heads + 2 * z.kv_heads, z.head_dim)
    q, k, v = torch.split(y, [z.heads, z.kv_heads, z.kv_heads], 1)
    if z.qk_norm:
        q, k = norm(q, w["q_norm"], z.eps), norm(k, w["k_norm"], z.eps)
    q, k = rotate(q, cos[position], sin[position]), rotate(k, cos[position], sin[position])
    keys.index_copy_(2, position, k.unsqueeze(2))
    values.index_copy_(2, position, v.unsqueeze(2))
    return q.view(x.shape[0], z.kv_heads, z.heads // z.kv_heads, z.head_dim)


def rest_of_layer(z: Sizes, a: Tensor, x: Tensor, w: dict[str, Tensor]) -> Tensor:
    x = x + F.linear(a, w["o"])
    gate, up = F.linear(norm(x, w["norm2"], z.eps), w["gate_up"]).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, w["down"])


def first_piece(z: Sizes, token: Tensor, embedding: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    x = F.embedding(token, embedding)
    return x, qkv(z, x, *args)


def middle_piece(z: Sizes, a: Tensor, x: Tensor, w: dict[str, Tensor], *args: Any) -> tuple[Tensor, Tensor]:
    x = rest_of_layer(z, a, x, w)
    return x, qkv(z, x, *args)


def last_piece(z: Sizes, a: Tensor, x: Tensor, w: dict[str, Tensor], final: Tensor, head: Tensor) -> Tensor:
    return F.linear(norm(rest_of_layer(z, a, x, w), final, z.eps), head).argmax(-1)


def attention(q: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """One query a sequence against all positions up to `position`: q [batch, kv heads, group, head_dim]."""
    scores = (q @ keys.transpose(-1, -2)).float() * (q.shape[-1] ** -0.5)
    scores = scores.masked_fill(torch.arange(keys.shape[2], device=q.device) > position, float("-inf"))
    return (torch.softmax(scores, -1).to(q.dtype) @ values).reshape(q.shape[0], -1)


class Decoder:
    """Weights, caches and the step of one batch size."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        c, device = config, torch.device("cuda")
        generator = torch.Generator(device=device).manual_seed(0)

        def matrix(*shape: int) -> Tensor:
            return torch.empty(*shape, device=device, dtype=dtype).normal_(0, 0.02, generator=generator)

        def ones(n: int) -> Tensor:
            return torch.ones(n, device=device, dtype=dtype)

        self.config, self.dtype, self.device = c, dtype, device
        self.sizes = Sizes(c.num_heads, c.num_kv_heads, c.head_dim, c.rms_norm_eps, c.qk_norm)
        self.embedding = matrix(c.vocab_size, c.hidden_size)
        self.head = self.embedding if c.tie_embeddings else matrix(c.vocab_size, c.hidden_size)
        self.final = ones(c.hidden_size)
        width = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        self.layers = [{
            "norm1": ones(c.hidden_size), "norm2": ones(c.hidden_size), "qkv": matrix(width, c.hidden_size),
            "o": matrix(c.hidden_size, c.num_heads * c.head_dim), "gate_up": matrix(2 * c.intermediate_size, c.hidden_size),
            "down": matrix(c.hidden_size, c.intermediate_size), "q_norm": ones(c.head_dim), "k_norm": ones(c.head_dim),
            **({"bias": matrix(width)} if c.qkv_bias else {})} for _ in range(c.num_layers)]
        self.pieces: list[Any] = [torch.compile(f, mode="max-autotune-no-cudagraphs", fullgraph=True, dynamic=False)
                                  for f in (first_piece, middle_piece, last_piece, attention)]

    def start(self, batch: int, context: int, steps: int) -> None:
        """Random caches for `batch` sequences that have `context` tokens."""
        c = self.config
        self.span = -(-(context + steps + 8) // SPAN) * SPAN
        shape = (c.num_layers, batch, c.num_kv_heads, self.span, c.head_dim)
        self.keys = torch.empty(shape, device=self.device, dtype=self.dtype).normal_()
        self.values = torch.empty(shape, device=self.device, dtype=self.dtype).normal_()
        frequencies, factor = c.rope.inverse_frequencies(c.head_dim)
        angles = torch.outer(torch.arange(self.span, dtype=torch.float32), torch.from_numpy(frequencies))
        self.cos, self.sin = (angles.cos() * factor).to(self.device), (angles.sin() * factor).to(self.device)
        self.token = torch.ones(batch, dtype=torch.long, device=self.device)
        self.position = torch.full((1,), context, dtype=torch.long, device=self.device)

    def step(self) -> None:
        first, middle, last, attend = self.pieces

        def inputs(i: int) -> tuple[Any, ...]:
            return self.layers[i], self.cos, self.sin, self.position, self.keys[i], self.values[i]

        x, q = first(self.sizes, self.token, self.embedding, *inputs(0))
        for i, w in enumerate(self.layers):
            a = attend(q, self.keys[i], self.values[i], self.position)
            if i + 1 < len(self.layers):
                x, q = middle(self.sizes, a, x, w, *inputs(i + 1))
            else:
                self.token.copy_(last(self.sizes, a, x, w, self.final, self.head))
        self.position.add_(1)


def system(config: DecoderConfig, dtype: str, steps: int) -> Callable[[int, int], list[float]]:
    """See `mpk.commands.peers`; raises `RequestError` without a CUDA device."""
    if not torch.cuda.is_available():
        raise RequestError("--against torch-compile", expected="a CUDA device that torch sees", actual="none")
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    inductor.coordinate_descent_tuning = True
    dynamo.cache_size_limit = 256
    decoder = Decoder(config, torch.bfloat16 if dtype == "bf16" else torch.float32)
    graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}

    @torch.no_grad()
    def measure(batch: int, context: int) -> list[float]:
        key, first = (batch, context), context - steps // 2
        if key not in graphs:
            graphs.clear()  # a graph owns the caches of its batch and context
            decoder.start(batch, first, steps)
            graphs[key] = capture(decoder.step)
        decoder.position.fill_(first)
        return replay(graphs[key], steps)

    return measure
