"""Time per token of a named shape with random weights on a GPU target: `python -m benchmarks.decode SHAPE [batch] [context] [steps]`.

Whole steps: sampling, feeding back and reading a key-value cache of `context` positions are in. Prints one JSON line.
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
from mpk.targets import hardware


def measure(name: str, batch: int = 1, context: int = 512, steps: int = 64, repeats: int = 5, pipelining: bool = True, trace: int = 0) -> dict[str, object]:
    """Median over `repeats` of the time of a step at about `context` positions."""
    config = shapes.shape(name)
    source = shapes.RandomWeights(config, registry.build_graph(config))
    graph = mpk.Compiler("h200").lower_model(LoadedModel(config, source, None, name))
    engine = build_cuda_engine(graph, source, random_seed=1, pipelining=pipelining)
    instance = engine.create_instance(batch, context + steps + 64, stall_limit_s=2.0, trace_spans=trace)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, config.vocab_size, context - steps // 2).tolist() for _ in range(batch)]
    times = []
    for _ in range(repeats):
        result = instance.generate(prompts, max_new_tokens=steps, stop_tokens=[])
        if any(len(t) != steps for t in result.tokens):
            raise RuntimeError(f"sequences ended early: {result.finish_reasons}")
        gaps = np.diff(np.array(result.token_ms), axis=1)[:, 1:]
        times.append(float(np.median(gaps)))
    target = hardware.load("h200")
    per_token = graph.weight_bytes - embedding_bytes(config) + batch * context * kv_bytes(config)
    floor = per_token / target.bandwidth.value / 1e6
    out = {"model": name, "batch": batch, "context": context, "ms_per_token": statistics.median(times), "min": min(times), "max": max(times),
           "floor_ms": floor, "ratio": statistics.median(times) / floor, "pipelining": pipelining,
           "prefill_ms": result.first_token_ms, "text": result.tokens[0][:8]}
    if trace:
        out["trace"] = summary(instance, graph)
    return out


def embedding_bytes(config: object) -> int:
    return config.vocab_size * config.hidden_size * 2  # type: ignore[attr-defined]


def kv_bytes(config: object) -> int:
    """Bytes of keys and values of one position."""
    return config.num_layers * config.num_kv_heads * config.head_dim * 2 * 2  # type: ignore[attr-defined]


def summary(instance: object, graph: object, steps: int = 8) -> dict[str, list[float]]:
    """Operator (without its layer) -> mean microseconds of a task's run and wait, tasks a step; over the last whole steps."""
    spans = np.concatenate(instance.spans())  # type: ignore[attr-defined]
    last = graph.tasks[-1].id  # type: ignore[attr-defined]
    ends = np.sort(spans["end_ns"][(spans["task"] == last) & (spans["phase"] == 0)])
    begin, end = ends[-steps - 1], ends[-1]
    spans = spans[(spans["begin_ns"] >= begin) & (spans["begin_ns"] < end)]
    total: dict[str, list[float]] = {}
    for task, phase, first, stop in spans.tolist():
        op = graph.tensor_graph.operators[graph.tasks[task].op]  # type: ignore[attr-defined]
        row = total.setdefault(op.name.split(".", 1)[-1] if op.layer >= 0 else op.name, [0.0, 0.0, 0.0, 0.0])
        row[phase] += (stop - first) / 1e3
        row[2 + phase] += 1
    out = {name: [round(v[0] / max(v[2], 1), 2), round(v[1] / max(v[3], 1), 2), round(v[2] / steps, 1)] for name, v in total.items()}
    out["step_us"] = [round((end - begin) / steps / 1e3, 1)]
    return out


def main() -> None:
    name, *numbers = sys.argv[1:]
    print(json.dumps(measure(name, *map(int, numbers))), flush=True)


if __name__ == "__main__":
    main()
