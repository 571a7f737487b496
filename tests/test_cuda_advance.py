"""`advance` of the CUDA back end: steps that a device closes and plans, beside a model of them."""

from __future__ import annotations

import numpy as np
import pytest

from mpk.codegen import layout
from mpk.tasks.advance.cases import CASES as ADVANCE
from mpk.tasks.advance.reference import PlannedSequence, plan
from mpk.tasks.head.sharing import MESSAGE_COLUMNS
from tests.support.cuda_kinds import Machine, put_step

VOCAB, PARTS = 1024, 8  # of the head whose messages hold the tokens
FIRST, LOGITS = 1 << 16, 1 << 17  # of step.cuh


class Planning:
    """A batch whose steps the device plans, beside a model of it."""

    def __init__(self, lengths: tuple[int, ...], new: tuple[int, ...], max_rows: int, pages: int, all_logits: tuple[int, ...] = (), agreed: int | None = None) -> None:
        self.batch, self.max_rows, self.context = len(lengths), max_rows, max(a + b for a, b in zip(lengths, new, strict=True))
        self.model = [PlannedSequence(n, all_logits=i in all_logits) for i, n in enumerate(lengths)]
        self.limits = [a + b for a, b in zip(lengths, new, strict=True)]
        rng = np.random.default_rng(6)
        self.tokens = rng.integers(0, 1000, (self.batch, self.context)).astype(np.int32)
        sequences = np.zeros(self.batch, layout.dtype("Sequence"))
        sequences["active"], sequences["prompt_length"], sequences["length"], sequences["max_length"] = 1, lengths, lengths, self.limits
        sequences["all_logits"] = [i in all_logits for i in range(self.batch)]
        sequences["stop"][:, 0], sequences["stop_count"] = 777, 1
        max_pages = -(-self.context // layout.KV_PAGE_TOKENS)
        self.m = Machine(max_batch=self.batch, max_context=self.context, max_pages=max_pages, num_pages=pages)
        put_step(self.m, [], np.zeros(0, np.int32), np.zeros(0, np.int32), max_rows)
        self.m.memory["step"].upload(np.zeros(1, layout.dtype("Step")))  # step 0, which has nothing to close
        for name, array in (("sequences", sequences), ("tokens", self.tokens.copy()), ("page_table", np.full((self.batch, max_pages), -1, np.int32)),
                            ("free_pages", np.arange(pages, dtype=np.int32)), ("free_page_count", np.array([pages], np.int32)),
                            ("cancel", np.zeros(1, np.int32)), ("token_ns", np.zeros((self.batch, self.context), np.int64))):
            self.m.put(name, array)
        self.m.put("messages", np.zeros((16, 4), np.uint32))
        self.m.buffers(choice=np.zeros((self.batch, MESSAGE_COLUMNS), np.int32), tops=np.zeros((16, PARTS * MESSAGE_COLUMNS), np.float32),
                       logits=np.zeros((16, VOCAB), np.float32))
        self.operands: tuple[str, ...] = ("choice", "tops", "logits")
        if agreed is not None:  # ranks share the model
            self.m.buffers(("agreed",), 0, **{name: self.m.arrays[name] for name in self.operands}, agreed=np.full((1, 1), agreed, np.int32))
            self.operands = (*self.operands, "agreed")
        self.number = 0
        self.logit_slots: list[int] = []  # of the rows of logits of the step that was planned last
        self.segments: list[tuple[int, int, int, int]] = []

    def advance(self, choice: np.ndarray) -> tuple[list[tuple[int, int, int, int]], list[int]]:
        """Close the present step with `choice`; segments and logit rows of the next one, as the device planned them.

        Tokens come from `head`, one slice for all, to rows of logits; the step that was planned before becomes the present one.
        """
        tops = np.zeros((16, PARTS, MESSAGE_COLUMNS), np.uint32)
        for row, slot in enumerate(self.logit_slots):
            value = np.float32(-np.inf if choice[slot] < 0 else 1)
            tops[row, :] = np.array([-np.inf], np.float32).view(np.uint32)[0], 0x7FFFFFFF, 0, self.number
            tops[row, 3] = value.view(np.uint32), np.uint32(max(choice[slot], 0)), 0, self.number
        self.m.memory["arena"].upload(tops, self.m.offsets["tops"])
        self.m.launch["special_rows"] = sum((1 << row for row, slot in enumerate(self.logit_slots) if self.model[slot].all_logits), 0)
        self.m.run("advance", {"vocab": VOCAB, "parts": PARTS, "slice": VOCAB // PARTS}, self.operands, [(0, 1)])
        step, messages = self.m.get("step")[0], self.m.get("messages")
        self.number += 1
        about = messages[:, 3]
        count = int(about[0] >> 8 & 0xFF)
        assert step["number"] == self.number and step["rows"] == count <= self.max_rows and bool(step["done"]) == (count == 0)
        assert (messages[: max(count, 1), 0] == self.number).all() and (about[:count] >> 8 & 0xFF == count).all()
        tokens, positions, slots = messages[:count, 1].astype(int), messages[:count, 2].astype(int), (about[:count] & 0xFF).astype(int)
        assert np.array_equal(tokens, self.m.get("tokens")[slots, positions])
        firsts = np.flatnonzero(about[:count] & FIRST)
        ends = [*firsts[1:], count][: len(firsts)]
        segments = [(int(slots[a]), int(a), int(b - a), int(positions[a])) for a, b in zip(firsts, ends, strict=True)]
        logit_rows = np.flatnonzero(about[:count] & LOGITS).tolist()
        self.logit_slots = slots[logit_rows].tolist()
        assert step["segments"] == len(segments) and step["logit_rows"] == len(logit_rows)
        put_step(self.m, [(slot, position, rows) for slot, _, rows, position in segments], tokens.astype(np.int32), np.array(logit_rows, np.int32), self.max_rows)
        self.m.memory["step"].upload(step)
        self.segments = segments
        return segments, logit_rows

    def pages_in_use(self) -> list[int]:
        table, sequences = self.m.get("page_table"), self.m.get("sequences")
        ends = {slot: position + rows for slot, _, rows, position in self.segments}
        used: list[int] = []
        for slot in range(self.batch):
            if sequences[slot]["finish"] == layout.FINISH["running"]:
                tokens = ends.get(slot, int(sequences[slot]["computed"]))
                used += table[slot, : -(-tokens // layout.KV_PAGE_TOKENS)].tolist()
        return used


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "new", "max_rows"), ADVANCE)
def test_steps_are_closed_and_planned_as_the_reference_says(lengths: tuple[int, ...], new: tuple[int, ...], max_rows: int) -> None:
    run = Planning(lengths, new, max_rows, pages=64)
    choice, rng = np.full(run.batch, -1, np.int64), np.random.default_rng(7)
    while True:
        segments, logit_rows = run.advance(choice)
        assert (segments, logit_rows) == plan(run.model, max_rows)
        used, free = run.pages_in_use(), run.m.get("free_pages")[: run.m.get("free_page_count")[0]].tolist()
        assert sorted(used + free) == list(range(64)), "every page is in use once or free"
        if not segments:
            break
        choice = rng.integers(0, 700, run.batch)
        for slot, _, rows, _ in segments:
            s = run.model[slot]
            s.computed += rows
            if s.computed == s.length:
                run.tokens[slot, s.length] = choice[slot]
                s.length += 1
                s.running = s.length < run.limits[slot]
    sequences, tokens = run.m.get("sequences"), run.m.get("tokens")
    assert sequences["finish"].tolist() == [layout.FINISH["length"]] * run.batch
    assert sequences["length"].tolist() == run.limits
    assert np.array_equal(tokens, run.tokens)


@pytest.mark.gpu
def test_sequences_end_by_stop_token_error_and_cancelling() -> None:
    run = Planning((3, 3, 3, 3), (9, 9, 9, 9), 16, pages=64, all_logits=(3,))
    run.advance(np.full(4, -1))
    segments, _ = run.advance(np.array([5, 777, -1, -1]))
    names = {v: k for k, v in layout.FINISH.items()}
    assert [names[f] for f in run.m.get("sequences")["finish"].tolist()] == ["running", "stop", "error", "length"]
    assert segments == [(0, 0, 1, 3)] and run.m.get("tokens")[1, 3] == 777
    run.m.memory["cancel"].upload(np.ones(1, np.int32))
    assert run.advance(np.array([6, 0, 0, 0])) == ([], [])
    assert names[int(run.m.get("sequences")["finish"][0])] == "cancelled"
    assert sorted(run.m.get("free_pages")[: run.m.get("free_page_count")[0]].tolist()) == list(range(64))


@pytest.mark.gpu
@pytest.mark.parametrize("agreed", [0, 1])
def test_ranks_end_by_what_they_agree_on_and_not_by_what_each_sees(agreed: int) -> None:
    run = Planning((3,), (9,), 16, pages=64, agreed=agreed)
    run.m.memory["cancel"].upload(np.full(1, 1 - agreed, np.int32))
    segments, _ = run.advance(np.array([-1]))
    assert segments == [(0, 0, 3, 0)], "step 0 is nobody's to cancel"
    segments, _ = run.advance(np.array([5]))
    assert segments == ([] if agreed else [(0, 0, 1, 3)])
    assert run.m.get("sequences")["finish"].tolist() == [layout.FINISH["cancelled" if agreed else "running"]]


@pytest.mark.gpu
def test_a_sequence_that_finds_no_page_ends_with_an_error() -> None:
    run = Planning((9, 3), (1, 9), 16, pages=1)
    segments, _ = run.advance(np.full(2, -1))
    assert segments == [(0, 0, 9, 0)] and run.m.get("sequences")["finish"].tolist() == [0, layout.FINISH["error"]]
