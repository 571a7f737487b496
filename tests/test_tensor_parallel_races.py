"""ThreadSanitizer on two ranks of a real graph: messages, sampling on both, a host that polls."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpk.codegen.program import ProgramBuilder, ProgramSource
from mpk.runtime.engine import Engine
from mpk.runtime.request import SamplingOptions
from tests.support.race import build_race_test, run_race_test
from tests.test_shard import config
from tests.test_tensor_parallel import build

PROMPTS = [[1, 2, 5], [7] * 20, [9]]
OPTIONS = SamplingOptions(max_new_tokens=10, temperature=0.8, top_k=40, top_p=0.95, repetition_penalty=1.1, seed=5)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield build(config(hidden=64, intermediate=128, vocab=131), 2, 2 * 4 * 64.0)  # more than 2 rows: two shots


def test_ranks_have_no_race(engine: Engine, tmp_path: Path) -> None:
    run = run_race_test(build_race_test(engine, tmp_path), engine, PROMPTS, OPTIONS, tmp_path, max_context=64)
    assert run.races == []
    given = {k: v for k, v in vars(OPTIONS).items() if k not in ("stop_tokens", "logprobs")}
    assert run.tokens == engine.create_instance(max_context=64).generate(PROMPTS, stop_tokens=[], **given).tokens


def test_words_that_are_not_stored_whole_are_found(engine: Engine, tmp_path: Path) -> None:
    given = ProgramBuilder(engine.graph).source()
    include = tmp_path / "include"
    shutil.copytree(given.include_dirs[0], include)
    header = include / "mpk" / "peer.hpp"
    text = header.read_text()
    stored = "__atomic_store_n(words + j, uint64_t(flag_) << 32 | bits, __ATOMIC_RELEASE);"
    assert text.count(stored) == 1
    header.write_text(text.replace(stored, "words[j] = uint64_t(flag_) << 32 | bits;"))
    executable = build_race_test(engine, tmp_path, ProgramSource(given.text, (include, *given.include_dirs[1:])))
    run = run_race_test(executable, engine, PROMPTS, OPTIONS, tmp_path, max_context=64)
    assert any("data race" in race and "receive" in race for race in run.races)
