"""How `advance` plans steps, appends tokens and manages pages, one step at a time without workers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from mpk.codegen.layout import FINISH
from mpk.codegen.program import Tables
from mpk.codegen.weights import PackedWeights
from mpk.runtime.request import SamplingOptions
from mpk.runtime.state import State, pages_for
from mpk.tasks.advance.cases import CASES
from mpk.tasks.advance.reference import PlannedSequence, plan
from tests.support.library import load_library, pointer
from tests.support.toy import toy_graph
from tests.support.toy_engine import toy_kinds

EMPTY = np.zeros(0, np.uint8)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    with toy_kinds(tmp_path_factory.mktemp("cache")):
        yield load_library("plan_test")


class Steps:
    """Sequences of given prompt lengths (token ids = positions), stepped by hand."""

    def __init__(self, library: ctypes.CDLL, prompts: tuple[int, ...], new: tuple[int, ...], max_rows: int, all_logits: bool = False) -> None:
        graph = toy_graph(vocab=1000, max_rows=max_rows, max_batch=len(prompts))
        self.library, self.state, self.choice = library, State(graph, len(prompts), 512, explicit=True), np.zeros(len(prompts), np.int32)
        self.state.reset()
        for slot, (length, count) in enumerate(zip(prompts, new, strict=True)):
            self.state.set_sequence(slot, np.arange(length), SamplingOptions(max_new_tokens=count, stop_tokens=(999,)), all_logits)
        self.arrays = self.state.arrays(Tables(EMPTY, EMPTY, EMPTY, EMPTY, EMPTY), PackedWeights(EMPTY, EMPTY, None))  # type: ignore[arg-type]
        self.arrays["arena"] = self.choice
        self.launch = self.state.launch(self.arrays, 0, 1.0)
        library.plan_step(pointer(self.launch))

    @property
    def step(self) -> SimpleNamespace:
        s, rows = self.state.step[0], int(self.state.step[0]["rows"])
        names = ("row_token", "row_slot", "row_position")
        return SimpleNamespace(number=int(s["number"]), done=int(s["done"]), rows=rows,
                               segments=[tuple(int(v) for v in seg) for seg in self.state.segments[: s["segments"]]],
                               logit_rows=self.state.rows["logit_row"][: s["logit_rows"]].tolist(),
                               **{n: self.state.rows[n][:rows].tolist() for n in names})

    def advance(self, tokens: int | list[int]) -> None:
        """End the step; every sequence with logits gets the token (its entry of the list)."""
        self.choice[:] = tokens
        self.library.advance(pointer(self.launch))

    def expected(self) -> tuple[list[tuple[int, int, int, int]], list[int]]:
        sequences = [PlannedSequence(int(s["length"]), int(s["computed"]), bool(s["all_logits"]), bool(s["finish"] == 0))
                     for s in self.state.sequences]
        return plan(sequences, len(self.state.segments))

    def pages_in_use(self) -> int:
        return self.state.num_pages - int(self.state.free_page_count[0])


@pytest.mark.parametrize(("prompts", "new", "max_rows"), CASES)
def test_every_step_is_planned_as_stated(library: ctypes.CDLL, prompts: tuple[int, ...], new: tuple[int, ...], max_rows: int) -> None:
    steps = Steps(library, prompts, new, max_rows)
    computed = 0
    while not steps.step.done:
        step = steps.step
        assert (step.segments, step.logit_rows) == steps.expected()
        rows = [(slot, position + r) for slot, _, count, position in step.segments for r in range(count)]
        assert list(zip(step.row_slot, step.row_position, strict=True)) == rows
        assert step.row_token == [int(steps.state.tokens[s, p]) for s, p in rows]
        held = [pages_for(position + count) for _, _, count, position in step.segments]
        assert steps.pages_in_use() >= sum(held)
        assert 0 < step.rows <= max_rows
        computed += step.rows
        steps.advance(500)
    assert computed == sum(p + n - 1 for p, n in zip(prompts, new, strict=True))  # every token but the last of each, once
    assert steps.state.sequences["finish"].tolist() == [FINISH["length"]] * len(prompts)
    assert steps.pages_in_use() == 0
    assert sorted(steps.state.free_pages.tolist()) == list(range(steps.state.num_pages))


def test_decode_rows_come_before_prompt_chunks(library: ctypes.CDLL) -> None:
    steps = Steps(library, (10, 1, 9), (3, 3, 3), 8)
    assert steps.step.segments == [(1, 0, 1, 0), (0, 1, 7, 0)]
    steps.advance(500)
    assert steps.step.segments == [(1, 0, 1, 1), (0, 1, 3, 7), (2, 4, 4, 0)]
    assert steps.step.logit_rows == [0, 3]
    steps.advance(500)
    assert steps.step.segments == [(0, 0, 1, 10), (1, 1, 1, 2), (2, 2, 5, 4)]


def test_pages_of_a_sequence_are_its_own_and_given_back_at_its_end(library: ctypes.CDLL) -> None:
    steps = Steps(library, (64, 64), (2, 70), 128)
    assert steps.pages_in_use() == 2
    steps.advance(500)
    assert steps.pages_in_use() == 4
    assert len(set(steps.state.page_table[:, :2].ravel().tolist())) == 4
    steps.advance(500)
    assert steps.state.sequences["finish"].tolist() == [FINISH["length"], 0]
    assert steps.pages_in_use() == 2


def test_a_stop_token_ends_only_its_sequence(library: ctypes.CDLL) -> None:
    steps = Steps(library, (3, 3), (9, 9), 8)
    steps.advance([999, 5])
    assert steps.state.sequences["finish"].tolist() == [FINISH["stop"], 0]
    assert steps.state.sequences["length"].tolist() == [4, 4] and int(steps.state.tokens[0, 3]) == 999
    assert steps.step.segments == [(1, 0, 1, 3)]


def test_logits_that_are_no_numbers_end_the_sequence_with_an_error(library: ctypes.CDLL) -> None:
    steps = Steps(library, (3, 3), (9, 9), 8)
    steps.advance([-1, 5])
    assert steps.state.sequences["finish"].tolist() == [FINISH["error"], 0]
    assert steps.state.sequences["length"].tolist() == [3, 4]


def test_a_sequence_without_pages_ends_with_an_error_and_the_others_go_on(library: ctypes.CDLL) -> None:
    steps = Steps(library, (64, 64), (5, 5), 128)
    steps.state.free_page_count[0] = 1
    steps.advance(500)
    assert steps.state.sequences["finish"].tolist() == [0, FINISH["error"]]
    assert steps.step.segments == [(0, 0, 1, 64)]


def test_cancel_ends_every_sequence_after_the_step(library: ctypes.CDLL) -> None:
    steps = Steps(library, (3, 70), (9, 9), 8)
    steps.state.cancel[0] = 1
    steps.advance(500)
    assert steps.step.done == 1 and steps.pages_in_use() == 0
    assert steps.state.sequences["finish"].tolist() == [FINISH["cancelled"]] * 2
    assert steps.state.sequences["length"].tolist() == [4, 70]  # the step's token is kept


def test_all_logits_wants_every_row_and_generates_nothing(library: ctypes.CDLL) -> None:
    steps = Steps(library, (5, 6), (1, 1), 8, all_logits=True)
    assert steps.step.logit_rows == list(range(8))
    steps.advance(-1)
    assert steps.state.sequences["finish"].tolist() == [FINISH["length"], 0]
    steps.advance(-1)
    assert steps.step.done == 1 and steps.state.sequences["length"].tolist() == [5, 6]


def test_the_next_step_is_numbered_one_higher(library: ctypes.CDLL) -> None:
    steps = Steps(library, (2,), (3,), 4)
    numbers = [steps.step.number]
    while not steps.step.done:
        steps.advance(5)
        numbers.append(steps.step.number)
    assert numbers == [1, 2, 3, 4]
