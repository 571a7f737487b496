"""`mpk bench`: whole decode steps of a model shape, as a median with quartiles and as a ratio to the memory floor."""

from __future__ import annotations

import gc
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from mpk.commands import decode_plan
from mpk.commands.common import build, check_writable, print_json, require_complete, writing
from mpk.commands.peers import PEERS, peer_system
from mpk.errors import RequestError
from mpk.models.floor import floor_bytes

if TYPE_CHECKING:
    from mpk.commands.decode_plan import DecodePlan
    from mpk.frontend import LoadedModel
    from mpk.models.config import DecoderConfig
    from mpk.targets.hardware import Target

STEPS = 32  # decode steps of one repetition
System = Callable[[int, int], list[float]]  # (batch, context) -> ms of single steps


def command(
    model: Annotated[str, typer.Option(help="Named shape (Llama-3.1-8B, Qwen3-0.6B, SmolLM2-135M, ...), config.json, or a model with weights.")],
    target: Annotated[str, typer.Option(help="auto, cpp, or another target that `mpk targets` lists.")] = "auto",
    batch: Annotated[str, typer.Option(help="Sequences in a step; several separated by commas.")] = "1",
    context: Annotated[str, typer.Option(help="Mean context of the measured steps in tokens; several separated by commas.")] = "512",
    tp: Annotated[int, typer.Option(help="Devices that share the model (on cpp: groups of threads), 1 to 8.")] = 1,
    dtype: Annotated[str, typer.Option(help="Type of weights and key-value cache: bf16 or f32.")] = "bf16",
    workers: Annotated[int | None, typer.Option(help="Worker threads or SMs (default: all of the target).")] = None,
    repeats: Annotated[int, typer.Option(help="Generations measured for each line.")] = 3,
    against: Annotated[str | None, typer.Option(help=f"Measure a peer too, in the same process: {', '.join(PEERS)}.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line a measurement.")] = False,
    output: Annotated[Path | None, typer.Option(help="Append the JSON lines to this file (benchmarks/results/*.jsonl).")] = None,
) -> None:
    """Measure decoding with random weights of a shape.

    The floor is the bytes a step must read over the target's bandwidth, which `mpk targets` lists with its source; for cpp that is
    the bandwidth of one machine (34.9 GB/s, 2 threads, Zen 3), so that ratios on other machines compare with that one.
    """
    from mpk import frontend
    from mpk.compiler import Compiler

    batches, contexts = _numbers(batch, "--batch"), _numbers(context, "--context")
    if against is not None and against not in PEERS:
        raise RequestError(f"--against {against}", expected=" or ".join(PEERS))
    if repeats < 1:
        raise RequestError(f"--repeats {repeats}", expected="1 or more")
    compiler = Compiler(target, tensor_parallel_size=tp, dtype=dtype, workers=workers, max_batch=max(batches))
    compiler.require_device()
    if output is not None:
        check_writable("--output", output)
    loaded = frontend.load(model, shapes=True)
    for c in contexts:
        if c + STEPS // 2 + 1 > loaded.config.max_context or c <= STEPS // 2:
            raise RequestError(f"--context {c}", expected=f"{STEPS // 2 + 1} to {loaded.config.max_context - STEPS // 2 - 1} for {loaded.name}")
    least = compiler.target.prompt_least if tp == 1 else 0
    plans = {(b, c): decode_plan.with_mean_context(b, c, STEPS, compiler.options.max_rows, least) for b in batches for c in contexts}
    for (b, c), plan in plans.items():
        if plan.context > loaded.config.max_context:
            raise RequestError(f"--batch {b} and --context {c}", actual=f"{plan.context} tokens in the sequence that is read first",
                               expected=f"at most {loaded.config.max_context} (the context of {loaded.name})")
    makers: dict[str, Callable[[], System]] = {"mpk": lambda: _mpk(compiler, loaded, plans, quiet=json)}
    if against is not None:
        makers[against] = lambda: peer_system(against, loaded.config, dtype, STEPS, tp)
    for names in _turns(list(makers), loaded.config, dtype, tp, compiler.target):
        systems = {name: makers[name]() for name in names}
        for b in batches:
            for c in contexts:
                for name, times in _samples(systems, b, c, repeats).items():
                    _report(line(name, loaded, compiler.target, tp, dtype, b, c, times), json, output)
        systems.clear()
        gc.collect()  # frees the memory of devices


def _turns(names: list[str], config: DecoderConfig, dtype: str, tp: int, target: Target) -> list[list[str]]:
    """Which systems are measured together: all, or each by itself where a device has no room for the weights of all."""
    if target.backend != "cuda" or len(names) == 1:
        return [names]
    from mpk.runtime.cuda_device import Device

    free, _ = Device(0).free_memory()
    weights = floor_bytes(config, dtype, 0, 0) / tp + config.vocab_size * config.hidden_size * (2 if dtype == "bf16" else 4)
    return [names] if len(names) * weights < 0.85 * free else [[name] for name in names]


def _samples(systems: Mapping[str, System], batch: int, context: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of single steps of every system, which take turns, so that a drift of the machine meets all of them."""
    samples: dict[str, list[float]] = {name: [] for name in systems}
    for system in systems.values():
        system(batch, context)  # warm-up
    for _ in range(repeats):
        for name, system in systems.items():
            samples[name] += system(batch, context)
    return samples


def _numbers(text: str, option: str) -> list[int]:
    try:
        values = [int(v) for v in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise RequestError(f"{option} {text}", expected="positive numbers separated by commas")
    return values


def floor_ms(config: DecoderConfig, dtype: str, target: Target, tp: int, batch: int, context: int) -> float:
    """Milliseconds of a step of `tp` devices that did nothing but read `floor_bytes`, each its part."""
    return floor_bytes(config, dtype, batch, context) / tp / (target.rank_bandwidth(tp) * 1e6)


def _mpk(compiler: Any, loaded: LoadedModel, plans: Mapping[tuple[int, int], DecodePlan], quiet: bool) -> System:
    return decode_steps(build(compiler, loaded, quiet)[0], loaded, plans)


def decode_steps(engine: Any, loaded: LoadedModel, plans: Mapping[tuple[int, int], DecodePlan]) -> System:
    """A function that runs one generation of a plan with random tokens and returns milliseconds of its single decode steps."""
    instance = engine.create_instance(max_batch=max(b for b, _ in plans), max_context=max(plan.context for plan in plans.values()))
    rng = np.random.default_rng(0)

    def measure(b: int, c: int) -> list[float]:
        plan = plans[b, c]
        prompts = rng.integers(0, loaded.config.vocab_size, size=(b, plan.prompt))
        result = instance.generate(prompts, max_new_tokens=plan.new_tokens, stop_tokens=[])
        require_complete(result)
        return np.diff(result.token_ms[plan.last]).tolist()  # steps in which every sequence decodes and no prompt is read

    return measure


def line(system: str, loaded: LoadedModel, target: Target, tp: int, dtype: str, batch: int, context: int,
         times: list[float]) -> dict[str, Any]:
    """One measurement as `benchmarks/results` keeps it: milliseconds, quartiles, floor and ratio to it."""
    q1, median, q3 = statistics.quantiles(times, n=4)
    floor = floor_ms(loaded.config, dtype, target, tp, batch, context)
    return {"system": system, "model": loaded.name, "target": target.name, "device": _device(target), "tp": tp, "dtype": dtype, "batch": batch,
            "context": context, "ms_per_token": round(median, 4), "q1": round(q1, 4), "q3": round(q3, 4), "floor_ms": round(floor, 4),
            "ratio": round(median / floor, 3), "commit": _commit(), "date": date.today().isoformat()}


def _device(target: Target) -> str:
    if target.backend == "cuda":
        from mpk.runtime.cuda_device import Device

        return Device(0).properties().name
    try:
        for text in Path("/proc/cpuinfo").read_text().splitlines():
            if text.startswith("model name"):
                return text.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _report(result: dict[str, Any], json: bool, output: Path | None) -> None:
    import json as json_module

    if output is not None:
        with writing("--output", output, appends=True), output.open("a", encoding="utf-8") as f:
            f.write(json_module.dumps(result) + "\n")
    if json:
        print_json(result)
    else:
        print(f"{result['system']:12} {result['model']} batch {result['batch']} context {result['context']}: {result['ms_per_token']:.3f} ms "
              f"({result['q1']:.3f} to {result['q3']:.3f}), floor {result['floor_ms']:.3f}, ratio {result['ratio']:.2f}")
