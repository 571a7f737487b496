"""How one token is chosen from a row of logits: what a sequence says, the reference reads and the device finds in `Sequence`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenOptions:
    """Order: repetition penalty (prompt and output, as in transformers), presence and frequency penalty (output only, as in OpenAI's
    API), temperature (0: the most likely token, lowest id among equals), top_k (0: off), top_p (1: off), min_p (0: off), draw.
    The draw depends on `seed` and the token's position alone. The defaults switch everything off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
