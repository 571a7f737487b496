"""The application: `mpk generate`, `bench`, `inspect`, `verify`, `simulate`, `tune`, `trace`, `targets`. Each command is one file beside this one."""

from __future__ import annotations

from typing import Annotated

import typer

from mpk import __version__
from mpk.commands import bench, generate, inspect, simulate, targets, trace, tune, verify

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"mpk {__version__}")
        raise typer.Exit


@app.callback()
def options(version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False) -> None:
    """Run transformers as one persistent program: an SM-level task graph with static schedules and events."""


app.command("generate")(generate.command)
app.command("bench")(bench.command)
app.command("inspect")(inspect.command)
app.command("verify")(verify.command)
app.command("simulate")(simulate.command)
app.command("tune")(tune.command)
app.command("trace")(trace.command)
app.command("targets")(targets.command)
