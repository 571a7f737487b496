"""Generate for a long time and see that nothing hangs, leaks or changes: `python -m benchmarks.soak [--model M] [--target T] [--tokens N]`.

A set of generations of all kinds (batches 1 to 16, prompts of many lengths, greedy and sampled, penalties, stop by length) runs once and is kept;
then they run again in random order until N tokens are there. Every repetition must give the same tokens, and the device's free
memory must be at the end what it was after the first round. Prints one JSON line; exit code 1 when something differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np

import mpk
from mpk import frontend
from mpk.runtime import cuda_device


def cases(rng: np.random.Generator, vocab: int, context: int, count: int) -> list[dict[str, Any]]:
    """Arguments of `Instance.generate`."""
    out: list[dict[str, Any]] = []
    for n in range(count):
        batch = int(rng.integers(1, 17))
        longest = context // 2 if n % 5 == 0 else 48
        options = [{}, {"temperature": 0.8, "seed": n}, {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "seed": n},
                   {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.1, "presence_penalty": 0.2, "seed": n}][n % 4]
        out.append({"prompt_tokens": [rng.integers(0, vocab, int(rng.integers(1, longest))).tolist() for _ in range(batch)],
                    "max_new_tokens": int(rng.integers(8, min(256, context // 2))), "stop_tokens": [], **options})
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="SmolLM2-135M", help="a named shape (random weights) or a model")
    parser.add_argument("--target", default="auto")
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--cases", type=int, default=24)
    arguments = parser.parse_args()
    loaded = frontend.load(arguments.model, shapes=True)
    compiler = mpk.Compiler(arguments.target, max_batch=16)
    instance = compiler.build(compiler.lower_model(loaded)).create_instance(max_batch=16, max_context=arguments.context, stall_limit_s=10.0)
    rng = np.random.default_rng(1)
    given = cases(rng, loaded.config.vocab_size, arguments.context, arguments.cases)
    first = [instance.generate(**case).tokens for case in given]
    done, changed, begin, free = sum(len(t) for tokens in first for t in tokens), [], time.perf_counter(), _free(compiler)
    while done < arguments.tokens:
        n = int(rng.integers(len(given)))
        tokens = instance.generate(**given[n]).tokens
        done += sum(map(len, tokens))
        if tokens != first[n]:
            changed.append(n)
    leaked = free - _free(compiler)
    print(json.dumps({"model": loaded.name, "target": compiler.target.name, "tokens": done, "seconds": round(time.perf_counter() - begin, 1),
                      "changed": changed, "leaked_bytes": leaked}))
    return int(bool(changed) or leaked > 0)


def _free(compiler: mpk.Compiler) -> int:
    """Free bytes of the device; 0 on targets that are no device."""
    return cuda_device.Device(0).free_memory()[0] if compiler.target.backend == "cuda" else 0


if __name__ == "__main__":
    sys.exit(main())
