"""The sampling rules in C++ against numpy models, transformers' logits processors and published vectors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from mpk.codegen import layout
from mpk.tasks.sample import reference
from mpk.tasks.sample.cases import OPTIONS, VOCABULARIES
from mpk.tasks.sample.options import TokenOptions
from tests.support.library import load_library, pointer


class Sampler:
    """Calls the library for one row of logits at a time."""

    def __init__(self, portable: bool = False) -> None:
        self.lib = load_library("sampling_test", portable=portable)
        self.lib.scratch_bytes.restype = ctypes.c_int64
        self.lib.log_probabilities.restype = ctypes.c_float

    def _scratch(self, vocab: int) -> np.ndarray:
        return np.full(int(self.lib.scratch_bytes(vocab)) + 64, 0x5A, np.uint8)

    def _sequence(self, prompt: list[int], output: list[int], o: TokenOptions) -> tuple[np.ndarray, np.ndarray]:
        s = np.zeros(1, layout.dtype("Sequence"))
        for name, value in vars(o).items():
            s[name] = value
        s["prompt_length"], s["length"] = len(prompt), len(prompt) + len(output)
        return s, np.array([*prompt, *output], np.int32)

    def choose(self, logits: np.ndarray, prompt: list[int], output: list[int], o: TokenOptions) -> int:
        s, tokens = self._sequence(prompt, output, o)
        return int(self.lib.choose(pointer(logits), len(logits), pointer(s), pointer(tokens), pointer(self._scratch(len(logits)))))

    def choose_many(self, logits: np.ndarray, o: TokenOptions, count: int, prompt: list[int] | None = None,
                    output: list[int] | None = None) -> np.ndarray:
        """Choices with `count` seeds that follow each other."""
        s, tokens = self._sequence(prompt or [0], output or [], o)
        out = np.zeros(count, np.int32)
        self.lib.choose_many(pointer(logits), len(logits), pointer(s), pointer(tokens), pointer(self._scratch(len(logits))), count, pointer(out))
        return out

    def logprobs(self, logits: np.ndarray, token: int, count: int) -> tuple[float, np.ndarray, np.ndarray]:
        top, ids = np.zeros(max(count, 1), np.float32), np.zeros(max(count, 1), np.int32)
        chosen = self.lib.log_probabilities(pointer(logits), len(logits), token, count, pointer(top), pointer(ids),
                                            pointer(self._scratch(len(logits))))
        return float(chosen), top[:count], ids[:count]


@pytest.fixture(scope="module", params=["native", "portable"])
def sampler(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampler]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield Sampler(portable=request.param == "portable")


def logits_of(vocab: int, seed: int, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


def kept(sampler: Sampler, logits: np.ndarray, o: TokenOptions, count: int = 20000) -> set[int]:
    """Tokens seen in many draws."""
    return set(sampler.choose_many(logits, o, count).tolist())


# Known answers of Random123 (Salmon et al., SC 2011): counter, key, result.
PHILOX = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0], [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
]


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX)
def test_philox_gives_the_published_vectors(sampler: Sampler, counter: list[int], key: list[int], expected: list[int]) -> None:
    out = np.zeros(4, np.uint32)
    sampler.lib.philox(pointer(np.array(counter, np.uint32)), pointer(np.array(key, np.uint32)), pointer(out))
    assert out.tolist() == expected
    assert reference.philox4x32(counter, key) == expected


def test_exponential_is_within_two_units_of_the_last_place(sampler: Sampler) -> None:
    z = np.concatenate([np.linspace(-87, 0, 100001), [-87.5, -1e30, -np.inf, np.nan]]).astype(np.float32)
    out = np.zeros_like(z)
    sampler.lib.exponentials(pointer(z), len(z), pointer(out))
    exact = np.exp(z[:-4].astype(np.float64))
    assert np.max(np.abs(out[:-4] - exact) / exact) < 2.4e-7
    assert out[-4:].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("k", [1, 2, 63, 64, 65, 900, 5000])
@pytest.mark.parametrize("order", ["random", "ascending", "descending", "equal"])
def test_selection_finds_the_largest_with_low_ids_first_among_equals(sampler: Sampler, k: int, order: str) -> None:
    n = 5000
    x = {"random": logits_of(n, 1).round(1), "ascending": np.arange(n), "descending": np.arange(n)[::-1], "equal": np.ones(n)}[order]
    x = np.ascontiguousarray(x, np.float32)
    out = np.zeros(n, np.dtype([("value", np.float32), ("id", np.int32)]))
    size = sampler.lib.select_largest(pointer(x), n, k, pointer(out))
    assert size == k
    assert sorted(out["id"][:k].tolist()) == sorted(np.argsort(-x, kind="stable")[:k].tolist())


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_choice_equals_the_numpy_model(sampler: Sampler, vocab: int, options: TokenOptions) -> None:
    rng = np.random.default_rng(vocab)
    agree = 0
    for seed in range(20):
        logits = logits_of(vocab, seed)
        prompt, output = rng.integers(0, vocab, 12).tolist(), rng.integers(0, vocab, 9).tolist()
        o = TokenOptions(**{**vars(options), "seed": seed})
        agree += sampler.choose(logits, prompt, output, o) == reference.choose(logits, prompt, output, o)
    assert agree >= 19  # float32 against float64: a draw within 1e-6 of a boundary may fall on the other side


def test_greedy_takes_the_lowest_id_among_equals_and_passes_over_nan(sampler: Sampler) -> None:
    logits = np.zeros(100, np.float32)
    logits[[40, 17, 99]] = 5
    logits[3] = np.nan
    assert sampler.choose(logits, [1], [], TokenOptions()) == 17


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_logits_without_a_finite_maximum_give_no_token(sampler: Sampler, value: float, temperature: float) -> None:
    assert sampler.choose(np.full(50, value, np.float32), [1], [], TokenOptions(temperature=temperature)) == -1


def test_draw_depends_on_seed_and_position_only(sampler: Sampler) -> None:
    logits = logits_of(1000, 5, 1.0)
    o = TokenOptions(temperature=1.0, seed=77)
    here = sampler.choose(logits, [1, 2], [3], o)
    assert here == sampler.choose(logits, [9, 9, 9], [], o) == sampler.choose(logits, [4], [5, 6], o)
    others = {sampler.choose(logits, [1] * n, [], o) for n in range(1, 40)}
    assert len(others) > 20


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """Statistic over bins with an expectation of at least 5, the rest in one bin, minus its mean, in standard deviations."""
    big = expected >= 5
    o = np.append(observed[big], observed[~big].sum())
    e = np.append(expected[big], expected[~big].sum())
    o, e = o[e > 0], e[e > 0]
    freedom = len(e) - 1
    return float((((o - e) ** 2 / e).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("o", [TokenOptions(temperature=1.0), TokenOptions(temperature=0.6), TokenOptions(temperature=1.0, top_k=10),
                               TokenOptions(temperature=1.3, top_p=0.9), TokenOptions(temperature=1.0, min_p=0.05)], ids=str)
def test_drawn_tokens_have_the_distribution(sampler: Sampler, o: TokenOptions) -> None:
    logits, count = logits_of(200, 3, 1.5), 50000
    expected = reference.distribution(logits, [0], [], o) * count
    observed = np.bincount(sampler.choose_many(logits, o, count), minlength=200)
    assert not observed[expected == 0].any()
    assert abs(chi_square(observed, expected)) < 4
    assert chi_square(np.roll(observed, 1), expected) > 100  # the check can fail


def test_top_k_keeps_exactly_k_and_those_equal_to_the_last(sampler: Sampler) -> None:
    logits = np.array([1.0, 3.0, 2.0, 2.0, 0.5, 2.0], np.float32)
    assert kept(sampler, logits, TokenOptions(temperature=1.0, top_k=1)) == {1}
    assert kept(sampler, logits, TokenOptions(temperature=1.0, top_k=2)) == {1, 2, 3, 5}
    assert kept(sampler, logits, TokenOptions(temperature=1.0, top_k=5)) == {0, 1, 2, 3, 5}


def test_top_p_keeps_the_shortest_run_that_reaches_the_sum(sampler: Sampler) -> None:
    logits = np.log(np.array([0.1, 0.4, 0.3, 0.2], np.float32))
    for top_p, expected in ((0.05, {1}), (0.39, {1}), (0.41, {1, 2}), (0.69, {1, 2}), (0.71, {1, 2, 3}), (0.95, {0, 1, 2, 3})):
        assert kept(sampler, logits, TokenOptions(temperature=1.0, top_p=top_p)) == expected


@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
def test_top_p_keeps_the_nucleus_of_a_large_vocabulary(sampler: Sampler, scale: float) -> None:
    logits = logits_of(20000, 9, scale)
    o = TokenOptions(temperature=1.0, top_p=0.5)
    wanted = reference.distribution(logits, [0], [], o) > 0
    drawn = np.array(sorted(kept(sampler, logits, o, 3000)))
    p = reference.distribution(logits, [0], [], TokenOptions(temperature=1.0))
    boundary = p[wanted].min()
    assert (p[drawn] >= boundary * (1 - 1e-3)).all()
    outside = drawn[~wanted[drawn]]
    assert len(outside) <= 2  # float32 sums may move the boundary by a token


def test_min_p_keeps_what_is_likely_enough_against_the_best(sampler: Sampler) -> None:
    logits = np.log(np.array([0.5, 0.26, 0.24, 0.04, 0.06], np.float32))
    assert kept(sampler, logits, TokenOptions(temperature=1.0, min_p=0.5)) == {0, 1}
    assert kept(sampler, logits, TokenOptions(temperature=1.0, min_p=0.1)) == {0, 1, 2, 4}
    assert kept(sampler, logits, TokenOptions(temperature=1.0, min_p=1.0)) == {0}


def test_filters_and_repetition_penalty_equal_transformers(sampler: Sampler) -> None:
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = logits_of(60, 11, 2.0)
    prompt, output = [3, 5, 5, 8, 13], [21, 34, 21]
    o = TokenOptions(temperature=0.7, top_k=20, top_p=0.85, min_p=0.03, repetition_penalty=1.4)
    scores = torch.from_numpy(logits)[None]
    ids = torch.tensor([[*prompt, *output]])
    for step in (process.RepetitionPenaltyLogitsProcessor(1.4), process.TemperatureLogitsWarper(0.7), process.TopKLogitsWarper(20),
                 process.TopPLogitsWarper(0.85), process.MinPLogitsWarper(0.03)):
        scores = step(ids, scores)
    p = torch.softmax(scores[0], -1).numpy().astype(np.float64)
    ours = reference.distribution(logits, prompt, output, o)
    assert np.abs(ours - p).max() < 1e-6
    observed = np.bincount(sampler.choose_many(logits, o, 50000, prompt, output), minlength=60)
    assert set(np.flatnonzero(observed)) == set(np.flatnonzero(p))
    assert abs(chi_square(observed, p * 50000)) < 4


def test_penalties_change_the_greedy_choice_by_the_stated_amounts(sampler: Sampler) -> None:
    logits = np.array([1.0, 2.0, 1.95, -1.0], np.float32)
    assert sampler.choose(logits, [1], [], TokenOptions(repetition_penalty=1.02)) == 1  # 2 / 1.02 = 1.961
    assert sampler.choose(logits, [1], [], TokenOptions(repetition_penalty=1.03)) == 2  # 2 / 1.03 = 1.942
    assert sampler.choose(logits, [1, 1], [], TokenOptions(repetition_penalty=1.02)) == 1  # once, however often it occurs
    assert sampler.choose(logits, [1], [], TokenOptions(presence_penalty=0.5)) == 1  # prompts do not count
    assert sampler.choose(logits, [0], [1], TokenOptions(presence_penalty=0.06)) == 2
    assert sampler.choose(logits, [0], [1], TokenOptions(frequency_penalty=0.03)) == 1
    assert sampler.choose(logits, [0], [1, 1], TokenOptions(frequency_penalty=0.03)) == 2
    negative = np.array([-1.0, -1.05], np.float32)
    assert sampler.choose(negative, [0], [], TokenOptions(repetition_penalty=1.1)) == 1  # negative logits are multiplied


@pytest.mark.parametrize("vocab", [1, 7, 1000, 49152])
def test_log_probabilities_are_those_of_the_model(sampler: Sampler, vocab: int) -> None:
    logits = logits_of(vocab, 2)
    x = logits.astype(np.float64)
    exact = x - x.max() - np.log(np.exp(x - x.max()).sum())
    chosen, top, ids = sampler.logprobs(logits, vocab // 2, 5)
    assert abs(chosen - exact[vocab // 2]) < 2e-6 * max(1, abs(exact[vocab // 2]))
    best = np.argsort(-x, kind="stable")[:5]
    assert ids[: len(best)].tolist() == best.tolist()
    assert np.abs(top[: len(best)] - exact[best]).max() < 2e-6
    assert (ids[len(best) :] == -1).all()
