"""Fit the simulator to a GPU: `python -m benchmarks.calibrate record FILE` on the device, then `python -m benchmarks.calibrate fit FILE`.

`record` measures whole decode steps of several shapes, batches and contexts with random weights, and traces some of them; it compiles all
programs at once, since that takes most of its time. `fit` writes `mpk/targets/costs/<name>.toml` and prints the error of every measurement,
of those that were held out too. `check` prints the errors of the costs as they are.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import entry
from mpk.errors import InternalError, UserError
from mpk.simulate.measurement import Measurement, load, operator_times, save

SHAPES = ("Llama-3.2-1B", "Qwen3-0.6B", "Llama-3.1-8B", "Qwen3-1.7B", "Qwen3-8B")
SETTINGS = ((1, 512, True), (8, 512, True), (1, 4096, True), (8, 4096, False))  # batch, context, whether it is traced too
FLIGHTS = ((32, 16), (48, 32), (96, 64), (160, 160))  # KB on their way, for two shapes
FLIGHT_SHAPES = ("Llama-3.2-1B", "Llama-3.1-8B")
STEPS, TRACED_STEPS = 32, 8


def compiler_of(target: str, tp: int):  # type: ignore[no-untyped-def]
    import mpk

    return mpk.Compiler(target, tensor_parallel_size=tp, use_tuned=False)


def prepare(target: str, shape: str, tp: int) -> None:
    """Lower a shape and compile its program; both stay in the cache."""
    from mpk import frontend
    from mpk.codegen.cuda_program import CudaProgramBuilder, compile_cuda_program
    from mpk.codegen.prompt_program import PromptProgram
    from mpk.runtime.cuda_engine import prompt_graph
    from mpk.targets import hardware

    described = hardware.load(target)
    assert described.kernel is not None
    graph = compiler_of(target, tp).lower_model(frontend.load(shape, shapes=True))
    builder = CudaProgramBuilder(graph)
    compile_cuda_program(builder, described.kernel, PromptProgram(prompt_graph(graph, described), builder) if tp == 1 else None)


def record(target: str, names: list[str], path: Path, limit_s: float, tp: int) -> None:
    """Measure until all is done or `limit_s` seconds are over; what there is by then is in the file, behind what was in it."""
    started = time.monotonic()
    found = load(path) if path.exists() else []
    fresh = multiprocessing.get_context("spawn")  # a forked process could not use the driver
    with ProcessPoolExecutor(len(names), mp_context=fresh) as pool:
        list(pool.map(prepare, [target] * len(names), names, [tp] * len(names)))
    print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
    for name in names:
        try:
            for m in measure(target, name, tp, lambda: time.monotonic() - started > limit_s):
                found.append(m)
                save(found, path)
                print(f"{time.monotonic() - started:5.0f} s  {m.model} tp {m.tp} batch {m.batch} context {m.context} flight {m.flight}: {m.step_us:.1f} us", flush=True)
        except (UserError, InternalError, RuntimeError) as error:  # the other shapes are worth measuring all the same
            print(f"{name}: {error}", flush=True)


def measure(target: str, name: str, tp: int, late: Callable[[], bool]) -> Iterator[Measurement]:
    """The measurements of one shape; with several devices untraced and at the target's own bytes in flight."""
    from mpk import frontend
    from mpk.commands import decode_plan
    from mpk.runtime.cuda_device import Device
    from mpk.simulate.measured import measured
    from mpk.targets import hardware

    compiler, loaded = compiler_of(target, tp), frontend.load(name, shapes=True)
    engine = compiler.build(compiler.lower_model(loaded))
    graph = engine.graph
    about = {"model": name, "target": target, "tp": tp, "options": {"flagged": hardware.load(target).flagged}, "device": Device(0).properties().name,
             "commit": commit(), "date": date.today().isoformat()}
    rng, longest = np.random.default_rng(0), max(len(q) for q in graph.queues)

    def run(batch: int, context: int, steps: int, trace: bool):  # type: ignore[no-untyped-def]
        plan = decode_plan.with_mean_context(batch, context, steps, graph.max_rows, compiler.target.prompt_least if tp == 1 else 0)
        spans = 3 * longest * (plan.prompt_steps + steps) if trace else 0
        instance = engine.create_instance(batch, plan.context, stall_limit_s=5.0, trace_spans=spans, device_ids=list(range(tp)))
        prompts = rng.integers(0, loaded.config.vocab_size, (batch, plan.prompt))
        result = instance.generate(prompts, max_new_tokens=plan.new_tokens, stop_tokens=[])
        return instance, plan, float(np.median(np.diff(result.token_ms[plan.last]))) * 1e3

    for batch, context, traced in SETTINGS:
        if late():
            return
        step_us = run(batch, context, STEPS, False)[2]
        operators, traced_us = {}, 0.0
        if traced and tp == 1:
            instance, plan, traced_us = run(batch, context, TRACED_STEPS, True)
            operators = operator_times(measured(engine.graph, instance.spans(), plan.prompt_steps, TRACED_STEPS))
        yield Measurement(batch=batch, context=context, step_us=round(step_us, 2), operators=operators, traced_us=round(traced_us, 2), **about)
    for kb in FLIGHTS if name in FLIGHT_SHAPES and tp == 1 else ():
        if late():
            return
        flight = (kb[0] * 1024, kb[1] * 1024)
        own = engine.on_device(0).plan
        engine.on_device(0).plan = replace(own, flight_bytes=flight[0], flight_idle_bytes=flight[1])
        yield Measurement(batch=1, context=512, step_us=round(run(1, 512, STEPS, False)[2], 2), flight=flight, **about)
        engine.on_device(0).plan = own


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "fit", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--tp", type=int, default=1, help="record: devices that share the model")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="record: start nothing new after so many seconds")
    parser.add_argument("--hold-out", nargs="*", default=["Qwen3-1.7B", "Qwen3-8B"], help="fit: shapes that are predicted, not fitted")
    parser.add_argument("--rounds", type=int, default=8, help="fit: steps of the least-squares solver")
    options = parser.parse_args()
    if options.what == "record":
        entry.require_least(options, tp=1)
        entry.require_gpus(options.tp, options.target)
        record(options.target, options.shapes, options.file, options.limit_s, options.tp)
        return
    from mpk.simulate import calibrate

    measurements = load(options.file)
    if options.what == "fit":
        calibrate.fit_file(measurements, options.target, options.hold_out, options.rounds, print)
    for line in calibrate.errors(measurements, options.target, options.hold_out):
        print(line)


if __name__ == "__main__":
    entry.run(main)
