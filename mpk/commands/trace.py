"""`mpk trace`: run a generation with the trace on, write pictures of it, print where the time went."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from mpk.commands import communication, decode_plan
from mpk.commands.common import DEFAULT_MODEL, build, check_outputs, print_json, require_complete, writing
from mpk.errors import RequestError
from mpk.simulate import analysis
from mpk.simulate.timeline import PHASES

if TYPE_CHECKING:
    from mpk.simulate.timeline import Timeline


def command(
    model: Annotated[str, typer.Argument(help="A folder, a GGUF file, a named shape, or a config.json.")] = DEFAULT_MODEL,
    output: Annotated[Path, typer.Option("--output", "-o", help="File for https://ui.perfetto.dev.")] = Path("trace.pftrace"),
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page to this file: timeline, tables, search.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a figure for papers to this file (needs matplotlib).")] = None,
    target: Annotated[str, typer.Option(help="auto, cpp, or another target that `mpk targets` lists.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Type of weights and key-value cache: bf16 or f32.")] = "bf16",
    workers: Annotated[int | None, typer.Option(help="Worker threads or SMs (default: all of the target).")] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    context: Annotated[int, typer.Option(help="Prompt tokens before the traced steps.")] = 64,
    steps: Annotated[int, typer.Option(help="Decode steps to trace.")] = 8,
    tp: Annotated[int, typer.Option(help="Devices that share the model (on cpp: groups of threads), 1 to 8.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Trace every task and wait of every worker; off everywhere else, so that nothing pays for it."""
    from mpk import frontend
    from mpk.commands.bench import floor_ms
    from mpk.compiler import Compiler
    from mpk.simulate import page, perfetto, plot
    from mpk.simulate.measured import measured

    _check("--batch", batch, 1, 16)
    _check("--context", context, 1)
    _check("--steps", steps, 1)
    compiler = Compiler(target, tensor_parallel_size=tp, dtype=dtype, workers=workers, max_batch=batch)
    compiler.require_device()
    if png is not None:
        plot.require()
    check_outputs({"--output": output, "--html": html, "--png": png})
    loaded = frontend.load(model, shapes=True)
    plan = decode_plan.with_prompt(batch, context, steps, compiler.options.max_rows, compiler.target.prompt_least if tp == 1 else 0)
    if plan.context > loaded.config.max_context:
        raise RequestError(f"--context {context} and --steps {steps}", actual=f"{plan.context} tokens",
                           expected=f"at most {loaded.config.max_context} with the tokens that follow (the model's context)")
    engine, _ = build(compiler, loaded, quiet=json)
    graph = engine.graph
    instance = engine.create_instance(max_batch=batch, max_context=plan.context,
                                      trace_spans=4 * max(len(q) for q in graph.queues) * (plan.prompt_steps + steps)
                                      + 2 * engine.prompt_tasks(batch * context))
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, loaded.config.vocab_size, size=(batch, context))
    result = instance.generate(prompts, max_new_tokens=plan.new_tokens, stop_tokens=[])
    require_complete(result)
    timeline = measured(graph, instance.spans(), plan.prompt_steps, steps, devices=tp)
    with writing("--output", output):
        perfetto.write([timeline], output)
    if html is not None:
        title = f"{loaded.name} on {graph.target}, batch {batch}, context {context}"
        floor = floor_ms(loaded.config, dtype, compiler.target, tp, batch, context + steps // 2)
        with writing("--html", html):
            page.write_page([timeline], html, title=title, floor_ms=floor)
    if png is not None:
        with writing("--png", png):
            plot.write_png([timeline], png)
    report = {"model": loaded.name, "target": graph.target, "batch": batch, "context": context, "steps": steps, "tp": tp,
              "ms_per_token": timeline.duration_ns / steps / 1e6, "trace": str(output), "html": html and str(html), "png": png and str(png),
              **summarise(timeline)}
    if tp > 1:
        report["communication"] = communication.report(timeline)
    if json:
        print_json(report)
    else:
        _print(report)


def _check(option: str, value: int, least: int, most: int | None = None) -> None:
    if value < least or (most is not None and value > most):
        raise RequestError(f"{option} {value}", expected=f"{least} or more" if most is None else f"{least} to {most}")


def summarise(timeline: Timeline) -> dict[str, Any]:
    """Where the time of a step went, JSON-ready: see `analysis.OperatorTime` for what each figure of an operator says."""
    brought, _ = analysis.bytes_per_step(timeline)
    return {
        "in_tasks": round(analysis.in_tasks(timeline), 4),
        "idle": {name: round(share, 4) for name, share in analysis.shares(timeline).items()
                 if name not in [PHASES[phase] for phase in analysis.INSIDE]},
        "gb_s": round(brought * timeline.steps / max(timeline.duration_ns, 1), 2), "gb_s_of": analysis.traffic(timeline)[1],
        "per_operator": {
            row.name: {"kind": row.kind, "tasks": row.tasks, "task_us": round(row.task_us, 2), "run_us": round(row.run_us, 2),
                       "wait_us": round(row.before_us, 2), "waits_us": {PHASES[phase]: round(us, 2) for phase, us in row.wait_us.items()},
                       "active_us": round(row.active_us, 2), "bytes": row.bytes, "gb_s": round(row.gb_s, 2)}
            for row in analysis.per_operator(timeline)}}


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    files = ", ".join(str(report[key]) for key in ("trace", "html", "png") if report[key])
    console.print(f"{report['model']} on {report['target']}: {report['ms_per_token']:.3f} ms per token, workers are in tasks {report['in_tasks']:.1%} of it; see {files}", soft_wrap=True)
    table = Table("operator", "in tasks us", "wait us", "active us", "weights GB/s", box=None)
    for name, row in sorted(report["per_operator"].items(), key=lambda item: -item[1]["task_us"]):
        table.add_row(name, *(f"{row[key]:.1f}" for key in ("task_us", "wait_us", "active_us", "gb_s")))
    console.print(table)
    console.print("a step, all layers; of an average worker; active: while any worker is in a task of it", soft_wrap=True)
    if "communication" in report:
        c = report["communication"]
        console.print(f"{c['messages']} messages a step: {c['all_reduce_exposed_us']:.2f} us exposed a sum over ranks (median), {c['exposed_us_per_step']:.1f} us "
                      f"in all, {100 * c['hidden_share']:.0f} % of the time under way hidden", soft_wrap=True)
