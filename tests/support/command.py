"""Commands run in this process: a process of its own takes a second to start."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from mpk.commands.app import app
from mpk.errors import UserError


def run_json(*arguments: str) -> Any:
    """What a command prints with --json."""
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def refused(*arguments: str) -> str:
    """The line with which a command refuses its arguments."""
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, UserError), done.output
    return str(done.exception)
