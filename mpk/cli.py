"""The command line: `mpk generate`, `bench`, `inspect`, `verify`, `trace`, `targets`. Each command is one file in `mpk.commands`.

A `UserError` is printed as one line and ends with exit code 1; a stalled program with exit code 3.
"""

from __future__ import annotations

import sys

import typer

from mpk import settings
from mpk.commands import bench, generate, inspect, targets, trace, verify
from mpk.errors import StallError, UserError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="Run transformers as one persistent program: an SM-level task graph with static schedules and events.")
app.command("generate")(generate.command)
app.command("bench")(bench.command)
app.command("inspect")(inspect.command)
app.command("verify")(verify.command)
app.command("trace")(trace.command)
app.command("targets")(targets.command)


def main() -> None:
    """Entry point; never shows a traceback for a wrong input (set MPK_DEBUG=1 to see it)."""
    try:
        app()
    except UserError as error:
        if settings.debug():
            raise
        print(f"mpk: {error}", file=sys.stderr)
        sys.exit(1)
    except StallError as error:
        print(f"mpk: {error}", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main()
