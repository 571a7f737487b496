"""The simulator's inner loop, compiled once by the project's own compiler and cache: millions of events a step are too many for Python."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np

from mpk.codegen.compile import compile_program
from mpk.codegen.program import ProgramSource
from mpk.errors import GraphError, InternalError
from mpk.runtime.memory import address
from mpk.simulate.program import MACHINE, RECORD, TASK, Program

SOURCE = f"""#include "core.hpp"
using namespace mpk::simulate;
static_assert(sizeof(Task) == {TASK.itemsize} && sizeof(Machine) == {MACHINE.itemsize} && sizeof(Record) == {RECORD.itemsize}, "layout differs from Python's");
extern "C" __attribute__((visibility("default"))) int64_t mpk_simulate(const Machine* machine, const Task* tasks, const int32_t* begin, const int32_t* waits,
    const int32_t* signals, const int32_t* thresholds, const int32_t* via, const double* shares, Record* records, int64_t* events) {{
  Simulator simulator(*machine, tasks, begin, waits, signals, thresholds, via, shares, records);
  const int64_t done = simulator.run();
  *events = simulator.events();
  return done;
}}
"""


@cache
def _library() -> ctypes.CDLL:
    path = compile_program(ProgramSource(SOURCE, (Path(__file__).parent,)))
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise InternalError(f"the compiled simulator {path} cannot be loaded: {error}") from error
    library.mpk_simulate.argtypes, library.mpk_simulate.restype = [ctypes.c_void_p] * 10, ctypes.c_int64
    return library


def run(program: Program) -> tuple[np.ndarray, int]:
    """Records (RECORD [steps, tasks in queue order], picoseconds, -1: did not happen) and the number of events simulated.

    Raises `GraphError` for a schedule that hangs, `TargetError` if there is no C++ compiler.
    """
    steps, count = int(program.machine["steps"][0]), len(program.tasks)
    records = np.zeros((steps, count), RECORD)
    records["load_begun"] = records["load_ended"] = records["published"] = records["cause"] = records["sent"] = -1
    events = np.zeros(1, np.int64)
    arrays = (program.machine, program.tasks, program.begin, program.waits, program.signals, program.thresholds, program.via, program.shares, records, events)
    done = int(_library().mpk_simulate(*(address(a) for a in arrays)))
    if done != steps * count:
        step, place = (int(i) for i in np.argwhere(records["published"] < 0)[0])
        raise GraphError(f"the schedule hangs: {done} of {steps * count} tasks ended, task {program.ids[place]} of step {step + 1} did not",
                         remedy="mpk verify names the fault")
    return records, int(events[0])
