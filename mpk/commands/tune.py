"""`mpk tune`: search the choices of the passes with the simulator, check the best few on the device, keep the winner for later builds."""

from __future__ import annotations

import statistics
import time
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpk.commands.common import DEFAULT_MODEL, print_json
from mpk.commands.simulate import require_room
from mpk.errors import RequestError
from mpk.targets import hardware

if TYPE_CHECKING:
    from mpk.compiler import Compiler
    from mpk.frontend import LoadedModel
    from mpk.simulate.tune import Candidate

STEPS, REPEATS = 32, 3  # of a measurement on the device


def command(
    model: Annotated[str, typer.Argument(help="A named shape such as Llama-3.1-8B, a config.json, a folder, or a GGUF file.")] = DEFAULT_MODEL,
    target: Annotated[str, typer.Option(help="auto, or any target that `mpk targets` lists.")] = "auto",
    batch: Annotated[int, typer.Option(help="Sequences of the step to tune for.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens before the step to tune for.")] = 512,
    max_batch: Annotated[int, typer.Option(help="Sequences the program is built for; the winner is used by builds with the same number.")] = 16,
    workers: Annotated[int | None, typer.Option(help="Worker threads or SMs (default: all of the target).")] = None,
    dtype: Annotated[str, typer.Option(help="Type of weights and key-value cache: bf16 or f32.")] = "bf16",
    measure: Annotated[bool, typer.Option(help="Check the best few on the device, where it is there.")] = True,
    save: Annotated[bool, typer.Option(help="Keep the winner, so that later builds use it.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tile counts, splits of the context, placement, signals and bytes in flight; every candidate is verified before it is simulated."""
    from mpk import frontend
    from mpk.codegen import tuned
    from mpk.compiler import Compiler
    from mpk.simulate import tune

    loaded = frontend.load(model, shapes=True)
    if not 1 <= batch <= max_batch:
        raise RequestError(f"--batch {batch}", expected=f"1 to {max_batch} (--max-batch)")
    if not STEPS < context <= loaded.config.max_context - STEPS:
        raise RequestError(f"--context {context}", expected=f"{STEPS + 1} to {loaded.config.max_context - STEPS} for {loaded.name}")
    compiler = Compiler(target, dtype=dtype, workers=workers, max_batch=max_batch, use_tuned=False)
    require_room(compiler, loaded, None, batch, context)
    if save:
        tuned.require_writable()
    started = time.perf_counter()
    seen: list[Candidate] = []
    say = seen.append if json else (lambda c: _progress(seen, c))
    setting = tune.Setting(batch, context, compiler.enable_cross_op_pipelining)
    ranked = tune.search(loaded.config, compiler.target, compiler.options, setting, say=say)
    searched = time.perf_counter() - started
    measured: dict[int, float] = {}
    if measure and hardware.runs_here(compiler.target):
        measured = {i: _measured_us(compiler, loaded, c, batch, context) for i, c in enumerate(ranked)}
    place = tune.choose(ranked, measured)
    best = ranked[place]
    rows = [_row(c, measured.get(i)) for i, c in enumerate(ranked)]
    default = next(r for r in rows if not r["changes"])
    report: dict[str, Any] = {
        "model": loaded.name, "target": compiler.target.name, "batch": batch, "context": context, "max_batch": max_batch, "candidates": len(seen),
        "refused": [{"changes": list(c.changes), "why": c.refusal} for c in seen if c.refusal], "ranked": rows, "best": rows[place], "default": default,
        "search_seconds": round(searched, 1), "date": date.today().isoformat(), "saved": bool(save and best.changes)}
    if report["saved"]:
        tuned.store(loaded.config, compiler.target, best.options, {k: report[k] for k in ("model", "target", "batch", "context", "best", "default", "date")})
    if json:
        print_json(report)
    else:
        _print(report)


def _measured_us(compiler: Compiler, loaded: LoadedModel, candidate: Candidate, batch: int, context: int) -> float:
    """Median microseconds of a decode step on the device, with random weights where the model is a shape."""
    from mpk.commands import decode_plan
    from mpk.commands.bench import decode_steps
    from mpk.simulate.tune import lower

    graph = lower(loaded.config, compiler.target, candidate.options)
    graph.model = loaded
    plan = decode_plan.with_mean_context(batch, context, STEPS, compiler.options.max_rows)
    run = decode_steps(compiler.build(graph), loaded, {(batch, context): plan})
    run(batch, context)  # warm-up
    return statistics.median(ms for _ in range(REPEATS) for ms in run(batch, context)) * 1e3


def _row(candidate: Candidate, measured: float | None) -> dict[str, Any]:
    return {"changes": list(candidate.changes), "simulated_us": round(candidate.latency_us or 0.0, 2),
            "measured_us": None if measured is None else round(measured, 2)}


def _progress(seen: list[Candidate], candidate: Candidate) -> None:
    seen.append(candidate)
    result = f"{candidate.latency_us:.1f} us" if candidate.latency_us is not None else f"refused: {candidate.refusal}"
    print(f"{len(seen):4} {result:>12}  {', '.join(candidate.changes)} (first layers)", flush=True)


def _print(report: dict[str, Any]) -> None:
    default = report["default"]
    print(f"{report['model']} on {report['target']}, batch {report['batch']}, context {report['context']}: {report['candidates']} candidates in "
          f"{report['search_seconds']:.1f} s, {len(report['refused'])} refused by the verifier; the whole model:")
    for row in report["ranked"]:
        measured = "" if row["measured_us"] is None else f", measured {row['measured_us']:.1f} us ({default['measured_us'] / row['measured_us']:.3f} x)"
        print(f"  {row['simulated_us']:9.1f} us simulated ({default['simulated_us'] / row['simulated_us']:.3f} x){measured}  {', '.join(row['changes']) or 'default'}")
    state = "kept for later builds" if report["saved"] else "nothing kept" if report["best"]["changes"] else "the default stays"
    print(f"best: {', '.join(report['best']['changes']) or 'default'}; {state}")
    if not report["best"]["changes"] and report["ranked"][0]["changes"] and default["measured_us"] is None:
        print("a gain that is only predicted has to exceed the error of predictions, 4 %, to be taken without a measurement")
