"""Entry point of the command `mpk`; the commands themselves are files in `mpk.commands`.

Exit codes: 1 for a `UserError` or output that cannot be written (one line on standard error), 2 for unknown options, 3 for a stalled
program, 130 after an interrupt, 141 when the reader of a pipe has left. Nothing heavy is imported outside `main`, so that an interrupt
while importing ends cleanly too.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE, which Python ignores


def main() -> None:
    """Run the command line and exit; no traceback for a wrong input (set MPK_DEBUG=1 to see it) or an interrupt."""
    try:
        code = _run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        _let_interrupts_kill()
    sys.exit(code)


def _run() -> int:
    """Run the command and flush its output; returns the exit code."""
    if sys.stderr is None:  # closed by the caller
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - lives as long as the process
    if sys.stdout is None:
        return _say("standard output is closed; redirect it to a file or to /dev/null", 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character gets its number
    output = _Output(sys.stdout)
    sys.stdout = output
    code = 1
    try:
        code = _command()
        output.flush()
    except OSError:
        if output.failure is None:
            raise
    finally:
        output.close_if_failed()
    if output.failure is None:
        return code
    if isinstance(output.failure, BrokenPipeError):  # the reader has had enough
        return code if code > 1 else BROKEN_PIPE
    return _say(f"standard output cannot be written ({output.failure.strerror})", code or 1)


def _command() -> int:
    """Import the application and run it; returns the exit code of whatever ended it."""
    from mpk import settings
    from mpk.errors import StallError, UserError

    try:
        from mpk.commands.app import app

        app()
    except SystemExit as stop:  # how the application ends
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except UserError as error:
        if settings.debug():
            raise
        return _say(str(error), 1)
    except StallError as error:
        return _say(str(error), 3)
    return 0


def _say(line: str, code: int) -> int:
    with contextlib.suppress(OSError):  # nowhere left to say it: the exit code tells
        print(f"mpk: {line}", file=sys.stderr)
    return code


class _Output:
    """Standard output that remembers why it could not be written."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return int(self.stream.write(text))
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self.failure = error
            raise

    def close_if_failed(self) -> None:
        """Drop what is in the buffer of a stream that failed, or Python would complain again when it exits."""
        if self.failure is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _let_interrupts_kill() -> None:
    """A second interrupt, while Python shuts down, ends the process at once instead of with a traceback."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
