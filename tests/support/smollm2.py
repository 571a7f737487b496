"""The bundled real model and transformers in float32 on the same weights."""

from __future__ import annotations

from typing import Any

from mpk import frontend

MODEL = "smollm2-135m-instruct"
PROMPTS = [
    "The capital of France is", "Once upon a time, in a small village,", "def fibonacci(n):\n", "Water boils at", "Dear Sir or Madam,",
    "The three most important inventions of the twentieth century are", "In 1969, the first humans", "A good recipe for bread needs",
    "Q: What is 12 + 30?\nA:", "Photosynthesis is the process by which",
]


def reference_model(loaded: frontend.LoadedModel) -> Any:
    """transformers in float32 with the weights that our reader gives."""
    import torch
    import transformers

    c = loaded.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps,
        max_position_embeddings=c.max_context, rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta}, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(loaded.source.read(name).copy()))
    return model
