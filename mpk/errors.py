"""The two kinds of error: the user's (`UserError`, one line that says what, where, and what would work) and ours.

Every refusal of an input is a `UserError`; the command line prints it as one line and leaves with exit code 1.
`InternalError` marks a broken promise inside mpk (a pass that yields an invalid graph, say) and asks for a report.
"""

from __future__ import annotations


class UserError(ValueError):
    """A wrong input, refused before anything runs.

    `subject` names the object at fault, `expected` what it had to be, `actual` what it is, `remedy` what would work.
    """

    def __init__(self, subject: str, *, expected: str = "", actual: str = "", remedy: str = "") -> None:
        parts = [subject]
        if expected:
            parts.append(f"expected {expected}")
        if actual:
            parts.append(f"got {actual}")
        line = ", ".join(parts)
        if remedy:
            line += f"; {remedy}"
        super().__init__(line.replace("\n", " "))
        self.subject, self.expected, self.actual, self.remedy = subject, expected, actual, remedy


class ModelError(UserError):
    """The model cannot be used: unknown architecture or option, tensor missing, of another shape, or damaged."""


class RequestError(UserError):
    """A call cannot be served: empty prompt, token out of range, beyond the context, batch too large."""


class TargetError(UserError):
    """The hardware or tool chain is not there or not large enough: no compiler, no such device, too little memory."""


class GraphError(UserError):
    """A saved graph is not valid: damaged file, another version, or a schedule that the verifier refuses."""


class StallError(RuntimeError):
    """The persistent program made no progress for the set time; the text says which worker waits for what."""


class InternalError(RuntimeError):
    """A promise inside mpk was broken; not the user's fault."""
