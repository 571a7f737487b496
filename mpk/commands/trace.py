"""`mpk trace`: run a generation with the trace on, write a Perfetto file, print where the time went."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from mpk.commands.common import DEFAULT_MODEL, build, print_json

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
    json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Trace every task and wait of every worker; off everywhere else, so that nothing pays for it."""
    from mpk import frontend
    from mpk.compiler import Compiler
    from mpk.runtime.perfetto import write_trace

    loaded = frontend.load(model, shapes=True)
    engine, graph = build(Compiler(target, dtype=dtype, workers=workers, max_batch=max(1, batch)), loaded, quiet=json)
    longest_queue = max(len(q) for q in graph.queues)
    instance = engine.create_instance(max_batch=batch, max_context=context + steps + 1,
                                      trace_spans=4 * longest_queue * (steps + 1 + context // graph.max_rows + 1))
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, loaded.config.vocab_size, size=(batch, context))
    result = instance.generate(prompts, max_new_tokens=steps + 1, stop_tokens=[])
    spans = instance.spans()
    write_trace(graph, spans, output)
    report = {"model": loaded.name, "target": graph.target, "batch": batch, "context": context, "steps": steps,
              "ms_per_token": result.ms_per_token, "trace": str(output), **summarise(graph, spans)}
    if json:
        print_json(report)
    else:
        _print(report)


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
