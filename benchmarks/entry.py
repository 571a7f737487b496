"""How every benchmark starts: a wrong input or a missing GPU is one line on standard error and exit code 1, as of the command `mpk`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from mpk import settings
from mpk.errors import RequestError, TargetError, UserError
from mpk.runtime import cuda_device
from mpk.targets import hardware


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a benchmark's `main` and exit; MPK_DEBUG=1 shows the traceback of what was refused."""
    try:
        sys.exit(main())
    except (UserError, subprocess.CalledProcessError) as error:  # a process that failed has said why itself
        if settings.debug():
            raise
        sys.exit(f"{Path(sys.argv[0]).stem}: {error}")


def require_least(options: argparse.Namespace, **least: int) -> None:
    """Raise `RequestError` for an option below its least value; an option may be a list."""
    for name, bound in least.items():
        given = getattr(options, name)
        for value in given if isinstance(given, list) else [given]:
            if value < bound:
                raise RequestError(name.replace("_", "-"), expected=f"{bound} or more", actual=str(value))


def require_gpus(count: int = 1, target: str = "h200") -> None:
    """Raise `TargetError` where there are fewer GPUs: said at once, not behind minutes of compiling."""
    described = hardware.load(target)
    hardware.require_device(described)
    if described.backend != "cuda":
        raise TargetError(f"target {target}", expected="a target for GPUs")
    if (found := cuda_device.device_count()) < count:
        raise TargetError("this machine", expected=f"{count} GPUs", actual=str(found))


def shape_and_ranks(text: str) -> tuple[str, int]:
    """Both parts of SHAPE[:RANKS]."""
    name, colon, ranks = text.partition(":")
    if colon and not (ranks.isdecimal() and int(ranks)):
        raise RequestError(f"'{text}'", expected="SHAPE or SHAPE:RANKS, with 1 or more ranks")
    return name, int(ranks or 1)
