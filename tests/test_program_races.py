"""ThreadSanitizer on the whole program: workers, events, sampling, feedback, and a host that polls."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpk.codegen.program import ProgramBuilder, ProgramSource
from mpk.runtime.engine import Engine, Program
from mpk.runtime.request import SamplingOptions
from tests.support.race import build_race_test, run_race_test
from tests.support.toy import toy_graph
from tests.support.toy_engine import toy_engine, toy_kinds

PROMPTS = [[1, 2, 5], [7] * 20, [9]]
OPTIONS = SamplingOptions(max_new_tokens=16, temperature=0.8, top_k=40, top_p=0.95, repetition_penalty=1.1, seed=5, logprobs=3)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with toy_kinds(tmp_path_factory.mktemp("cache")):
        yield toy_engine(toy_graph(workers=3))


@pytest.fixture(scope="module")
def executable(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_race_test(engine, tmp_path_factory.mktemp("race"))


def test_a_generation_of_16_tokens_has_no_race(engine: Engine, executable: Path, tmp_path: Path) -> None:
    run = run_race_test(executable, engine, PROMPTS, OPTIONS, tmp_path)
    assert run.races == []
    expected = engine.create_instance().generate(PROMPTS, stop_tokens=[], **{k: v for k, v in vars(OPTIONS).items() if k != "stop_tokens"})
    assert run.tokens == expected.tokens
    assert [len(t) for t in run.tokens] == [16, 16, 16]


def test_a_dropped_wait_is_found(engine: Engine, executable: Path, tmp_path: Path) -> None:
    graph = toy_graph(workers=3)
    reader = next(t for t in graph.tasks if t.kind == "sample")
    reader.waits = ()
    graph.param_offsets = engine.graph.param_offsets
    broken = Engine(graph, Program(engine.program.library, ProgramBuilder(graph).tables(), engine.program.scratch_bytes), engine.weights)
    run = run_race_test(executable, broken, PROMPTS, OPTIONS, tmp_path)
    assert any("data race" in race and "sample" in race for race in run.races)


def test_a_signal_without_release_order_is_found(engine: Engine, tmp_path: Path) -> None:
    given = ProgramBuilder(engine.graph).source()
    include = tmp_path / "include"
    shutil.copytree(given.include_dirs[0], include)
    header = include / "mpk" / "event.hpp"
    text = header.read_text()
    assert text.count("fetch_add(amount, std::memory_order_release)") == 1
    header.write_text(text.replace("fetch_add(amount, std::memory_order_release)", "fetch_add(amount, std::memory_order_relaxed)"))
    executable = build_race_test(engine, tmp_path, ProgramSource(given.text, (include, *given.include_dirs[1:])))
    run = run_race_test(executable, engine, PROMPTS, OPTIONS, tmp_path)
    assert any("data race" in race for race in run.races)
