"""The decoder that the families share, written against `GraphBuilder`; a family chooses its attention block.

Weights carry transformers' names. A layer is: x + attention(norm(x)), then x + mlp(norm(x)).
"""

from __future__ import annotations

from collections.abc import Callable

from mpk.graph.tensor_graph import GraphBuilder, TensorGraph
from mpk.models.config import DecoderConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

AttentionBlock = Callable[[GraphBuilder, str, str], str]  # (builder, normalised input, weight prefix) -> attention output


def projection(b: GraphBuilder, name: str, x: str, weight: str, columns: int, *, bias: bool) -> str:
    """A linear operator whose parameters are `weight`.weight and, where there is one, `weight`.bias."""
    return b.linear(name, x, f"{weight}.weight", columns, f"{weight}.bias" if bias else None)


def query_key_value(b: GraphBuilder, x: str, prefix: str) -> tuple[str, str, str]:
    """The three projections of an attention block; biases as the configuration says."""
    c = b.config
    q = projection(b, "q", x, f"{prefix}.q_proj", c.num_heads * c.head_dim, bias=c.qkv_bias)
    k = projection(b, "k", x, f"{prefix}.k_proj", c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
    v = projection(b, "v", x, f"{prefix}.v_proj", c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
    return q, k, v


def rotary_attention(b: GraphBuilder, x: str, prefix: str) -> str:
    """Grouped-query attention with rotary embedding."""
    q, k, v = query_key_value(b, x, prefix)
    return b.attention("attn", b.rope("q_rope", q), b.rope("k_rope", k), v)


def normed_rotary_attention(b: GraphBuilder, x: str, prefix: str) -> str:
    """As `rotary_attention`, with an RMS norm over each query and key head before the rotation."""
    q, k, v = query_key_value(b, x, prefix)
    q = b.head_norm("q_norm", q, f"{prefix}.q_norm.weight")
    k = b.head_norm("k_norm", k, f"{prefix}.k_norm.weight")
    return b.attention("attn", b.rope("q_rope", q), b.rope("k_rope", k), v)


def gated_mlp(b: GraphBuilder, x: str, prefix: str) -> str:
    """down(silu(gate(x)) * up(x))."""
    c = b.config
    gate = projection(b, "gate", x, f"{prefix}.gate_proj", c.intermediate_size, bias=c.mlp_bias)
    up = projection(b, "up", x, f"{prefix}.up_proj", c.intermediate_size, bias=c.mlp_bias)
    return projection(b, "down", b.silu_mul("act", gate, up), f"{prefix}.down_proj", c.hidden_size, bias=c.mlp_bias)


def decoder_layer(b: GraphBuilder, layer: int, x: str, attention: AttentionBlock) -> str:
    """One pre-norm layer on the residual stream `x`; returns the new residual stream."""
    c, prefix = b.config, f"model.layers.{layer}"
    b.layer = layer
    normed = b.rms_norm("attn_norm", x, f"{prefix}.input_layernorm.weight")
    mixed = attention(b, normed, f"{prefix}.self_attn")
    x = b.add("attn_add", x, projection(b, "o", mixed, f"{prefix}.self_attn.o_proj", c.hidden_size, bias=c.output_bias))
    normed = b.rms_norm("mlp_norm", x, f"{prefix}.post_attention_layernorm.weight")
    return b.add("mlp_add", x, gated_mlp(b, normed, f"{prefix}.mlp"))


def decoder(config: DecoderConfig, attention: AttentionBlock = rotary_attention) -> TensorGraph:
    """Embedding, `num_layers` layers, final norm, head (tied or not) and the token loop."""
    b = GraphBuilder(config.validate())
    x = b.embedding(EMBEDDING)
    for layer in range(config.num_layers):
        x = decoder_layer(b, layer, x, attention)
    b.layer = -1
    x = b.rms_norm("norm", x, "model.norm.weight")
    return b.finish(b.head(x, EMBEDDING if config.tie_embeddings else HEAD))
