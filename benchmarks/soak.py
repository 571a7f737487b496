"""Generate for a long time and see that nothing hangs, leaks or changes: `python -m benchmarks.soak [--model M] [--target T] [--tokens N]`.

A set of generations of all kinds (batches 1 to 16, prompts of many lengths, greedy and sampled, penalties, stop by length) runs once and is kept;
then they run again in random order, one at least, until there are N tokens, those of the first round included. Every repetition must give the
same tokens, and the device's free memory must be at the end what it was after the first round. Prints one JSON line; exit code 1 when something
differs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import mpk
from benchmarks import entry
from mpk import frontend
from mpk.runtime import cuda_device

LONGEST_PROMPT = 48
SHORTEST_CONTEXT = 2 * LONGEST_PROMPT  # half of it for new tokens


def cases(rng: np.random.Generator, vocab: int, context: int, count: int) -> list[dict[str, Any]]:
    """Arguments of `Instance.generate`."""
    out: list[dict[str, Any]] = []
    for n in range(count):
        batch = int(rng.integers(1, 17))
        longest = context // 2 if n % 5 == 0 else LONGEST_PROMPT
        options = [{}, {"temperature": 0.8, "seed": n}, {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "seed": n},
                   {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.1, "presence_penalty": 0.2, "seed": n}][n % 4]
        out.append({"prompt_tokens": [rng.integers(0, vocab, int(rng.integers(1, longest))).tolist() for _ in range(batch)],
                    "max_new_tokens": int(rng.integers(8, min(256, context // 2))), "stop_tokens": [], **options})
    return out


def soak(generate: Callable[..., Any], given: Sequence[dict[str, Any]], tokens: int, free: Callable[[], int]) -> dict[str, Any]:
    """Run all cases once and some again; figures of all of it, the numbers of cases that gave something else, and what `free` fell by."""
    rng, changed, repeats, begin = np.random.default_rng(2), [], 0, time.perf_counter()
    first = [generate(**case).tokens for case in given]
    done, free_before = sum(len(t) for case in first for t in case), free()
    while done < tokens or not repeats:  # what is never repeated is never checked
        n = int(rng.integers(len(given)))
        again = generate(**given[n]).tokens
        done, repeats = done + sum(map(len, again)), repeats + 1
        if again != first[n]:
            changed.append(n)
    return {"tokens": done, "seconds": round(time.perf_counter() - begin, 1), "repeats": repeats, "changed": changed, "leaked_bytes": free_before - free()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="SmolLM2-135M", help="a named shape (random weights) or a model")
    parser.add_argument("--target", default="auto")
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--cases", type=int, default=24)
    arguments = parser.parse_args()
    entry.require_least(arguments, cases=1, context=SHORTEST_CONTEXT)
    compiler = mpk.Compiler(arguments.target, max_batch=16)
    compiler.require_device()
    loaded = frontend.load(arguments.model, shapes=True)
    instance = compiler.build(compiler.lower_model(loaded)).create_instance(max_batch=16, max_context=arguments.context, stall_limit_s=10.0)
    given = cases(np.random.default_rng(1), loaded.config.vocab_size, arguments.context, arguments.cases)
    found = soak(instance.generate, given, arguments.tokens, lambda: _free(compiler))
    print(json.dumps({"model": loaded.name, "target": compiler.target.name, **found}))
    return int(bool(found["changed"]) or found["leaked_bytes"] > 0)


def _free(compiler: mpk.Compiler) -> int:
    """Free bytes of the device; 0 on targets that are no device."""
    return cuda_device.Device(0).free_memory()[0] if compiler.target.backend == "cuda" else 0


if __name__ == "__main__":
    entry.run(main)
