"""Time per token of a named shape with random weights on a GPU target: `python -m benchmarks.decode SHAPE [batch] [context] [steps]`.

Whole steps: sampling, feeding back and reading a key-value cache of `context` positions are in. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass, replace

import numpy as np

from benchmarks import entry
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.models import registry, shapes
from mpk.passes import pipeline
from mpk.passes.partition import Options
from mpk.runtime.cuda_engine import CudaEngine, build_cuda_engine
from mpk.runtime.instance import Instance
from mpk.targets import hardware


@dataclass
class Prepared:
    """A model on the GPU and what it is asked for: `batch` sequences whose mean length is `context` over `steps` steps."""

    name: str
    batch: int
    context: int
    steps: int
    pipelining: bool
    traced: bool
    graph: SMTaskGraph
    engine: CudaEngine
    instance: Instance


def prepare(name: str, batch: int = 1, context: int = 512, steps: int = 64, pipelining: bool = True, flagged: bool = True, trace: int = 0,
            half_tiles: bool = True) -> Prepared:
    """Lower, compile and bring to the GPU; `flagged`: whether data is its own flag, or event counters order everything; `half_tiles`: whether products may be cut in
    tiles of 8 rows of weights."""
    config = shapes.shape(name)
    source = shapes.RandomWeights(config, registry.build_graph(config))
    target = replace(hardware.load("h200"), flagged=flagged)
    graph = pipeline.lower(registry.build_graph(config), target, Options(target.max_rows, target.max_rows, "bf16", half_tiles=half_tiles))
    engine = build_cuda_engine(graph, source, random_seed=1, pipelining=pipelining)
    instance = engine.create_instance(batch, context + steps + 64, stall_limit_s=2.0, trace_spans=trace)
    return Prepared(name, batch, context, steps, pipelining, trace > 0, graph, engine, instance)


def measure(p: Prepared, repeats: int = 5) -> dict[str, object]:
    """Median over `repeats` generations of the time of a step at about `context` positions."""
    config = p.graph.tensor_graph.config
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, config.vocab_size, p.context - p.steps // 2).tolist() for _ in range(p.batch)]
    times, texts = [], []
    for _ in range(repeats):
        result = p.instance.generate(prompts, max_new_tokens=p.steps, stop_tokens=[])
        if any(len(t) != p.steps for t in result.tokens):
            raise RuntimeError(f"sequences ended early: {result.finish_reasons}")
        texts.append(result.tokens)
        gaps = np.diff(np.array(result.token_ms), axis=1)[:, 1:]
        times.append(float(np.median(gaps)))
    target = hardware.load("h200")
    per_token = p.graph.weight_bytes - embedding_bytes(config) + p.batch * p.context * kv_bytes(config)
    floor = per_token / target.bandwidth.value / 1e6
    out = {"model": p.name, "batch": p.batch, "context": p.context, "ms_per_token": statistics.median(times), "min": min(times), "max": max(times),
           "floor_ms": floor, "ratio": statistics.median(times) / floor, "pipelining": p.pipelining, "flagged": p.graph.flagged_bytes > 0,
           "prefill_ms": result.first_token_ms, "repeats": all(t == texts[0] for t in texts), "text": result.tokens[0][:8]}
    if p.traced:
        out["trace"] = summary(p.instance, p.graph)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("batch", type=int, nargs="?", default=1)
    parser.add_argument("context", type=int, nargs="?", default=512)
    parser.add_argument("steps", type=int, nargs="?", default=64)
    given = parser.parse_args()
    entry.require_least(given, batch=1, steps=3, context=given.steps // 2 + 1)  # steps behind the second are timed; half of them are behind `context`
    entry.require_gpus()
    print(json.dumps(measure(prepare(given.shape, given.batch, given.context, given.steps))), flush=True)


if __name__ == "__main__":
    entry.run(main)
