"""Time to read a prompt of a named shape with random weights on a GPU target: `python -m benchmarks.prompt SHAPE [tokens ...]`.

The time is of the kernel for one new token (a whole launch), the median of several; one JSON line a length. `--trace`: also the mean microseconds
of a task's run and wait, by operator. `--compile`: only compile the program.
"""

from __future__ import annotations

import json
import statistics
import sys

import numpy as np

import mpk
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
    traced = "--trace" in sys.argv
    name, *lengths = [a for a in sys.argv[1:] if not a.startswith("--")]
    config = shapes.shape(name)
    source = shapes.RandomWeights(config, registry.build_graph(config))
    graph = mpk.Compiler("h200").lower_model(LoadedModel(config, source, None, name))
    engine = build_cuda_engine(graph, source, random_seed=1, load="--compile" not in sys.argv)
    print(json.dumps({"model": name, "resources": str(engine.cubin.resources["mpk_run"])}), flush=True)
    if "--compile" in sys.argv:
        return
    rng = np.random.default_rng(0)
    for length in map(int, lengths or ["512", "2048"]):
        instance = engine.create_instance(1, length + 64, stall_limit_s=2.0, trace_spans=20000 if traced else 0)
        prompt = rng.integers(0, config.vocab_size, length).tolist()
        times, tokens = [], []
        for _ in range(REPEATS):
            result = instance.generate(prompt, max_new_tokens=1, stop_tokens=[])
            times.append(instance.executor.kernel_ms)
            tokens.append(result.tokens[0])
        out = {"model": name, "prompt": length, "kernel_ms": round(statistics.median(times), 3), "min": round(min(times), 3), "max": round(max(times), 3),
               "repeats_equal": all(t == tokens[0] for t in tokens)}
        if traced and engine.prompt is not None:
            out["trace"] = trace(instance, engine.prompt.graph)
        print(json.dumps(out), flush=True)


if __name__ == "__main__":
    main()
