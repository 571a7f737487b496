"""A short generation to run under compute-sanitizer: `compute-sanitizer --tool memcheck|racecheck|synccheck python -m tests.support.cuda_sanitize`.

All paths of a small model: prompts over several steps and in prompt steps, three sequences, greedy and sampled with penalties, log-probabilities, `forward`.
"""

from __future__ import annotations

import sys

import numpy as np

import mpk
from mpk.runtime import cuda_device
from tests.support.cuda_check import rounded_model


def main() -> None:
    model = rounded_model(sys.argv[1] if len(sys.argv) > 1 else "qwen3")
    compiler = mpk.Compiler("h200", max_batch=4)
    if cuda_device.device_count() == 0:
        raise SystemExit("needs a GPU")
    instance = compiler.build(compiler.lower_model(model)).create_instance(max_batch=4, stall_limit_s=200.0)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 131, n).tolist() for n in (1, 21, 9)]
    greedy = instance.generate(prompts, max_new_tokens=3, stop_tokens=[], logprobs=2)
    sampled = instance.generate(prompts[:2], max_new_tokens=3, stop_tokens=[], temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.2, seed=5)
    long = instance.generate([rng.integers(0, 131, 41).tolist(), rng.integers(0, 131, 30).tolist()], max_new_tokens=2, stop_tokens=[])  # read by the prompt graph
    logits = instance.forward(rng.integers(0, 131, (2, 19)))
    print(greedy.tokens, sampled.tokens, long.tokens, float(np.abs(logits).mean()))


if __name__ == "__main__":
    main()
