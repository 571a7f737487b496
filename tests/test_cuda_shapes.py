"""Sizes and contexts on a GPU that models really have, and odd ones: two layers each, against transformers on the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpk
from mpk.runtime import cuda_device
from mpk.targets import hardware

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cuda_device.device_count() == 0, reason="no GPU")]

# class, hidden, intermediate, heads, key-value heads, head size, vocabulary
SHAPES = {
    "smollm2-9-of-3-heads": ("Llama", 576, 1536, 9, 3, 64, 49152),
    "qwen2-14-of-2-heads": ("Qwen2", 896, 4864, 14, 2, 64, 151936),
    "wide-16-of-2-heads": ("Llama", 2560, 25600, 16, 2, 128, 32000),
    "qwen3-32b": ("Qwen3", 5120, 25600, 64, 8, 128, 151936),
    "head-size-256": ("Llama", 2048, 8192, 8, 4, 256, 32003),
    "one-key-value-head": ("Llama", 1024, 2816, 8, 1, 80, 1001),
}
CONTEXT = 4096


def config_of(name: str) -> Any:
    """Of two layers."""
    import transformers

    family, hidden, intermediate, heads, kv_heads, head_dim, vocab = SHAPES[name]
    return getattr(transformers, f"{family}Config")(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, tie_word_embeddings=False, architectures=[f"{family}ForCausalLM"])


def make(name: str) -> Any:
    """Two random layers on the GPU, in float32 that hold bf16 values."""
    import torch
    import transformers

    config = config_of(name)
    torch.manual_seed(3)
    with torch.device("cuda"):
        model = getattr(transformers, config.architectures[0])(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            else:
                parameter.normal_(0 if parameter_name.endswith("bias") else 1, 0.3)
            parameter.copy_(parameter.to(torch.bfloat16).float())
    return model


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_decoding_at_short_and_long_contexts(name: str) -> None:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    model = make(name)
    compiler = mpk.Compiler(hardware.choose("auto"))
    instance = compiler.build(compiler.lower_model(model)).create_instance(max_batch=3, max_context=CONTEXT, stall_limit_s=5.0)
    exact_model, half_model = model, make(name).to(torch.bfloat16)

    def logits_of(m: Any, tokens: list[int], last: int) -> np.ndarray:
        with torch.no_grad():
            return m(torch.tensor([tokens], device="cuda"), logits_to_keep=last).logits[0].float().cpu().numpy()

    rng = np.random.default_rng(5)
    vocab = model.config.vocab_size
    for length in (1, 17, 100):
        row = rng.integers(0, vocab, (1, length))
        exact, half = (logits_of(m, row[0].tolist(), length) for m in (exact_model, half_model))
        assert relative(instance.forward(row)[0], exact) <= 1.5 * relative(half, exact), length
    # Sequences of very different lengths, up to the last position of the context: every token against one pass of the reference.
    prompts = [rng.integers(0, vocab, n).tolist() for n in (1, 700, CONTEXT - 12)]
    result = instance.generate(prompts, max_new_tokens=12, stop_tokens=[], logprobs=0)
    assert [len(t) for t in result.tokens] == [12] * 3 and result.logprobs is not None
    for prompt, tokens, logprobs in zip(prompts, result.tokens, result.logprobs, strict=True):
        exact, half = (torch.log_softmax(torch.from_numpy(logits_of(m, prompt + tokens[:-1], 12)).double(), -1).numpy() for m in (exact_model, half_model))
        error = np.abs(half - exact).max()
        ours = np.array([entry.logprob for entry in logprobs])
        at = np.arange(12), np.array(tokens)
        assert np.abs(ours - exact[at]).max() <= 2 * error
        assert (exact.max(-1) - exact[at] <= 4 * error).all()
