"""Fit the simulator to a GPU: `python -m benchmarks.calibrate record FILE` on the device, then `python -m benchmarks.calibrate fit FILE`.

`record` measures whole decode steps of several shapes, batches and contexts with random weights, and traces some of them; it compiles all
programs at once, since that takes most of its time. `fit` writes `mpk/targets/costs/<name>.toml` and prints the error of every measurement,
of those that were held out too. `check` prints the errors of the costs as they are.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from mpk.errors import InternalError, UserError
from mpk.simulate.measurement import Measurement, load, operator_times, save

SHAPES = ("Llama-3.2-1B", "Qwen3-0.6B", "Llama-3.1-8B", "Qwen3-1.7B", "Qwen3-8B")
SETTINGS = ((1, 512, True), (8, 512, True), (1, 4096, True), (8, 4096, False))  # batch, context, whether it is traced too
FLIGHTS = ((32, 16), (48, 32), (96, 64), (160, 160))  # KB on their way, for two shapes
FLIGHT_SHAPES = ("Llama-3.2-1B", "Llama-3.1-8B")
STEPS, TRACED_STEPS = 32, 8


def prepare(target: str, shape: str) -> object:
    """Lower a shape and compile its program into the cache; returns the graph."""
    import mpk
    from mpk.codegen.cuda_program import CudaProgramBuilder, compile_cuda_program
    from mpk.frontend.source import LoadedModel
    from mpk.models import registry, shapes
    from mpk.targets import hardware

    config = shapes.shape(shape)
    graph = mpk.Compiler(target).lower_model(LoadedModel(config, shapes.RandomWeights(config, registry.build_graph(config)), None, shape))
    graph.model = None
    plan = hardware.load(graph.target).kernel
    assert plan is not None
    compile_cuda_program(CudaProgramBuilder(graph), plan)
    return graph


def record(target: str, names: list[str], path: Path, limit_s: float) -> None:
    """Measure until all is done or `limit_s` seconds are over; what there is by then is in the file."""
    started = time.monotonic()
    found: list[Measurement] = []
    with ProcessPoolExecutor(len(names)) as pool:
        graphs = dict(zip(names, pool.map(prepare, [target] * len(names), names), strict=True))
    print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
    for name in names:
        try:
            for m in measure(target, name, graphs[name], lambda: time.monotonic() - started > limit_s):
                found.append(m)
                save(found, path)
                print(f"{time.monotonic() - started:5.0f} s  {m.model} batch {m.batch} context {m.context} flight {m.flight}: {m.step_us:.1f} us", flush=True)
        except (UserError, InternalError, RuntimeError) as error:  # the other shapes are worth measuring all the same
            print(f"{name}: {error}", flush=True)


def measure(target: str, name: str, graph: object, late: object):  # type: ignore[no-untyped-def]
    """Yields the measurements of one shape."""
    from mpk.commands import decode_plan
    from mpk.commands.trace import window
    from mpk.models import registry, shapes
    from mpk.runtime.cuda_device import Device
    from mpk.runtime.cuda_engine import build_cuda_engine

    config = shapes.shape(name)
    engine = build_cuda_engine(graph, shapes.RandomWeights(config, registry.build_graph(config)), random_seed=1)
    about = {"model": name, "target": target, "device": Device(0).properties().name, "commit": commit(), "date": date.today().isoformat()}
    rng, longest = np.random.default_rng(0), max(len(q) for q in graph.queues)

    def run(batch: int, context: int, steps: int, trace: bool):  # type: ignore[no-untyped-def]
        plan = decode_plan.with_mean_context(batch, context, steps, graph.max_rows)
        spans = 3 * longest * (plan.prompt_steps + steps) if trace else 0
        instance = engine.create_instance(batch, plan.context, stall_limit_s=5.0, trace_spans=spans)
        result = instance.generate(rng.integers(0, config.vocab_size, (batch, plan.prompt)), max_new_tokens=plan.new_tokens, stop_tokens=[])
        times = np.diff(result.token_ms[plan.last]) * 1e3
        return instance, plan, float(np.median(times))

    for batch, context, traced in SETTINGS:
        if late():
            return
        step_us = run(batch, context, STEPS, False)[2]
        operators, traced_us = {}, 0.0
        if traced:
            instance, plan, traced_us = run(batch, context, TRACED_STEPS, True)
            operators = operator_times(graph, window(graph, instance.spans(), plan.prompt_steps, TRACED_STEPS)[0], TRACED_STEPS)
        yield Measurement(batch=batch, context=context, step_us=round(step_us, 2), operators=operators, traced_us=round(traced_us, 2), **about)
    own = engine.plan
    for kb in FLIGHTS if name in FLIGHT_SHAPES else ():
        if late():
            return
        flight = (kb[0] * 1024, kb[1] * 1024)
        plan = type(own)(own.architecture, own.capability, own.stage_bytes, own.stages, *flight)
        engine.on_device(0).plan = plan
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
    parser.add_argument("--limit-s", type=float, default=3600.0, help="record: start nothing new after so many seconds")
    parser.add_argument("--hold-out", nargs="*", default=["Qwen3-1.7B", "Qwen3-8B"], help="fit: shapes that are predicted, not fitted (nor are untraced settings)")
    parser.add_argument("--rounds", type=int, default=4, help="fit: steps of the least-squares solver")
    options = parser.parse_args()
    if options.what == "record":
        record(options.target, options.shapes, options.file, options.limit_s)
        return
    from mpk.simulate import calibrate

    measurements = load(options.file)
    if options.what == "fit":
        calibrate.fit_file(measurements, options.target, options.hold_out, options.rounds, print)
    for line in calibrate.errors(measurements, options.target, options.hold_out):
        print(line)


if __name__ == "__main__":
    main()
