"""Everything about several GPUs that share a model, in one command that ends by itself: `python -m benchmarks.tensor_parallel --tp 2`.

Parts, each a process with a time limit: `correct` (small models of every family against one GPU and against numpy; repeats bit for bit; a rank
that is not launched is noticed), `soak` (50,000 tokens, twice the same), `steps` (whole decode steps beside NCCL in a CUDA graph),
`trace` (what a sum over ranks adds to a step, and the share of communication that hides). Results are JSON lines on standard output; measurements
also go to `--output`. With `--one-device` all ranks run beside each other on the first GPU: `correct` and `soak` only, the links apart.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import entry
from mpk.errors import StallError
from mpk.models.config import DecoderConfig
from mpk.models.registry import build_graph
from mpk.models.shapes import RandomWeights, shape
from mpk.passes import pipeline
from mpk.passes.partition import Options
from mpk.passes.shard import obstacle
from mpk.runtime.cuda_engine import build_cuda_engine
from mpk.runtime.cuda_group import CudaGroupExecutor, build_cuda_group_engine
from mpk.runtime.instance import Instance
from mpk.runtime.interpreter import ReferenceProgram
from mpk.targets import hardware

MODELS = ("Llama-3.1-8B", "Llama-3.1-70B")
SOAK_TOKENS = 50_000
LIMITS_S = {"correct": 420, "soak": 240, "steps": 900, "trace": 420}


def small(family: str, **options: Any) -> DecoderConfig:
    """A small model whose sizes 2, 4 and 8 ranks can share."""
    settings: dict[str, Any] = {"vocab": 1003, "kv_heads": 4, **options}
    vocab, kv_heads = settings.pop("vocab"), settings.pop("kv_heads")
    return DecoderConfig(family, vocab, 256, 1024, 3, 16, kv_heads, 64, 1e-5, 2048, **settings)


SMALL = {
    "qwen3": small("Qwen3ForCausalLM", qk_norm=True, tie_embeddings=True, sliding_window=(0, 40, 0), qkv_bias=True, output_bias=True, mlp_bias=True),
    "llama": small("LlamaForCausalLM", vocab=515, kv_heads=8),
}


def lower(config: DecoderConfig, tp: int, workers: int | None) -> Any:
    target = hardware.load("h200")
    if workers is not None:
        target = target.with_workers(workers)
    return pipeline.lower(build_graph(config), target, Options(target.max_rows, target.max_rows, "bf16", tp))


def instance_of(config: DecoderConfig, tp: int, one_device: bool, context: int, random_seed: int | None = None) -> Instance:
    """An instance for 16 sequences on `tp` GPUs, or on one GPU beside each other."""
    graph = lower(config, tp, hardware.load("h200").max_workers // tp if one_device and tp > 1 else None)
    source = RandomWeights(config, build_graph(config))
    if tp == 1:
        return build_cuda_engine(graph, source, random_seed=random_seed).create_instance(16, context, stall_limit_s=5.0)
    engine = build_cuda_group_engine(graph, source, random_seed=random_seed, one_device=0 if one_device else None)
    return engine.create_instance(16, context, stall_limit_s=5.0)


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# ---- parts
def correct(tp: int, one_device: bool) -> None:
    """Logits no further from numpy than those of one GPU (1.5 times), all kinds of sampling bit for bit again, equal states, a stall noticed."""
    for name, config in SMALL.items():
        if obstacle(config, tp) is not None:
            continue
        prompts = [np.random.default_rng(1).integers(0, config.vocab_size, size) for size in ((1, 1), (2, 7), (16, 1), (3, 60))]
        exact = ReferenceProgram(lower(config, 1, None), RandomWeights(config, build_graph(config)), max_batch=16, max_context=128)
        references = [exact.forward(p) for p in prompts]
        one, several = instance_of(config, 1, False, 512), instance_of(config, tp, one_device, 512)
        logits = [several.forward(p) for p in prompts]
        ours, theirs = ([relative(a, b) for a, b in zip(found, references, strict=True)] for found in (logits, [one.forward(p) for p in prompts]))
        batch = [np.random.default_rng(i).integers(0, config.vocab_size, 5 + 3 * i).tolist() for i in range(16)]
        given: dict[str, Any] = {"max_new_tokens": 48, "temperature": [0.0] * 8 + [0.8] * 8, "top_k": [0] * 12 + [40] * 4, "top_p": [1.0] * 10 + [0.9] * 6,
                                 "seed": list(range(16)), "repetition_penalty": [1.0] * 14 + [1.2] * 2, "stop_tokens": [], "logprobs": 2}
        tokens = several.generate(batch, **given).tokens
        line = {"part": "correct", "model": name, "tp": tp, "one_device": one_device, "error": [round(e, 5) for e in ours], "error_of_one_gpu": [round(e, 5) for e in theirs],
                "close": all(a <= 1.5 * b + 1e-4 for a, b in zip(ours, theirs, strict=True)),
                "bits_repeat": all(np.array_equal(several.forward(p).view(np.uint32), x.view(np.uint32)) for _ in range(5) for p, x in zip(prompts, logits, strict=True)),
                "tokens_repeat": all(several.generate(batch, **given).tokens == tokens for _ in range(5)),
                "first_tokens_of_one_gpu": sum(a[0] == b[0] for a, b in zip(tokens, one.generate(batch, **given).tokens, strict=True)),
                "states_equal": states_equal(several), "stall": stall(several), "after_stall": several.generate(batch, **given).tokens == tokens}
        print(json.dumps(line), flush=True)
        if not (line["close"] and line["bits_repeat"] and line["tokens_repeat"] and line["states_equal"] and line["after_stall"]):
            raise SystemExit(1)


def states_equal(instance: Instance) -> bool:
    """Whether all ranks have planned and appended alike."""
    group = instance.executor
    assert isinstance(group, CudaGroupExecutor)
    first, *others = (e.state for e in group.executors)
    return all(np.array_equal(s.sequences, first.sequences) and np.array_equal(s.step, first.step) for s in others)


def stall(instance: Instance) -> str:
    """What is reported when the last rank's kernel is not launched."""
    group = instance.executor
    assert isinstance(group, CudaGroupExecutor)
    last = group.executors[-1]
    launch, last.launch = last.launch, lambda: None  # type: ignore[method-assign]
    for executor in group.executors:
        executor.stall_limit_s = 1.0
    try:
        instance.generate([[1, 2, 3]], max_new_tokens=4, stop_tokens=[])
    except StallError as error:
        return str(error)
    finally:
        last.launch = launch  # type: ignore[method-assign]
    raise SystemExit("a rank that was not launched was not noticed")


def soak(tp: int, one_device: bool) -> None:
    """50,000 tokens of 16 sequences at temperature 1, whose every round has the same tokens."""
    config = SMALL["llama"] if one_device else shape("Llama-3.2-1B")
    instance = instance_of(config, tp, one_device, 2048, None if one_device else 1)
    batch = [np.random.default_rng(i).integers(0, config.vocab_size, 5 + 3 * i).tolist() for i in range(16)]
    tokens = steps = 0
    first, begin = None, time.perf_counter()
    while tokens < SOAK_TOKENS:
        result = instance.generate(batch, max_new_tokens=1600, temperature=1.0, seed=list(range(16)), stop_tokens=[])
        first = first or result.tokens
        if result.tokens != first or set(result.finish_reasons) != {"length"}:
            raise SystemExit(f"soak: another result after {tokens} tokens")
        tokens, steps = tokens + sum(len(t) for t in result.tokens), steps + result.steps
    seconds = time.perf_counter() - begin
    print(json.dumps({"part": "soak", "tp": tp, "one_device": one_device, "tokens": tokens, "steps": steps, "us_per_step": round(1e6 * seconds / steps, 1)}), flush=True)


def steps(tp: int, output: str | None) -> None:
    """Whole decode steps, beside NCCL in a CUDA graph in the same run."""
    for model in MODELS:
        command = [sys.executable, "-m", "mpk", "bench", "--model", model, "--target", "h200", "--tp", str(tp), "--batch", "1,16", "--context", "512",
                   "--against", "nccl-graph", "--json", *(["--output", output] if output else [])]
        subprocess.run(command, check=True, timeout=LIMITS_S["steps"] // len(MODELS))


def trace(tp: int) -> None:
    """Exposed cost of a sum and hidden share, batch 1, context 512."""
    for model in MODELS:
        command = [sys.executable, "-m", "mpk", "trace", model, "--target", "h200", "--tp", str(tp), "--context", "512", "--steps", "16", "--json",
                   "--output", f"/tmp/mpk-trace-{tp}.pftrace"]
        done = subprocess.run(command, check=True, timeout=LIMITS_S["trace"] // len(MODELS), stdout=subprocess.PIPE, text=True)
        report = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps({"part": "trace", "model": model, "tp": tp, "ms_per_token": report["ms_per_token"], **report["communication"]}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--one-device", action="store_true")
    parser.add_argument("--output", help="append measurements of steps to this file (benchmarks/results/*.jsonl)")
    parser.add_argument("--part", action="append", choices=sorted(LIMITS_S), help="only this part (may be given several times)")
    parser.add_argument("--here", action="store_true", help="run the part in this process, without a time limit")
    given = parser.parse_args()
    entry.require_least(given, tp=2)
    entry.require_gpus(1 if given.one_device else given.tp)
    parts: dict[str, Callable[[], None]] = {
        "correct": lambda: correct(given.tp, given.one_device), "soak": lambda: soak(given.tp, given.one_device),
        "steps": lambda: steps(given.tp, given.output), "trace": lambda: trace(given.tp)}
    chosen = given.part or (["correct", "soak"] if given.one_device else list(parts))
    if given.here:
        for name in chosen:
            parts[name]()
        return
    failed = []
    for name in chosen:
        command = [sys.executable, "-m", "benchmarks.tensor_parallel", "--tp", str(given.tp), "--part", name, "--here",
                   *(["--one-device"] if given.one_device else []), *(["--output", given.output] if given.output else [])]
        try:
            code: int | str = subprocess.run(command, timeout=LIMITS_S[name], check=False).returncode
        except subprocess.TimeoutExpired:
            code = f"longer than {LIMITS_S[name]} s"
        print(json.dumps({"part": name, "tp": given.tp, "ended": code}), flush=True)
        failed += [name] if code != 0 else []
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    entry.run(main)
