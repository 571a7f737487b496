"""Run a graph's program under ThreadSanitizer, outside Python."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mpk.codegen import layout
from mpk.codegen.compile import build_library, find_compiler
from mpk.codegen.program import ProgramBuilder, ProgramSource
from mpk.runtime.engine import Engine
from mpk.runtime.group import ThreadGroupEngine
from mpk.runtime.request import SamplingOptions
from mpk.runtime.state import State
from tests.support.library import SOURCES

FLAGS = ("-std=c++17", "-O1", "-g", "-pthread", "-fsanitize=thread", "-Wno-tsan")
OPTIONS = "halt_on_error=0 exitcode=66 history_size=4"


@dataclass
class RaceRun:
    """`tokens`: generated tokens of every sequence; `races`: reports of data races."""

    tokens: list[list[int]]
    races: list[str]


def build_race_test(engine: Engine, folder: Path, source: ProgramSource | None = None) -> Path:
    """An executable that runs the engine's program (or another `source` of it) under the race detector."""
    given = source or ProgramBuilder(engine.graph).source()
    text = given.text + '\n#include "race_main.hpp"\n'
    out = folder / "race_test"
    build_library(find_compiler(), ProgramSource(text, (*given.include_dirs, SOURCES)), layout.header(), list(FLAGS), out)
    return out


def run_race_test(executable: Path, engine: Engine, prompts: list[list[int]], options: SamplingOptions, folder: Path,
                  *, max_context: int = 128) -> RaceRun:
    """Generate with the executable; skips the test where the sanitizer cannot run at all (kernel settings)."""
    dump = folder / "launch.bin"
    _dump(engine, prompts, options, max_context, dump)
    # Address space randomisation beyond what the sanitizer's shadow memory allows for makes it give up at the start.
    prefix = ["setarch", "-R"] if shutil.which("setarch") else []
    done = subprocess.run([*prefix, str(executable), str(dump)], capture_output=True, text=True, timeout=120, check=False,
                          env={**os.environ, "TSAN_OPTIONS": OPTIONS})
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    races = [part for part in done.stderr.split("==================") if "WARNING: ThreadSanitizer" in part]
    assert done.returncode == (66 if races else 0), done.stderr[:2000]
    return RaceRun([[int(t) for t in line.split()] for line in done.stdout.splitlines()], races)


def _dump(engine: Engine, prompts: list[list[int]], options: SamplingOptions, max_context: int, path: Path) -> None:
    shards = engine.shards if isinstance(engine, ThreadGroupEngine) else [engine.weights]
    fields = layout.dtype("Launch").fields
    assert fields is not None
    with path.open("wb") as file:
        file.write(np.array([len(shards), engine.graph.peer_bytes], np.int64).tobytes())
        for rank, weights in enumerate(shards):
            state = State(engine.graph, len(prompts), max_context, explicit=True)
            state.reset()
            for slot, prompt in enumerate(prompts):
                state.set_sequence(slot, np.array(prompt), options)
            arrays = state.arrays(engine.program.tables, weights)
            launch = state.launch(arrays, engine.program.scratch_bytes, 60.0)
            launch["rank"], launch["ranks"] = rank, len(shards)
            file.write(launch.tobytes())
            for name, array in arrays.items():
                if array is not None:
                    file.write(np.array([fields[name][1], array.nbytes], np.int64).tobytes() + array.tobytes())
            file.write(np.array([-1], np.int64).tobytes())
