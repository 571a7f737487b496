"""What tiles of 8 rows of weights are worth: `python -m benchmarks.tiles SHAPE[:RANKS] ... [--batch 1,16]`, one JSON line a shape, batch and cut.

Both programs of a shape, with and without such tiles, are on the GPUs together where they fit and take turns, so that both see the same state
of the machine. `--compile` compiles all programs beside each other and ends: worth doing first, since each takes a minute of one processor.
`--check` instead compares logits of both, of true weights, on two layers of each shape: steps of one row, of several, and (one GPU) prompt steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from benchmarks import entry
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.models import registry, shapes
from mpk.models.config import DecoderConfig, first_layers
from mpk.passes import pipeline
from mpk.passes.partition import Options, short_name
from mpk.runtime.cuda_engine import build_cuda_engine
from mpk.runtime.instance import Instance
from mpk.targets import hardware
from mpk.tasks.base import kind_of
from mpk.tasks.stages import HALF_ROWS, stages_of

STEPS, ROUNDS, CONTEXT = 64, 5, 512
CHECK_VOCAB, CHECK_LENGTHS = 4096, (1, 7, 300)
CLOSE = 2e-2  # relative distance of logits: sums in another order, rounded to bf16 at every operator


def lower(config: DecoderConfig, ranks: int, half: bool) -> SMTaskGraph:
    target = hardware.load("h200")
    return pipeline.lower(registry.build_graph(config), target, Options(target.max_rows, target.max_rows, "bf16", ranks, half_tiles=half))


def instance_of(config: DecoderConfig, ranks: int, half: bool, batch: int, context: int, random_seed: int | None = 1) -> Instance:
    source = shapes.RandomWeights(config, registry.build_graph(config))
    return build_cuda_engine(lower(config, ranks, half), source, random_seed=random_seed).create_instance(batch, context, stall_limit_s=5.0)


def compile_both(config: DecoderConfig, ranks: int) -> None:
    for half in (False, True):
        build_cuda_engine(lower(config, ranks, half), shapes.RandomWeights(config, registry.build_graph(config)), load=False)


def halved(graph: SMTaskGraph) -> list[str]:
    """Products in tiles of 8 rows."""
    return list(dict.fromkeys(short_name(op) for op in graph.tensor_graph.operators if kind_of(op).halves and stages_of(op).rows == HALF_ROWS))


def step_ms(instance: Instance, batch: int) -> list[float]:
    """Milliseconds of every step of one generation around `CONTEXT` tokens."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1000, CONTEXT - STEPS // 2).tolist() for _ in range(batch)]
    result = instance.generate(prompts, max_new_tokens=STEPS, stop_tokens=[])
    return np.diff(np.array(result.token_ms), axis=1)[:, 1:].mean(axis=0).tolist()


def measure(name: str, ranks: int, batches: list[int]) -> None:
    config, most = shapes.shape(name), max(batches)
    graphs = {half: lower(config, ranks, half) for half in (False, True)}
    together = 2 * graphs[True].weight_bytes < 0.8e9 * hardware.load("h200").capacity_gb.value
    times: dict[tuple[bool, int], list[float]] = {(half, batch): [] for half in (False, True) for batch in batches}
    for group in [(False, True)] if together else [(False,), (True,)]:
        instances = {half: instance_of(config, ranks, half, most, CONTEXT + STEPS) for half in group}
        for turn in range(ROUNDS + 1):
            for half, instance in instances.items():
                for batch in batches:
                    found = step_ms(instance, batch)
                    times[half, batch] += found if turn else []  # the first is to warm up
        del instances, instance
    for (half, batch), ms in times.items():
        q1, median, q3 = statistics.quantiles(ms, n=4)
        print(json.dumps({"model": name, "tp": ranks, "batch": batch, "context": CONTEXT, "half_tiles": half, "halved": halved(graphs[half]), "together": together,
                          "ms_per_token": round(median, 4), "q1": round(q1, 4), "q3": round(q3, 4)}), flush=True)


def check(name: str, ranks: int) -> bool:
    """Whether both cuts give nearly the same logits, and each the same bits again."""
    config = replace(first_layers(shapes.shape(name), 2), vocab_size=CHECK_VOCAB)
    prompts = [np.random.default_rng(n).integers(0, CHECK_VOCAB, (1, n)) for n in CHECK_LENGTHS] + [np.random.default_rng(9).integers(0, CHECK_VOCAB, (13, 3))]
    found: dict[bool, list[np.ndarray]] = {}
    repeats = True
    for half in (False, True):
        instance = instance_of(config, ranks, half, 16, 512, random_seed=None)
        found[half] = [np.asarray(instance.forward(p)) for p in prompts]
        repeats &= all(np.array_equal(np.asarray(instance.forward(p)).view(np.uint32), x.view(np.uint32)) for p, x in zip(prompts, found[half], strict=True))
        del instance
    distances = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(found[True], found[False], strict=True)]
    fine = repeats and max(distances) < CLOSE
    print(json.dumps({"part": "check", "model": name, "tp": ranks, "halved": halved(lower(config, ranks, True)), "distance": [round(d, 5) for d in distances],
                      "bits_repeat": repeats, "fine": fine}), flush=True)
    return fine


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", help="a named shape, or one with the number of GPUs that share it: Llama-3.1-8B:2")
    parser.add_argument("--batch", type=numbers, default=[1], help="sequences, comma-separated")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    entry.require_least(given, batch=1)
    wanted = [entry.shape_and_ranks(s) for s in given.shapes]
    if not given.compile:
        entry.require_gpus(max(ranks for _, ranks in wanted))
    if given.compile:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda w: compile_both(shapes.shape(w[0]), w[1]), wanted))
    elif given.check:
        results = [check(name, ranks) for name, ranks in wanted]
        raise SystemExit(0 if all(results) else "logits of both cuts differ")
    else:
        for name, ranks in wanted:
            measure(name, ranks, given.batch)


if __name__ == "__main__":
    entry.run(main)
