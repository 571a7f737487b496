"""Which lengths make a batch decode together for a number of steps, so that what is measured are decode steps and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from mpk.tasks.advance.reference import PlannedSequence, plan


@dataclass(frozen=True)
class DecodePlan:
    """A generation whose last steps decode a row for every sequence.

    `prompt`: tokens of each prompt. `new_tokens`: of each sequence; those whose prompts are read first get more, so that all end in
    the same step. `prompt_steps`: steps until the last prompt is read. `last`: the sequence whose prompt that is.
    """

    prompt: int
    new_tokens: list[int]
    prompt_steps: int
    last: int

    @property
    def context(self) -> int:
        """Tokens of the longest sequence at the end."""
        return self.prompt + max(self.new_tokens)


def with_prompt(batch: int, prompt: int, steps: int, max_rows: int, prompt_least: int = 0) -> DecodePlan:
    """Prompts of `prompt` tokens, then `steps` steps in which all decode.

    `prompt_least`: tokens from which prompts are read before the first step, all but the last token of each (0: never).
    """
    ends = _first_tokens(batch, prompt, max_rows, prompt_least)
    read = max(ends)
    return DecodePlan(prompt, [steps + 1 + read - end for end in ends], read, ends.index(read))


def with_mean_context(batch: int, context: int, steps: int, max_rows: int, prompt_least: int = 0) -> DecodePlan:
    """`steps` steps in which all decode, at `context` tokens in the mean over sequences and steps (prompts have one token at least)."""
    shortest, longest = 1, max(1, context - steps // 2)
    while shortest < longest:
        prompt = (shortest + longest + 1) // 2
        ends = _first_tokens(batch, prompt, max_rows, prompt_least)
        if prompt + fmean(max(ends) - end for end in ends) + steps // 2 <= context:  # what a sequence decodes before all do counts too
            shortest = prompt
        else:
            longest = prompt - 1
    return with_prompt(batch, shortest, steps, max_rows, prompt_least)


def _first_tokens(batch: int, prompt: int, max_rows: int, prompt_least: int) -> list[int]:
    """The step (from 1) that yields each sequence's first token, as `advance` plans the steps."""
    read = prompt - 1 if 0 < prompt_least <= batch * (prompt - 1) else 0
    sequences = [PlannedSequence(prompt, computed=read) for _ in range(batch)]
    ends = [0] * batch
    step = 0
    while 0 in ends:
        step += 1
        for slot, _, rows, _ in plan(sequences, max_rows)[0]:
            s = sequences[slot]
            s.computed += rows
            if s.computed == s.length:
                s.length += 1
                ends[slot] = ends[slot] or step
    return ends
