"""What a caller asks for and gets: prompts and options, checked before anything runs, and results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from mpk.codegen.layout import FINISH, MAX_STOP_TOKENS, MAX_TOP_LOGPROBS
from mpk.errors import RequestError
from mpk.tasks.sample.options import TokenOptions

SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)  # normal float32 numbers
FLOAT32_OPTIONS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
FINISH_REASONS = {value: name for name, value in FINISH.items()}


@dataclass(frozen=True)
class SamplingOptions(TokenOptions):
    """How the tokens of one sequence are chosen (`TokenOptions`), how many, and what is reported of them.

    `stop_tokens` end the sequence and are part of the output. `logprobs`: None, or how many alternatives to report with each token;
    log-probabilities are log-softmax of the model's logits before penalties, temperature and filters.
    """

    max_new_tokens: int = 64
    stop_tokens: tuple[int, ...] = ()
    logprobs: int | None = None

    def check(self, where: str, vocab: int) -> SamplingOptions:
        """Raise `RequestError` naming the first option out of range; returns self."""
        rules = [
            ("max_new_tokens", whole(self.max_new_tokens) and self.max_new_tokens >= 1, "a whole number from 1"),
            ("temperature", number(self.temperature) and self.temperature >= 0, "a number from 0"),
            ("top_k", whole(self.top_k) and 0 <= self.top_k < 2**31, "a whole number from 0 (0: off)"),
            ("top_p", number(self.top_p) and 0 < self.top_p <= 1, "a number above 0 up to 1"),
            ("min_p", number(self.min_p) and 0 <= self.min_p <= 1, "a number from 0 to 1"),
            ("repetition_penalty", number(self.repetition_penalty) and self.repetition_penalty > 0, "a number above 0 (1: off)"),
            ("presence_penalty", number(self.presence_penalty), "a finite number"),
            ("frequency_penalty", number(self.frequency_penalty), "a finite number"),
            ("seed", whole(self.seed) and 0 <= self.seed < 2**64, "a whole number from 0 below 2^64"),
            ("logprobs", self.logprobs is None or (whole(self.logprobs) and 0 <= self.logprobs <= MAX_TOP_LOGPROBS),
             f"None or a whole number from 0 to {MAX_TOP_LOGPROBS}"),
        ]
        for name, ok, expected in rules:
            if not ok:
                raise RequestError(f"{where}: {name}", expected=expected, actual=repr(getattr(self, name)))
        for name in FLOAT32_OPTIONS:
            value = getattr(self, name)
            if value and not SMALLEST <= abs(value) <= LARGEST:
                zero = "" if name in ("top_p", "repetition_penalty") else "0 or "
                raise RequestError(f"{where}: {name}", expected=f"{zero}a size from {SMALLEST:.2g} to {LARGEST:.2g}, as it is used in float32",
                                   actual=repr(value))
        if len(self.stop_tokens) > MAX_STOP_TOKENS:
            raise RequestError(f"{where}: stop_tokens", expected=f"at most {MAX_STOP_TOKENS}", actual=str(len(self.stop_tokens)))
        for token in self.stop_tokens:
            if not whole(token) or not 0 <= token < vocab:
                raise RequestError(f"{where}: stop token", expected=f"an id from 0 to {vocab - 1}", actual=repr(token))
        return self


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of a generated token, and of the most likely tokens at its place, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class GenerateResult:
    """What `generate` returns; lists have one entry a sequence.

    `tokens`: new tokens, with the stop token if one ended the sequence. `finish_reasons`: "stop", "length", "cancelled" or "error"
    (the logits were not numbers). `first_token_ms`: from the call to the first token of the batch. `ms_per_token`: mean time between
    tokens of the longest sequence after its first (0 with a single token). `steps`: steps the program ran. `token_ms`: time since
    the call of every token.
    """

    tokens: list[list[int]]
    finish_reasons: list[str]
    first_token_ms: float
    ms_per_token: float
    steps: int
    prompt_tokens: list[int]
    token_ms: list[list[float]] = field(default_factory=list)
    logprobs: list[list[TokenLogprob]] | None = None


def whole(value: Any) -> bool:
    """Whether the value is a whole number (no bool)."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))


def number(value: Any) -> bool:
    """Whether the value is a finite number (no bool)."""
    return whole(value) or (isinstance(value, (float, np.floating)) and math.isfinite(value))


def is_torch(value: Any) -> bool:
    """Whether the value is a torch tensor, without importing torch."""
    return type(value).__module__.split(".")[0] == "torch"


def as_prompts(prompts: Any) -> list[np.ndarray]:
    """Prompts as int64 vectors (uint64 where an id is beyond int64): a vector or flat list is one prompt, a matrix or list of lists is one prompt a row."""
    if is_torch(prompts):
        prompts = _ids_of_torch(prompts, "prompt_tokens")
    if isinstance(prompts, np.ndarray):
        if prompts.ndim not in (1, 2):
            raise RequestError("prompt_tokens", expected="[tokens] or [batch, tokens]", actual=f"{prompts.ndim} dimensions")
        rows: list[Any] = [prompts] if prompts.ndim == 1 else list(prompts)
    elif isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        raise RequestError("prompt_tokens", expected="token ids: an array or lists of whole numbers", actual=type(prompts).__name__)
    else:
        items = list(prompts)
        flat = items and all(isinstance(i, (int, np.integer)) for i in items)
        rows = [items] if flat else items
    return [_as_ids(row, slot) for slot, row in enumerate(rows)]


def _as_ids(row: Any, slot: int) -> np.ndarray:
    if is_torch(row):
        row = _ids_of_torch(row, f"sequence {slot}: prompt_tokens")
    try:
        ids = np.asarray(row)
    except (ValueError, TypeError, OverflowError):
        ids = np.zeros((0, 0))
    if ids.size == 0 and ids.ndim == 1:
        return np.zeros(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError(f"sequence {slot}: prompt_tokens", expected="whole numbers in one dimension", actual=f"{ids.dtype} in {ids.ndim}")
    if ids.dtype == np.uint64 and ids.max() > np.iinfo(np.int64).max:
        return ids  # out of range for any vocabulary, and refused by its own value
    return ids.astype(np.int64)


def _ids_of_torch(value: Any, subject: str) -> np.ndarray:
    """A torch tensor of integers (on any device) as an array."""
    try:
        if not (value.is_floating_point() or value.is_complex()):
            return np.asarray(value.detach().cpu().numpy())
        actual = str(value.dtype)
    except (AttributeError, TypeError, RuntimeError, NotImplementedError) as e:  # no tensor, quantised, sparse, or without data
        actual = str(e).splitlines()[0]
    raise RequestError(subject, expected="whole numbers", actual=actual)


def check_prompts(prompts: Sequence[np.ndarray], *, vocab: int, max_batch: int) -> None:
    """Raise `RequestError` for a batch of 0 or too large, an empty prompt, a token out of range (which, where)."""
    if not prompts:
        raise RequestError("the batch holds no sequence", expected=f"1 to {max_batch}")
    if len(prompts) > max_batch:
        raise RequestError("batch", expected=f"at most {max_batch} sequences", actual=str(len(prompts)),
                           remedy="split it, or create the instance with a larger max_batch")
    for slot, ids in enumerate(prompts):
        if not len(ids):
            raise RequestError(f"sequence {slot}: the prompt is empty", expected="at least one token")
        wrong = np.flatnonzero((ids < 0) | (ids >= vocab))
        if len(wrong):
            raise RequestError(f"sequence {slot}: token at place {wrong[0]}", expected=f"an id from 0 to {vocab - 1}", actual=str(ids[wrong[0]]))


def options_per_sequence(count: int, options: Mapping[str, Any], vocab: int) -> list[SamplingOptions]:
    """One checked `SamplingOptions` a sequence; a list gives every sequence its own value (`stop_tokens`: a list of lists)."""
    known = {f.name for f in fields(SamplingOptions)}
    if "stop_tokens" in options:
        options = {**options, "stop_tokens": _stop_lists(options["stop_tokens"])}
    for name in options:
        if name not in known:
            raise RequestError(f"option {name}", remedy=f"known options: {', '.join(sorted(known))}")
    out = []
    for slot in range(count):
        mine = {name: _of_sequence(name, value, slot, count) for name, value in options.items()}
        out.append(SamplingOptions(**mine).check(f"sequence {slot}", vocab))
    return out


def _stop_lists(value: Any) -> list[Any]:
    """Ids, or lists of ids (one a sequence), as lists."""
    def listed(entry: Any) -> Any:
        if isinstance(entry, np.ndarray) or is_torch(entry):
            entry = entry.tolist()
        return list(entry) if isinstance(entry, Iterable) and not isinstance(entry, (str, bytes)) else entry

    outer = listed(value)
    if isinstance(outer, list):
        entries = [listed(entry) for entry in outer]
        if len({isinstance(entry, list) for entry in entries}) < 2:
            return entries
    raise RequestError("option stop_tokens", expected="a list of ids, or a list of such lists, one a sequence", actual=repr(value))


def _of_sequence(name: str, value: Any, slot: int, count: int) -> Any:
    if isinstance(value, np.ndarray) or is_torch(value):
        value = value.tolist()
    shared = not isinstance(value, (list, tuple)) or (name == "stop_tokens" and not any(isinstance(v, (list, tuple)) for v in value))
    if not shared:
        if len(value) != count:
            raise RequestError(f"option {name}", expected=f"one value or {count} (one a sequence)", actual=str(len(value)))
        value = value[slot]
    return tuple(value) if name == "stop_tokens" else value
