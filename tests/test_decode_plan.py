"""Lengths of measured generations: all sequences decode in the measured steps, at the mean context that was asked for."""

from __future__ import annotations

from statistics import fmean

import pytest

from mpk.commands.decode_plan import with_mean_context, with_prompt
from mpk.tasks.advance.reference import PlannedSequence, plan


def rows_of_steps(prompt: int, new_tokens: list[int], max_rows: int) -> list[list[tuple[int, int]]]:
    """(rows, position) of every sequence in every step of a generation."""
    sequences, left, steps = [PlannedSequence(prompt) for _ in new_tokens], list(new_tokens), []
    while any(s.running for s in sequences):
        segments, _ = plan(sequences, max_rows)
        steps.append([(rows, position) for _, _, rows, position in segments])
        for slot, _, rows, _ in segments:
            s = sequences[slot]
            s.computed += rows
            if s.computed == s.length:
                s.length, left[slot] = s.length + 1, left[slot] - 1
                s.running = left[slot] > 0
    return steps


@pytest.mark.parametrize(("batch", "prompt", "max_rows"), [(1, 5, 256), (3, 600, 256), (16, 64, 16), (4, 1, 256), (7, 257, 256)])
def test_every_sequence_decodes_in_the_last_steps_and_all_end_together(batch: int, prompt: int, max_rows: int) -> None:
    made = with_prompt(batch, prompt, 8, max_rows)
    steps = rows_of_steps(made.prompt, made.new_tokens, max_rows)
    assert len(steps) == made.prompt_steps + 8
    assert all(len(step) == batch and {rows for rows, _ in step} == {1} for step in steps[-8:])
    assert made.new_tokens[made.last] == 9 and made.context == prompt + max(made.new_tokens)


@pytest.mark.parametrize(("batch", "context", "max_rows"), [(1, 512, 256), (4, 512, 256), (16, 512, 256), (16, 512, 16), (2, 40, 256)])
def test_the_mean_context_of_the_measured_steps_is_as_asked(batch: int, context: int, max_rows: int) -> None:
    made = with_mean_context(batch, context, 32, max_rows)
    steps = rows_of_steps(made.prompt, made.new_tokens, max_rows)[-32:]
    assert abs(fmean(position + 1 for step in steps for _, position in step) - context) <= 1.5


def test_prompts_that_are_read_before_the_first_step_all_yield_a_token_there() -> None:
    assert with_prompt(4, 600, 8, 16, 64).new_tokens == [9] * 4
    assert with_prompt(4, 600, 8, 16, 64).prompt_steps == 1
    assert with_prompt(1, 64, 8, 16, 64).prompt_steps == 4  # 63 tokens are not worth it
