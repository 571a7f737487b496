"""What several commands share: building an engine with a progress bar, printing JSON, and files that may not be writable."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpk.errors import ModelError, RequestError

if TYPE_CHECKING:
    from mpk.compiler import Compiler, Progress
    from mpk.graph.sm_task_graph import SMTaskGraph
    from mpk.runtime.engine import Engine
    from mpk.runtime.request import GenerateResult

DEFAULT_MODEL = "smollm2-135m-instruct"


def print_json(value: Any) -> None:
    """One JSON value on one line of standard output."""
    print(json.dumps(value), flush=True)


@contextmanager
def writing(what: str, path: Path, appends: bool = False) -> Iterator[None]:
    """Turns a failure to write `path` into a `RequestError` that names the option `what`. What is left of a file that could not be written
    whole (a full disk, an interrupt) is removed, unless what was there before still is (`appends`)."""
    try:
        yield
    except BaseException as error:
        if not appends and path.is_file():
            path.unlink()
        if not isinstance(error, OSError):
            raise
        remedy = "name a file where there is room" if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT) else "name a file in a folder that exists and can be written"
        raise RequestError(f"{what} {path} cannot be written ({error.strerror})", remedy=remedy) from error


def check_writable(what: str, path: Path) -> None:
    """Raise `RequestError` where `path` cannot be written, before long work is done for it; leaves no file behind."""
    new = not path.exists()
    with writing(what, path, appends=True):
        path.open("a").close()
        if new:
            path.unlink()


def check_outputs(files: Mapping[str, Path | None]) -> None:
    """`check_writable` for every option that names a file; two that name the same one are refused too (a device such as /dev/null is not)."""
    named = {option: path for option, path in files.items() if path is not None}
    first: dict[Path, str] = {}
    for option, path in named.items():
        check_writable(option, path)
        other = first.setdefault(path.resolve(), option)
        if other != option and (path.is_file() or not path.exists()):
            raise RequestError(f"{other} and {option} both name {path}", expected="a file each")


def require_complete(result: GenerateResult) -> None:
    """A run that was cut short is nothing to measure: raise KeyboardInterrupt again, which `generate` caught, or `ModelError`."""
    if "cancelled" in result.finish_reasons:
        raise KeyboardInterrupt
    if "error" in result.finish_reasons:
        raise ModelError("the logits of the model are not numbers", remedy="check its weights")


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Progress]:
    """A rich progress bar on standard error; yields the callback that moves it. Shows nothing when `quiet`."""
    if quiet or not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=max(total, 1))
            bar.update(tasks[what], completed=done, total=max(total, 1))

        yield report


def build(compiler: Compiler, model: Any, quiet: bool) -> tuple[Engine, SMTaskGraph]:
    """Lower and build, with a progress bar while compiling and packing."""
    with progress_bar(quiet) as report:
        report("lower the model to a task graph", 0, 1)
        graph = compiler.lower_model(model)
        report("lower the model to a task graph", 1, 1)
        return compiler.build(graph, progress=report), graph
