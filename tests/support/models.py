"""Random tiny models of transformers, one for every option that the families have; sizes are odd on purpose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32}

# name -> (class of transformers without its suffix, changes to BASE)
TINY_MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 40}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {"hidden_size": 112, "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 24, "num_attention_heads": 5, "num_key_value_heads": 1}),
    "qwen3-biases": ("Qwen3", {"head_dim": 40, "attention_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 40}),
    "mistral-window": ("Mistral", {"sliding_window": 6, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 8}),
}

BASE: Mapping[str, Any] = {
    "vocab_size": 131, "hidden_size": 72, "intermediate_size": 104, "num_hidden_layers": 2, "num_attention_heads": 9,
    "num_key_value_heads": 3, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def tiny_config(name: str, **changes: Any) -> Any:
    """The transformers configuration of a tiny model."""
    import transformers

    family, options = TINY_MODELS[name]
    settings = {**BASE, **options, **changes}
    return getattr(transformers, f"{family}Config")(**{k: dict(v) if isinstance(v, dict) else v for k, v in settings.items()})


def tiny_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """A model in float32 whose every parameter is random, norms and biases too."""
    import torch
    import transformers

    torch.manual_seed(seed)
    model = getattr(transformers, f"{TINY_MODELS[name][0]}ForCausalLM")(tiny_config(name, **changes)).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            else:
                parameter.normal_(0 if parameter_name.endswith("bias") else 1, 0.3)
    return model


def reference_logits(model: Any, tokens: list[list[int]]) -> Any:
    """float32 [batch, tokens, vocab] logits of transformers, as numpy."""
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


_GGUF_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def gguf_name(name: str) -> str:
    """The name in a GGUF file of a transformers parameter."""
    for theirs, ours in (("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")):
        name = name.replace(theirs, ours)
    if name.startswith("model.layers."):
        _, _, layer, module = name.split(".", 3)
        module, suffix = module.rsplit(".", 1)
        name = f"blk.{layer}.{_GGUF_LAYER[module]}.{suffix}"
    return name


def interleaved(tensor: Any, heads: int) -> Any:
    """Rows of q or k in the order in which GGUF files of architecture llama hold them (pairs of a rotation side by side)."""
    return tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(path: Any, model: Any, *, types: Mapping[str, str] | None = None, metadata: Mapping[str, Any] | None = None,
               skip: tuple[str, ...] = (), extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Write a transformers model as GGUF; returns the float32 tensors that a reader must give, by transformers name.

    types: GGUF type of tensors by transformers name (F32 without one). metadata: keys to add or replace ("{arch}" stands for
    the architecture), None to leave a key out. skip: tensors to leave out. extra: tensors to add, by GGUF name; a pair of raw
    bytes and type for a quantised one.
    """
    import gguf
    import numpy as np

    c = model.config
    arch = "llama" if c.model_type == "mistral" else c.model_type
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    entries: dict[str, Any] = {
        "{arch}.block_count": c.num_hidden_layers, "{arch}.context_length": c.max_position_embeddings,
        "{arch}.embedding_length": c.hidden_size, "{arch}.feed_forward_length": c.intermediate_size,
        "{arch}.attention.head_count": c.num_attention_heads, "{arch}.attention.head_count_kv": c.num_key_value_heads,
        "{arch}.attention.key_length": head_dim, "{arch}.attention.value_length": head_dim, "{arch}.rope.dimension_count": head_dim,
        "{arch}.rope.freq_base": float(c.rope_parameters["rope_theta"]), "{arch}.attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, **(metadata or {})}
    writer = gguf.GGUFWriter(path, entries.pop("general.architecture", arch))
    for key, value in entries.items():
        _add_metadata(writer, key.replace("{arch}", arch), value)
    expected = {}
    for name, parameter in model.named_parameters():
        if name in skip:
            continue
        array = parameter.detach().float().numpy()
        kind = gguf.GGMLQuantizationType[(types or {}).get(name, "F32")]
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = c.num_attention_heads if ".q_proj." in name else c.num_key_value_heads
            stored = gguf.quants.quantize(np.ascontiguousarray(interleaved(array, heads)), kind)
        else:
            stored = gguf.quants.quantize(array, kind)
        expected[name] = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind).reshape(array.shape)
        writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
    for name, value in (extra or {}).items():
        array, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, array, raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return expected


def _add_metadata(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)
