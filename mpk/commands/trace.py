"""`mpk trace`: run a generation with the trace on, write a Perfetto file, print where the time went."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from mpk.commands import communication, decode_plan
from mpk.commands.common import DEFAULT_MODEL, build, check_writable, print_json, require_complete, writing
from mpk.errors import InternalError, RequestError
from mpk.runtime.perfetto import RUN

if TYPE_CHECKING:
    from mpk.graph.sm_task_graph import SMTaskGraph


def command(
    model: Annotated[str, typer.Argument(help="A folder, a GGUF file, a named shape, or a config.json.")] = DEFAULT_MODEL,
    output: Annotated[Path, typer.Option("--output", "-o", help="File for https://ui.perfetto.dev (trace event JSON).")] = Path("trace.json"),
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
    from mpk.compiler import Compiler
    from mpk.runtime.perfetto import write_trace

    _check("--batch", batch, 1, 16)
    _check("--context", context, 1)
    _check("--steps", steps, 1)
    compiler = Compiler(target, tensor_parallel_size=tp, dtype=dtype, workers=workers, max_batch=batch)
    compiler.require_device()
    check_writable("--output", output)
    loaded = frontend.load(model, shapes=True)
    plan = decode_plan.with_prompt(batch, context, steps, compiler.options.max_rows)
    if plan.context > loaded.config.max_context:
        raise RequestError(f"--context {context} and --steps {steps}", actual=f"{plan.context} tokens",
                           expected=f"at most {loaded.config.max_context} with the tokens that follow (the model's context)")
    engine, graph = build(compiler, loaded, quiet=json)
    instance = engine.create_instance(max_batch=batch, max_context=plan.context,
                                      trace_spans=4 * max(len(q) for q in graph.queues) * (plan.prompt_steps + steps))
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, loaded.config.vocab_size, size=(batch, context))
    result = instance.generate(prompts, max_new_tokens=plan.new_tokens, stop_tokens=[])
    require_complete(result)
    ranks, ms = windows(graph, instance.spans(), plan.prompt_steps, steps)
    with writing("--output", output):
        write_trace(graph, ranks, output)
    spans = [worker for rank in ranks for worker in rank]
    report = {"model": loaded.name, "target": graph.target, "batch": batch, "context": context, "steps": steps,
              "tp": tp, "ms_per_token": ms / steps, "trace": str(output), **summarise(graph, spans)}
    if graph.ranks > 1:
        report["communication"] = communication.report(graph, ranks)
    if json:
        print_json(report)
    else:
        _print(report)


def _check(option: str, value: int, least: int, most: int | None = None) -> None:
    if value < least or (most is not None and value > most):
        raise RequestError(f"{option} {value}", expected=f"{least} or more" if most is None else f"{least} to {most}")


def windows(graph: SMTaskGraph, spans: list[np.ndarray], first: int, steps: int) -> tuple[list[list[np.ndarray]], float]:
    """`window` of every rank, whose clocks may differ, and the milliseconds of rank 0."""
    workers = graph.num_workers
    found = [window(graph, spans[rank * workers : (rank + 1) * workers], first, steps) for rank in range(graph.ranks)]
    return [kept for kept, _ in found], found[0][1]


def window(graph: SMTaskGraph, spans: list[np.ndarray], first: int, steps: int) -> tuple[list[np.ndarray], float]:
    """The spans of the last `steps` steps, which come behind `first` others, and how many milliseconds these took.

    A step lasts from the end of one `advance` to the end of the next; waits that began before the window are cut at its beginning.
    """
    closing = np.array([t.kind == "advance" for t in graph.tasks])
    ends = np.sort(np.concatenate([w["end_ns"][closing[w["task"]] & (w["phase"] == RUN)] for w in spans]))
    if len(ends) != first + steps:
        raise InternalError(f"the trace holds {len(ends)} steps, expected {first + steps}")
    begin, end = int(ends[first - 1]), int(ends[first + steps - 1])
    kept = [w[(w["end_ns"] > begin) & (w["begin_ns"] < end)] for w in spans]
    for worker in kept:
        worker["begin_ns"] = np.maximum(worker["begin_ns"], begin)
        worker["end_ns"] = np.minimum(worker["end_ns"], end)
    return kept, (end - begin) / 1e6


def summarise(graph: SMTaskGraph, spans: list[np.ndarray]) -> dict[str, Any]:
    """Microseconds per worker that each kind of task ran and waited, and bytes of weights per second while it ran."""
    run: dict[str, float] = defaultdict(float)
    wait: dict[str, float] = defaultdict(float)
    moved: dict[str, int] = defaultdict(int)
    for worker in spans:
        for span in worker:
            task = graph.tasks[int(span["task"])]
            took = float(span["end_ns"] - span["begin_ns"]) / 1e3
            name = graph.operator(task).name.split(".")[-1]
            if span["phase"] == 0:
                run[name] += took
                moved[name] += task.cost.weight_bytes
            else:
                wait[name] += took
    workers = max(1, len(spans))
    return {"per_operator": {
        name: {"run_us": round(run[name] / workers, 1), "wait_us": round(wait[name] / workers, 1),
               "gb_s": round(moved[name] / (run[name] / workers * 1e3), 2) if run[name] else 0.0}
        for name in run}}


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{report['model']} on {report['target']}: {report['ms_per_token']:.3f} ms per token, trace in {report['trace']}")
    table = Table("operator", "run us", "wait us", "weights GB/s", box=None)
    for name, row in sorted(report["per_operator"].items(), key=lambda item: -item[1]["run_us"]):
        table.add_row(name, f"{row['run_us']:.1f}", f"{row['wait_us']:.1f}", f"{row['gb_s']:.1f}")
    console.print(table)
    if "communication" in report:
        c = report["communication"]
        console.print(f"{c['messages']} messages a step: {c['all_reduce_exposed_us']:.2f} us exposed a sum over ranks (median), {c['exposed_us_per_step']:.1f} us "
                      f"in all, {100 * c['hidden_share']:.0f} % of the time under way hidden")
