"""`advance` of the CUDA back end: steps that a device closes and plans, beside a model of them."""

from __future__ import annotations

import numpy as np
import pytest

from mpk.codegen import layout
from mpk.tasks.advance.cases import CASES as ADVANCE
from mpk.tasks.advance.reference import PlannedSequence, plan
from tests.support.cuda_kinds import Machine, put_step


class Planning:
    """A batch whose steps the device plans, beside a model of it."""

    def __init__(self, lengths: tuple[int, ...], new: tuple[int, ...], max_rows: int, pages: int, all_logits: tuple[int, ...] = ()) -> None:
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
        for name, array in (("sequences", sequences), ("tokens", self.tokens.copy()), ("page_table", np.full((self.batch, max_pages), -1, np.int32)),
                            ("free_pages", np.arange(pages, dtype=np.int32)), ("free_page_count", np.array([pages], np.int32)),
                            ("cancel", np.zeros(1, np.int32)), ("token_ns", np.zeros((self.batch, self.context), np.int64))):
            self.m.put(name, array)
        self.m.buffers(choice=np.zeros(self.batch, np.int32))

    def advance(self, choice: np.ndarray) -> tuple[list[tuple[int, int, int, int]], list[int]]:
        """Close the present step with `choice`; segments and logit rows of the next one, as the device planned them."""
        self.m.memory["arena"].upload(choice.astype(np.int32))
        self.m.run("advance", {}, ("choice",), [(0, 1)])
        step = self.m.get("step")[0]
        segments = [tuple(int(s[f]) for f in ("slot", "row_begin", "rows", "position")) for s in self.m.get("segments")[: step["segments"]]]
        rows = [(slot, position + r) for slot, _, count, position in segments for r in range(count)]
        assert len(rows) == step["rows"] <= self.max_rows and bool(step["done"]) == (not rows)
        if rows:
            slots, positions = (np.array(c) for c in zip(*rows, strict=True))
            assert np.array_equal(self.m.get("row_slot")[: len(rows)], slots) and np.array_equal(self.m.get("row_position")[: len(rows)], positions)
            assert np.array_equal(self.m.get("row_token")[: len(rows)], self.m.get("tokens")[slots, positions])
        return segments, self.m.get("logit_row")[: step["logit_rows"]].tolist()  # type: ignore[return-value]

    def pages_in_use(self) -> list[int]:
        table, sequences = self.m.get("page_table"), self.m.get("sequences")
        segments = self.m.get("segments")[: self.m.get("step")[0]["segments"]]
        ends = {int(s["slot"]): int(s["position"] + s["rows"]) for s in segments}
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
def test_a_sequence_that_finds_no_page_ends_with_an_error() -> None:
    run = Planning((70, 3), (1, 9), 128, pages=2)
    run.max_rows = 128
    segments, _ = run.advance(np.full(2, -1))
    assert segments == [(0, 0, 70, 0)] and run.m.get("sequences")["finish"].tolist() == [0, layout.FINISH["error"]]
