"""Time to read a prompt of a named shape with random weights on a GPU target: `python -m benchmarks.prompt SHAPE [tokens ...] [--trace] [--compile]`.

The time is of the kernel for one new token (a whole launch), the median of several; one JSON line a length.
"""

from __future__ import annotations

import argparse
import json
import statistics

import numpy as np

import mpk
from benchmarks import entry
from mpk.frontend.source import LoadedModel
from mpk.models import registry, shapes
from mpk.runtime.cuda_engine import build_cuda_engine

REPEATS = 5


def trace(instance: object, graph: object) -> dict[str, list[float]]:
    """Operator (without its layer) -> mean microseconds of a task's run, the longest task of each layer in the mean, the mean wait."""
    spans = np.concatenate(instance.prompt_spans())  # type: ignore[attr-defined]
    runs: dict[str, dict[int, list[float]]] = {}
    waits: dict[str, list[float]] = {}
    for task, phase, begin, end in spans.tolist():
        op = graph.operator(task)  # type: ignore[attr-defined]
        name = op.name.split(".", 1)[-1] if op.layer >= 0 else op.name
        if phase == 0:
            runs.setdefault(name, {}).setdefault(op.layer, []).append((end - begin) / 1e3)
        else:
            waits.setdefault(name, []).append((end - begin) / 1e3)
    return {name: [round(float(np.mean([np.mean(v) for v in layers.values()])), 1), round(float(np.mean([max(v) for v in layers.values()])), 1),
                   round(float(np.mean(waits.get(name, [0.0]))), 1)] for name, layers in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("tokens", type=int, nargs="*", default=[512, 2048], help="lengths of prompts")
    parser.add_argument("--trace", action="store_true", help="also the mean microseconds of a task's run and wait, by operator")
    parser.add_argument("--compile", action="store_true", help="only compile the program")
    given = parser.parse_intermixed_args()  # lengths may stand behind options
    entry.require_least(given, tokens=1)
    if not given.compile:
        entry.require_gpus()
    name, config = given.shape, shapes.shape(given.shape)
    source = shapes.RandomWeights(config, registry.build_graph(config))
    graph = mpk.Compiler("h200").lower_model(LoadedModel(config, source, None, name))
    engine = build_cuda_engine(graph, source, random_seed=1, load=not given.compile)
    print(json.dumps({"model": name, "resources": str(engine.cubin.resources["mpk_run"])}), flush=True)
    if given.compile:
        return
    rng = np.random.default_rng(0)
    for length in given.tokens:
        instance = engine.create_instance(1, length + 64, stall_limit_s=2.0, trace_spans=20000 if given.trace else 0)
        prompt = rng.integers(0, config.vocab_size, length).tolist()
        times, tokens = [], []
        for _ in range(REPEATS):
            result = instance.generate(prompt, max_new_tokens=1, stop_tokens=[])
            times.append(instance.executor.kernel_ms)
            tokens.append(result.tokens[0])
        out = {"model": name, "prompt": length, "kernel_ms": round(statistics.median(times), 3), "min": round(min(times), 3), "max": round(max(times), 3),
               "repeats_equal": all(t == tokens[0] for t in tokens)}
        if given.trace and engine.prompt is not None:
            out["trace"] = trace(instance, engine.prompt.graph)
        print(json.dumps(out), flush=True)


if __name__ == "__main__":
    entry.run(main)
