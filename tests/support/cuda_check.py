"""Compare GPU programs with transformers, on a machine with a GPU: `python -m tests.support.cuda_check [names]`.

For every tiny model: logits of `forward` against float32 and against transformers in bf16 on the same weights (rounded to bf16), then
greedy text of several sequences of different lengths against the text of each alone, then repeats.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

import mpk
from mpk.errors import StallError
from tests.support.models import TINY_MODELS, tiny_model

PROMPT = 37


def rounded_model(name: str) -> Any:
    """A tiny model in float32 whose matrices hold bf16 values."""
    import torch

    model = tiny_model(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
    return model


def compile_only(name: str) -> str:
    from mpk.codegen.cuda_program import CudaProgramBuilder, compile_cuda_program
    from mpk.codegen.prompt_program import PromptProgram
    from mpk.runtime.cuda_engine import prompt_graph
    from mpk.targets import hardware

    begin = time.perf_counter()
    graph = mpk.Compiler("h200").lower_model(rounded_model(name))
    plan = hardware.load("h200").kernel
    assert plan is not None
    builder = CudaProgramBuilder(graph)
    cubin = compile_cuda_program(builder, plan, PromptProgram(prompt_graph(graph, hardware.load("h200")), builder))
    return f"{name}: compiled in {time.perf_counter() - begin:.1f} s, {cubin.resources['mpk_run']}"


def relative_error(x: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(x - exact) / np.linalg.norm(exact))


def check(name: str, repeats: int = 100) -> str:
    import torch

    model = rounded_model(name)
    compiler = mpk.Compiler("h200")
    engine = compiler.build(compiler.lower_model(model))
    instance = engine.create_instance(stall_limit_s=2.0)
    vocab = model.config.vocab_size
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, vocab, (2, PROMPT))
    with torch.no_grad():
        exact = model(torch.tensor(tokens)).logits.numpy()
        half = model.to("cuda", torch.bfloat16)(torch.tensor(tokens, device="cuda")).logits.float().cpu().numpy()
    ours = instance.forward(tokens)
    torchs, mine = relative_error(half, exact), relative_error(ours, exact)
    out = [f"{name}: error {mine:.2e}, torch bf16 {torchs:.2e}, ratio {mine / torchs:.2f}{'' if mine <= 1.5 * torchs else ' TOO LARGE'}"]
    for batch in (1, 3, 16):
        prompts = [rng.integers(0, vocab, 1 + 5 * slot % 23).tolist() for slot in range(batch)]
        result = instance.generate(prompts, max_new_tokens=16, stop_tokens=[])
        if any(len(t) != 16 for t in result.tokens):
            raise RuntimeError(f"sequences ended early: {result.finish_reasons}")
        alone = [instance.generate([p], max_new_tokens=16, stop_tokens=[]).tokens[0] for p in prompts[:4]]
        same = sum(a == b for a, b in zip(alone, result.tokens, strict=False))
        greedy = [greedy_place(model, p, t) for p, t in zip(prompts[:4], result.tokens, strict=False)]
        first = result.tokens
        equal = sum(instance.generate(prompts, max_new_tokens=16, stop_tokens=[]).tokens == first for _ in range(repeats))
        out.append(f"  batch {batch}: equal to alone {same}/{len(alone)}, worst greedy gap {max(greedy):.3f}, identical repeats {equal}/{repeats}")
    return "\n".join(out)


def greedy_place(model: Any, prompt: list[int], tokens: list[int]) -> float:
    """Largest amount by which torch (bf16) prefers another token than the one taken, in units of the logits' deviation."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens], device="cuda")).logits[0].float().cpu().numpy()
    rows = logits[len(prompt) - 1 : -1]
    return float(max((row.max() - row[t]) / row.std() for row, t in zip(rows, tokens, strict=True)))


def main() -> None:
    names = sys.argv[1:] or list(TINY_MODELS)
    with ProcessPoolExecutor(8) as pool:
        for text in pool.map(compile_only, names):
            print(text, flush=True)
    for name in names:
        print(f"{name} ...", flush=True)
        begin = time.perf_counter()
        try:
            print(check(name), f"({time.perf_counter() - begin:.1f} s)", flush=True)
        except StallError as error:  # the device is of no use to this process any more
            print(f"{name}: {error}", flush=True)
            os._exit(1)
        except Exception as error:  # report and go on with the next model
            print(f"{name}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
