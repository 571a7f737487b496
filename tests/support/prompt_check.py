"""Compare prompts read by a graph of their own with transformers and with the decode graph: `python -m tests.support.prompt_check [names]`.

On a machine with a GPU. `--alone`: without the comparison with ordinary steps, whose programs take as long to compile. For every tiny model: logits of all positions against float32 and against transformers in bf16 on the same
weights, of prompts longer than a step and of several lengths; then generation from prompts of different lengths, compared with an engine that reads
them in ordinary steps, and repeated.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

import mpk
from mpk.errors import StallError
from mpk.runtime.cuda_engine import build_cuda_engine
from mpk.targets import hardware
from tests.support.cuda_check import greedy_place, relative_error
from tests.support.models import TINY_MODELS, tiny_model

CONTEXT, ROWS = 640, 256
LENGTHS = (300, 1, 65, 130, 2, 64, 17, 500)


def rounded_model(name: str) -> Any:
    """A tiny model in float32 whose matrices hold bf16 values."""
    import torch

    model = tiny_model(name, max_position_embeddings=CONTEXT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
    return model


def short_steps() -> None:
    """Steps of `ROWS` rows, so that tiny prompts take several."""
    load = hardware.load

    def patched(name: str) -> hardware.Target:
        return dataclasses.replace(load(name), prompt_rows=ROWS) if name == "h200" else load(name)

    hardware.load = patched  # type: ignore[assignment]


def compile_only(job: tuple[str, bool]) -> str:
    name, prompts = job
    short_steps()
    begin = time.perf_counter()
    graph = mpk.Compiler("h200").lower_model(rounded_model(name))
    resources = build_cuda_engine(graph, graph.model.source, load=False, prompts=prompts).cubin.resources["mpk_run"]
    return f"{name}, prompts {prompts}: compiled in {time.perf_counter() - begin:.1f} s, {resources}"


def check(name: str, alone: bool) -> str:
    import torch

    model = rounded_model(name)
    graph = mpk.Compiler("h200").lower_model(model)
    instance, ordinary = (build_cuda_engine(graph, graph.model.source, prompts=prompts).create_instance(stall_limit_s=2.0) if prompts or not alone else None
                          for prompts in (True, False))
    vocab = model.config.vocab_size
    rng = np.random.default_rng(7)
    out = []
    batches = [rng.integers(0, vocab, shape) for shape in ((1, 70), (2, 333), (3, 128))]
    with torch.no_grad():
        references = [model(torch.tensor(tokens)).logits.numpy() for tokens in batches]
    half_model = model.to("cuda", torch.bfloat16)  # in place, and it rounds the rotary frequencies: no reference can be had from it afterwards
    for tokens, exact in zip(batches, references, strict=True):
        batch, length = tokens.shape
        with torch.no_grad():
            half = half_model(torch.tensor(tokens, device="cuda")).logits.float().cpu().numpy()
        ours = instance.forward(tokens)
        torchs, mine = relative_error(half, exact), relative_error(ours, exact)
        plainly = relative_error(ordinary.forward(tokens), exact) if ordinary is not None else float("nan")
        same = np.array_equal(instance.forward(tokens), ours)
        out.append(f"  forward {batch} x {length}: error {mine:.2e}, in ordinary steps {plainly:.2e}, torch bf16 {torchs:.2e}, ratio {mine / torchs:.2f}"
                   f"{'' if mine <= 1.5 * torchs else ' TOO LARGE'}{'' if same else ' NOT REPEATED'}")
    for lengths in (LENGTHS[:1], LENGTHS[2:5], LENGTHS):
        prompts = [rng.integers(0, vocab, n).tolist() for n in lengths]
        result = instance.generate(prompts, max_new_tokens=16, stop_tokens=[])
        if any(len(t) != 16 for t in result.tokens):
            raise RuntimeError(f"sequences ended early: {result.finish_reasons}")
        other = ordinary.generate(prompts, max_new_tokens=16, stop_tokens=[]).tokens if ordinary is not None else [[-1]] * len(prompts)
        repeats = sum(instance.generate(prompts, max_new_tokens=16, stop_tokens=[]).tokens == result.tokens for _ in range(20))
        gaps = [greedy_place(half_model, p, t) for p, t in zip(prompts, result.tokens, strict=True)]
        out.append(f"  prompts of {lengths}: first tokens as in ordinary steps {sum(a[0] == b[0] for a, b in zip(result.tokens, other, strict=True))}, all "
                   f"{sum(a == b for a, b in zip(result.tokens, other, strict=True))} of {len(lengths)}, worst greedy gap {max(gaps):.3f}, repeats {repeats}/20")
    return "\n".join(out)


def main() -> None:
    alone = "--alone" in sys.argv
    names = [a for a in sys.argv[1:] if a != "--alone"] or list(TINY_MODELS)
    with ProcessPoolExecutor(8) as pool:
        for text in pool.map(compile_only, [(name, prompts) for name in names for prompts in (True, False) if prompts or not alone]):
            print(text, flush=True)
    short_steps()
    wrong: list[bool] = []
    for name in names:
        print(f"{name} ...", flush=True)
        begin = time.perf_counter()
        try:
            text = check(name, alone)
            print(text, f"({time.perf_counter() - begin:.1f} s)", flush=True)
            wrong += ["TOO LARGE" in text or "NOT REPEATED" in text]
        except StallError as error:  # the device is of no use to this process any more
            print(f"{name}: {error}", flush=True)
            os._exit(1)
        except Exception as error:  # report and go on with the next model
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            wrong.append(True)
    sys.exit(int(any(wrong)))


if __name__ == "__main__":
    main()
