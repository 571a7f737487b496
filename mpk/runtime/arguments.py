"""Checks on the types and ranges of the arguments that make compilers and instances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpk.codegen import layout
from mpk.errors import RequestError
from mpk.runtime.memory import available_bytes
from mpk.runtime.request import number, whole
from mpk.runtime.state import MEMORY_SHARE, gib

MAX_STALL_LIMIT_S = 1e9  # nanoseconds must fit 64 bits


def require_whole(name: str, value: Any, *, optional: bool = True) -> None:
    """Raise `RequestError` unless the value is a whole number (or None, where that is allowed)."""
    if not whole(value) and not (optional and value is None):
        raise RequestError(name, expected="a whole number" + (" or None" if optional else ""), actual=repr(value))


def require_bool(name: str, value: Any) -> None:
    """Raise `RequestError` unless the value is True or False: a text such as "no" would count as true."""
    if not isinstance(value, bool):
        raise RequestError(name, expected="True or False", actual=repr(value))


def check_instance_arguments(max_batch: Any, max_context: Any, device_ids: Any, stall_limit_s: Any, trace_spans: Any, workers: int) -> None:
    """Raise `RequestError` for arguments of `create_instance` of a wrong type, and for times and traces that no machine can serve."""
    require_whole("max_batch", max_batch)
    require_whole("max_context", max_context)
    require_whole("trace_spans", trace_spans, optional=False)
    if device_ids is not None and not (isinstance(device_ids, Sequence) and not isinstance(device_ids, str) and all(map(whole, device_ids))):
        raise RequestError("device_ids", expected="None or a list of whole numbers", actual=repr(device_ids))
    if not number(stall_limit_s) or not 0 < stall_limit_s <= MAX_STALL_LIMIT_S:
        raise RequestError("stall_limit_s", expected=f"a time above 0 up to {MAX_STALL_LIMIT_S:g} s", actual=repr(stall_limit_s))
    if trace_spans < 0:
        raise RequestError("trace_spans", expected="0 (off) or more spans a worker", actual=str(trace_spans))
    size = int(trace_spans) * workers * layout.dtype("Span").itemsize
    available = available_bytes()
    if available is not None and size > available * MEMORY_SHARE:
        raise RequestError(f"trace_spans {trace_spans}: {gib(size)} for {workers} workers",
                           expected=f"at most {MEMORY_SHARE:.0%} of the {gib(available)} available", remedy="fewer spans a worker")
