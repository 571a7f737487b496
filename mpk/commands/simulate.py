"""`mpk simulate`: predict a decode step on hardware that need not be there, and where its time goes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpk.commands.common import DEFAULT_MODEL, check_outputs, print_json, writing
from mpk.errors import RequestError, TargetError

if TYPE_CHECKING:
    from mpk.compiler import Compiler
    from mpk.frontend import LoadedModel
    from mpk.graph.sm_task_graph import SMTaskGraph
    from mpk.simulate.simulator import Simulation
    from mpk.simulate.timeline import Timeline


def command(
    model: Annotated[str, typer.Argument(help="A named shape such as Llama-3.1-8B, a config.json, a folder, or a GGUF file.")] = DEFAULT_MODEL,
    target: Annotated[str, typer.Option(help="Any target that `mpk targets` lists, or auto.")] = "auto",
    tp: Annotated[int, typer.Option(help="Devices that share the model (on cpp: groups of threads, which share its memory), 1 to 8.")] = 1,
    batch: Annotated[int, typer.Option(help="Sequences in the step, 1 to 16.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens before the step, of each sequence.")] = 512,
    workers: Annotated[int | None, typer.Option(help="Worker threads or SMs (default: all of the target).")] = None,
    dtype: Annotated[str, typer.Option(help="Type of weights and key-value cache: bf16 or f32.")] = "bf16",
    pipelining: Annotated[bool, typer.Option(help="Fetch weights ahead of events.")] = True,
    compare: Annotated[bool, typer.Option("--compare", help="Also one kernel per operator: eager, CUDA graph, fused.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the timeline as one self-contained page.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the timeline as a picture.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write the timeline for https://ui.perfetto.dev.")] = None,
) -> None:
    """Simulate consecutive decode steps of the very graph and streams that the program would run, and report the last one."""
    from mpk import frontend
    from mpk.compiler import Compiler

    outputs = {"--html": html, "--png": png, "--perfetto": perfetto}
    if png is not None:
        from mpk.simulate.plot import require

        require()
    check_outputs(outputs)
    if batch < 1 or batch > 16:
        raise RequestError(f"--batch {batch}", expected="1 to 16")
    loaded = frontend.load(model, shapes=True)
    most = loaded.config.max_context - 1  # the token of the step itself has a place too
    if not 1 <= context <= most:
        raise RequestError(f"--context {context}", expected=f"1 to {most} tokens before the step (the context of {loaded.name} is {most + 1})")
    compiler = Compiler(target, tensor_parallel_size=tp, dtype=dtype, workers=workers, max_batch=batch, enable_cross_op_pipelining=pipelining)
    require_room(compiler, loaded, tp, batch, context)
    started = time.perf_counter()
    graph = compiler.lower_model(loaded)
    lowered = time.perf_counter()
    simulation = run(compiler, graph, batch, context, tp)
    report = describe(simulation, loaded.name, lowered - started, time.perf_counter() - lowered)
    if compare:
        from mpk.simulate.baseline import compare as compare_models

        report["comparison"] = compare_models(simulation)
    if any(outputs.values()):
        title = f"{loaded.name} on {report['target']}, batch {batch}, context {context}" + (f", {tp} devices" if tp > 1 else "")
        write_timelines([simulation.timeline], html, png, perfetto, title, report["floor_us"] / 1e3)
    if json:
        print_json(report)
    else:
        _print(report)


def run(compiler: Compiler, graph: SMTaskGraph, batch: int, context: int, tp: int) -> Simulation:
    """The simulation of a graph that `compiler` lowered."""
    from mpk.simulate.simulator import simulate

    return simulate(graph, batch=batch, context=context, pipelining=compiler.enable_cross_op_pipelining, devices=tp)


def require_room(compiler: Compiler, loaded: LoadedModel, tp: int | None, batch: int, context: int) -> None:
    """Raise `TargetError` where weights and cache would not fit the target's memory. `tp`: None for a command without --tp."""
    from mpk.models.floor import floor_bytes

    config, capacity = loaded.config, compiler.target.capacity_gb.value
    table = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size * (2 if compiler.options.dtype == "bf16" else 4)
    needed = (floor_bytes(config, compiler.options.dtype, batch, context) + table) / (tp or 1) / 1e9
    if capacity and needed > capacity:
        raise TargetError(f"{loaded.name} on target {compiler.target.name}", expected=f"at most {capacity:g} GB on each device",
                          actual=f"{needed:.1f} GB of weights and cache" + (f" with --tp {tp}" if tp else ""),
                          remedy="use more devices (--tp) or a larger target" if tp else "use a larger target")


def describe(simulation: Simulation, name: str, lower_s: float, simulate_s: float) -> dict[str, Any]:
    """What `--json` prints."""
    from mpk.simulate.report import report

    return {"model": name, **report(simulation), "lower_seconds": round(lower_s, 2), "simulate_seconds": round(simulate_s, 2)}


def write_timelines(timelines: list[Timeline], html: Path | None, png: Path | None, perfetto: Path | None, title: str, floor_ms: float) -> None:
    """Write the pictures that were asked for."""
    if html is not None:
        from mpk.simulate.page import write_page

        with writing("--html", html):
            write_page(timelines, html, title=title, floor_ms=floor_ms)
    if png is not None:
        from mpk.simulate.plot import write_png

        with writing("--png", png):
            write_png(timelines, png)
    if perfetto is not None:
        from mpk.simulate.perfetto import write

        with writing("--perfetto", perfetto):
            write(timelines, perfetto)


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console, moved = Console(), report["memory_bytes"]
    devices = f", {report['devices']} devices" if report["devices"] > 1 else ""
    rate = report["tokens_per_second"]
    console.print(f"[bold]{report['model']}[/bold] on {report['target']}, {report['workers']} workers, batch {report['batch']}, context {report['context']}"
                  f"{devices}: [bold]{report['ms_per_token']:.3f} ms[/bold] a step "
                  f"(floor {report['floor_us'] / 1e3:.3f}, ratio {report['ratio']:.2f}), {f'{rate:.0f}' if rate >= 100 else f'{rate:.3g}'} tokens/s", soft_wrap=True)
    console.print(f"workers busy {_percent(report['utilisation'])}, memory busy {_percent(report['memory_utilisation'])}; idle: "
                  + ", ".join(f"{cause} {_percent(share)}" for cause, share in report["idle"].items() if share >= 0.0005), soft_wrap=True)
    console.print(f"device memory: {moved['total'] / 1e6:.1f} MB a step (weights {moved['weights'] / 1e6:.1f}, cache {moved['cache'] / 1e6:.1f}, "
                  f"activations {moved['activations'] / 1e6:.2f} = {_percent(report['activation_share'])})"
                  + (f"; communication overlapped {_percent(report['communication_overlap'])}" if report["devices"] > 1 else ""), highlight=False, soft_wrap=True)
    table = Table("critical path, us", *(c.replace("_", "-") for c in _COLUMNS), "all", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    rows = sorted(report["critical_path_us"].items(), key=lambda item: -sum(item[1].values()))
    for name, row in rows:
        table.add_row(name, *(f"{row.get(c, 0):.1f}" for c in _COLUMNS), f"{sum(row.values()):.1f}")
    table.add_row("all", *(f"{sum(r.get(c, 0) for _, r in rows):.1f}" for c in _COLUMNS), f"{sum(sum(r.values()) for _, r in rows):.1f}", style="bold")
    console.print(table)
    if "comparison" in report:
        _print_comparison(console, report["comparison"])
    console.print(f"{report['events_simulated']} events; lowered in {report['lower_seconds']:.1f} s, simulated in {report['simulate_seconds']:.1f} s; costs: "
                  f"{report['costs']}", highlight=False, soft_wrap=True)


_COLUMNS = ("run", "input", "weights", "hand_off", "publish", "peer")


def _print_comparison(console: Any, rows: list[dict[str, Any]]) -> None:
    console.print(f"{'execution model':18} kernels  ms a step  speed-up  MB a step  activations  memory busy  link overlapped", style="bold", highlight=False, soft_wrap=True)
    for r in rows:
        console.print(f"{r['model']:18} {r['kernels']:7}  {r['ms_per_token']:9.3f}  {r['speed_up']:8.2f}  {r['memory_bytes'] / 1e6:9.1f}  "
                      f"{_percent(r['activation_share']):>11}  {_percent(r['memory_utilisation']):>11}  {_percent(r['communication_overlap']):>15}",
                      highlight=False, soft_wrap=True)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
