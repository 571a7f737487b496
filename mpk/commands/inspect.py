"""`mpk inspect`: what a model becomes on a target: operators, tasks, events, bytes, memory plan, pictures."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpk import settings
from mpk.commands.common import DEFAULT_MODEL, check_outputs, print_json, writing
from mpk.errors import RequestError
from mpk.targets import hardware

if TYPE_CHECKING:
    from mpk.graph.sm_task_graph import SMTaskGraph


def command(
    model: Annotated[str, typer.Argument(help="A folder, a GGUF file, a named shape such as Llama-3.1-8B, or a config.json.")] = DEFAULT_MODEL,
    target: Annotated[str, typer.Option(help="Target to lower for (see `mpk targets`).")] = "auto",
    dtype: Annotated[str, typer.Option(help="Type of weights and key-value cache: bf16 or f32.")] = "bf16",
    workers: Annotated[int | None, typer.Option(help="Worker threads or SMs (default: all of the target).")] = None,
    tp: Annotated[int, typer.Option(help="Devices that share the model (on cpp: groups of threads), 1 to 8.")] = 1,
    save: Annotated[Path | None, typer.Option(help="Write the task graph to this file (for `mpk verify`).")] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the task graph as text, a line for each task and event.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Write a picture (SVG) of one layer's graph to this file.")] = None,
    schedule: Annotated[Path | None, typer.Option(help="Write a picture (SVG) of the whole schedule to this file.")] = None,
    layer: Annotated[int | None, typer.Option(help="Layer that --picture shows (default 0; -1: what is outside the layers).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Lower a model (without reading its weights) and report the graph."""
    from mpk import frontend
    from mpk.compiler import Compiler
    from mpk.graph import draw

    if json and text:
        raise RequestError("--json and --text", expected="only one of them")
    if layer is not None and picture is None:
        raise RequestError(f"--layer {layer} without --picture", remedy="name the file of the picture with --picture")
    check_outputs({"--save": save, "--picture": picture, "--schedule": schedule})
    compiler = Compiler(target, tensor_parallel_size=tp, dtype=dtype, workers=workers)
    loaded = frontend.load(model, shapes=True)
    started = time.perf_counter()
    graph = compiler.lower_model(loaded)
    report = describe(graph, loaded.name, time.perf_counter() - started)
    if save is not None:
        with writing("--save", save):
            graph.save(str(save))
    if picture is not None:
        _write("--picture", picture, draw.layer_svg(graph, layer or 0))
    if schedule is not None:
        _write("--schedule", schedule, draw.schedule_svg(graph))
    if json:
        print_json(report)
    elif text:
        print(graph.to_text(), end="")
    else:
        _print(report)


def _write(option: str, path: Path, text: str) -> None:
    with writing(option, path):
        path.write_text(text, encoding="utf-8")


def describe(graph: SMTaskGraph, name: str, seconds: float) -> dict[str, Any]:
    """Everything `mpk inspect` reports, as one JSON-ready dictionary. Sizes in bytes."""
    operators = Counter(op.kind for op in graph.tensor_graph.operators)
    cache = [b for b in graph.buffers.values() if b.kind == "cache"]
    return {
        "model": name, "target": graph.target, "dtype": graph.dtype, "max_rows": graph.max_rows, **graph.statistics(),
        "operators_per_kind": dict(operators),
        "events_before_fusion": graph.events_before_fusion,
        "packed_weight_bytes": graph.weight_bytes,
        "activation_bytes": sum(b.row_bytes * (1 if b.rows == "step" else graph.max_rows)
                                for b in graph.buffers.values() if b.kind == "activation"),
        "cache_bytes_per_token": sum(b.row_bytes for b in cache),
        "capacity_bytes": round(hardware.load(graph.target).capacity_gb.value * 1e9) or None,  # of a device; None: of the machine at hand
        "passes": graph.notes,
        "memory": {name: {"offset": a.offset, "bytes": a.size} for name, a in list(graph.arena.items())},
        "lower_seconds": round(seconds, 3),
    }


def _state() -> str:
    last = settings.stop_after()
    return "lowered and verified" if last in (None, "verify") else f"lowered up to {last}, not verified,"


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"[bold]{report['model']}[/bold] on {report['target']}, {report['workers']} workers, {report['dtype']}, "
                  f"{_state()} in {report['lower_seconds']:.2f} s", soft_wrap=True)
    table = Table("kind", "operators", "tasks", box=None)
    for kind, count in report["operators_per_kind"].items():
        table.add_row(kind, str(count), str(report["tasks_per_kind"].get(kind, 0)))
    table.add_row("all", str(report["operators"]), str(report["tasks"]))
    console.print(table)
    if report["ranks"] > 1:
        console.print(f"{'ranks':14} {report['ranks']}, each with these tasks and its part of the weights, {report['peer_bytes'] / 1e6:.1f} MB for messages", soft_wrap=True)
    rows = [
        ("events", f"{report['events']} (before fusion {report['events_before_fusion']}), {report['signals']} signals, "
                   f"{report['waits']} waits"),
        ("critical path", f"{report['critical_path_tasks']} tasks"),
        ("weights", f"{report['packed_weight_bytes'] / 1e6:.1f} MB packed"),
        ("activations", f"{report['activation_bytes'] / 1e6:.1f} MB in an arena of {report['arena_bytes'] / 1e6:.1f} MB "
                        f"({report['max_rows']} rows)"),
        ("cache", f"{report['cache_bytes_per_token']} bytes a token"),
    ]
    needed, capacity = report["packed_weight_bytes"] + report["arena_bytes"], report["capacity_bytes"]
    if capacity is not None and needed > capacity:
        rows.append(("does not fit", f"{needed / 1e9:.1f} GB of weights and activations on a device of {capacity / 1e9:g} GB: more devices (--tp) or a larger target"))
    for key, value in rows:
        console.print(f"{key:14} {value}", soft_wrap=True)
    for note in report["passes"]:
        console.print(f"  {note}", highlight=False, soft_wrap=True)
