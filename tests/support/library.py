"""Calls C++ headers of the project from Python: compiles a source of `tests/cpp` into a library."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from mpk.codegen.compile import compile_program
from mpk.codegen.program import BACKEND, ProgramSource

SOURCES = Path(__file__).parent.parent / "cpp"
TASKS = BACKEND.parent.parent / "tasks"


def load_library(name: str, *, portable: bool = False) -> ctypes.CDLL:
    """The compiled `tests/cpp/<name>.cpp`."""
    source = ProgramSource((SOURCES / f"{name}.cpp").read_text(), (BACKEND / "include", TASKS))
    return ctypes.CDLL(str(compile_program(source, portable=portable)))


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    """Address of a contiguous array, for a C call; the array lives as long as the result."""
    assert array.flags.c_contiguous
    out = ctypes.c_void_p(array.__array_interface__["data"][0])
    out.array = array  # type: ignore[attr-defined]
    return out
