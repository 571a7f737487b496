"""Task bodies of the CUDA back end, each alone: they fit their block, and on a GPU compute what their references do."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import pytest

from mpk.codegen import layout, nvrtc
from mpk.errors import TargetError
from mpk.graph.sm_task_graph import Task
from mpk.graph.tensor_graph import Scalar
from mpk.tasks.attention_combine.cases import CASES as COMBINE
from mpk.tasks.base import Env, StepView, kind_of
from mpk.tasks.case import Case, Segments
from mpk.tasks.embed.cases import CASES as EMBED
from mpk.tasks.head.cases import CASES as SLICED
from mpk.tasks.head.sharing import MESSAGE_COLUMNS, PART_COLUMNS, slices
from mpk.tasks.packing import from_bf16, round_to, to_bf16
from mpk.tasks.rope_table.cases import CASES as ROPE
from mpk.tasks.rotary_attention.cases import CASES as ATTENTION
from mpk.tasks.rotary_attention.cases import DECODING
from mpk.tasks.rotary_attention.sharing import LEAST_BLOCKS, STATISTICS, has_one_row_form, kv_block, one_row, shares
from mpk.tasks.sample import reference as sampling
from mpk.tasks.sample.cases import OPTIONS
from mpk.tasks.sample.options import TokenOptions
from tests.support.cuda_kinds import Machine, PagedCache, compiled_within, put_step, spread
from tests.support.task_kinds import RandomWeights, step_view

POISON = np.array([0x7FC0DEAD], np.uint32).view(np.float32)[0]
MODELS = {"llama-3.1-8b": (32, 8, 128, 16), "qwen3-0.6b": (16, 8, 128, 16), "qwen3-32b": (64, 8, 128, 16), "qwen2.5-0.5b": (14, 2, 64, 33)}


def variants() -> list[tuple[str, dict[str, Scalar]]]:
    found = [(c.op.kind, dict(kind_of(c.op).variant(c.op, c.graph, "bf16"))) for c in (*EMBED, *ROPE, *ATTENTION, *COMBINE)]
    for heads, kv_heads, head_dim, splits in MODELS.values():
        found.append(("rotary_attention", {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "window": 0, "splits": splits,
                                           "least": LEAST_BLOCKS, "scale": head_dim**-0.5, "eps": 1e-6, "q_norm": True, "k_norm": True}))
    return found + [(kind, sliced(vocab, workers)) for kind in ("head", "logit_slices", "sample", "advance") for vocab, workers in (SLICED[0], SLICED[-1])]


def sliced(vocab: int, workers: int) -> dict[str, Scalar]:
    parts, size = slices(vocab, workers)
    return {"vocab": vocab, "parts": parts, "slice": size}


@pytest.mark.parametrize(("kind", "constants"), variants(), ids=lambda v: v if isinstance(v, str) else ",".join(str(x) for x in v.values()))
def test_bodies_fit_the_registers_of_a_block(kind: str, constants: Mapping[str, Scalar]) -> None:
    try:
        nvrtc.version()
    except TargetError:
        pytest.skip("NVRTC is not installed")
    # CONSUMER_REGISTERS of block.cuh; in the program heads of more columns spill a few bytes.
    limit = 232 if int(constants.get("head_dim", 0)) <= 128 else 255
    for resources in compiled_within(kind, constants, limit).resources.values():
        assert resources.registers <= limit
        assert resources.spill_stores == 0


# ---- one layer's attention
MAX_ROWS = 16  # of a step on this target


def partial_places(segments: Segments, group: int, window: int, head_dim: int, splits: int, max_rows: int) -> list[list[tuple[int, int]]]:
    """(row of the buffer, split) of the partial results of each row of a step."""
    block, lines = kv_block(head_dim), [(position, rows) for _, position, rows in segments]
    if len(lines) == lines[0][1] == 1 and has_one_row_form(group, head_dim, splits, max_rows):
        return [one_row(lines[0][0], window, block, splits)]
    work = np.repeat([[begin < end for begin, end in parts] for parts in shares(lines, group, window, block, splits)], [rows for _, rows in lines], axis=0)
    return [[(row, int(split)) for split in np.flatnonzero(of_row)] for row, of_row in enumerate(work)]


def gathered(buffer: np.ndarray, places: list[list[tuple[int, int]]], head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Partial results [row, part, kv_head, head in group, columns] of a buffer [row, kv_head, split, head in group, columns], with neutral ones
    where a row has fewer than others; and which places of the buffer [row, split] they are of."""
    parts = np.zeros((len(places), max(map(len, places)), *np.delete(buffer.shape, [0, 2])), np.float32)
    parts[..., head_dim] = -np.inf
    used = np.zeros((len(buffer), buffer.shape[2]), bool)
    for row, of_row in enumerate(places):
        for part, (at, split) in enumerate(of_row):
            assert not used[at, split], "two parts in one place"
            parts[row, part], used[at, split] = buffer[at, :, split], True
    return parts, used


class Attention:
    """Random memory of one case and step, on the device and for the reference."""

    def __init__(self, case: Case, segments: Segments) -> None:
        self.case, self.segments, self.a = case, segments, case.op.attrs
        heads, kv_heads, head_dim, self.splits, self.window = (int(self.a[n]) for n in ("heads", "kv_heads", "head_dim", "splits", "window"))
        self.heads, self.kv_heads, self.head_dim, self.group = heads, kv_heads, head_dim, heads // kv_heads
        self.step = step_view(segments, 33)
        self.rows = len(self.step.tokens)
        rng = np.random.default_rng(1)
        self.qkv = round_to(rng.standard_normal((self.rows, (heads + 2 * kv_heads) * head_dim), dtype=np.float32), "bf16")
        angles = self.step.positions[:, None] * (1e4 ** -(np.arange(head_dim // 2) * 2 / head_dim)).astype(np.float32)[None]
        self.rope = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        self.weights = RandomWeights(case, "bf16")
        context = int(self.step.positions.max()) + 1
        self.slots = int(self.step.slots.max()) + 1
        self.cache, self.plain = PagedCache(self.slots, context, kv_heads, head_dim), np.full((self.slots, context, 2 * kv_heads * head_dim), np.nan, np.float32)
        for slot, position, _ in segments:
            past = round_to(rng.standard_normal((position, 2 * kv_heads * head_dim), dtype=np.float32), "bf16")
            self.plain[slot, :position] = past
            for t in range(position):
                self.cache.put(slot, t, past[t])

    def reference(self) -> np.ndarray:
        """attn [rows, heads, head_dim]; appends to `plain`."""
        columns = self.heads * self.head_dim
        op = SimpleNamespace(**{**vars(self.case.op), "attrs": {**self.a, "splits": 1}})
        env = Env({op.inputs[0]: self.qkv, op.inputs[1]: self.rope, op.outputs[0]: np.zeros((self.rows, columns), np.float32)}, {op.inputs[2]: self.plain},
                  self.step, lambda name: self.weights.tensors[name], self.case.graph)
        importlib.import_module("mpk.tasks.rotary_attention.reference").run(op, Task(0, 0, op.kind, 0, self.kv_heads, (), ()), env)
        return env.buffers[op.outputs[0]].reshape(self.rows, self.heads, self.head_dim)

    def execute(self, blocks: int, max_rows: int, emulated: bool = False, late: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Output as the device left it, float32, and the pages of the cache; `late`: of inputs that come while they are polled."""
        kind, op = kind_of(self.case.op), self.case.op
        columns = self.heads * (self.head_dim if self.splits == 1 else self.splits * (self.head_dim + STATISTICS))
        out = np.full((max_rows, columns), POISON, np.float32)
        m = Machine(emulated, max_batch=self.slots, max_context=self.plain.shape[1], max_pages=self.cache.table.shape[1], num_pages=len(self.cache.pages))
        put_step(m, self.segments, self.step.tokens, self.step.logit_rows, max_rows)
        m.put("kv", self.cache.pages)
        m.put("page_table", self.cache.table)
        m.put("params", np.append(kind.params(op, self.case.graph, self.weights), np.float32(0)))
        m.buffers(("qkv", "rope", "out"), min(3, self.rows), qkv=to_bf16(self.qkv), rope=self.rope, out=to_bf16(out) if self.splits == 1 else out)
        if late:
            m.hold_back("qkv", "rope")
        m.run("rotary_attention", kind.variant(op, self.case.graph, "bf16"), kind.operands, spread(kind.tiles(op, self.case.graph), blocks))
        if self.splits == 1:
            assert m.is_cleared("out")  # partial results are cleared by who reads them
        return from_bf16(m.get("out")) if self.splits == 1 else m.get("out"), m.get("kv")

    def merged(self, out: np.ndarray) -> np.ndarray:
        """attn [rows, heads, head_dim] of what the device left; places of splits without work must be untouched."""
        if self.splits == 1:
            return out[: self.rows].reshape(self.rows, self.heads, self.head_dim)
        buffer = out.reshape(len(out), self.kv_heads, self.splits, self.group, self.head_dim + STATISTICS)
        places = partial_places(self.segments, self.group, self.window, self.head_dim, self.splits, len(out))
        parts, used = gathered(buffer, places, self.head_dim)
        assert (buffer.transpose(0, 2, 1, 3, 4)[~used].view(np.uint32) == np.array(POISON).view(np.uint32)).all(), f"{self.case.label}: a place without work was written"
        parts = parts[..., : self.head_dim + 2]
        top = parts[..., -2].max(axis=1, keepdims=True)
        scale = np.exp(parts[..., -2] - top)
        total = (scale * parts[..., -1]).sum(axis=1)
        merged: np.ndarray = (scale[..., None] * parts[..., :-2]).sum(axis=1) / total[..., None]
        return merged.reshape(self.rows, self.heads, self.head_dim)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ATTENTION, ids=lambda c: c.label)
def test_attention_rotates_appends_and_attends_as_its_reference(case: Case) -> None:
    for segments, max_rows in ((s, m) for s in case.steps for m in sorted({sum(rows for _, _, rows in s), MAX_ROWS})):
        run = Attention(case, segments)
        tiles, label = run.kv_heads * run.splits, f"{case.label} {segments} of {max_rows} rows"
        out, pages = run.execute(tiles, max_rows)
        again, pages_again = run.execute(max(1, tiles // 3), max_rows)
        assert np.array_equal(out.view(np.uint32), again.view(np.uint32)), f"{label}: bits depend on the distribution of tiles"
        assert np.array_equal(pages, pages_again)
        expected, actual = run.reference(), run.merged(out)
        distance = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
        assert distance < 8e-3, f"{label}: {distance}"
        after = PagedCache(run.slots, run.plain.shape[1], run.kv_heads, run.head_dim)
        after.pages = pages
        for slot, position in zip(run.step.slots.tolist(), run.step.positions.tolist(), strict=True):
            np.testing.assert_allclose(after.get(slot, position), run.plain[slot, position], 2.0**-7, 1e-4)
            run.cache.put(slot, position, after.get(slot, position))
        assert np.array_equal(pages, run.cache.pages), f"{label}: cache changed outside its region"


def test_a_warp_with_more_blocks_than_lanes_looks_their_pages_up_again() -> None:
    case = next(c for c in ATTENTION if c.op.attrs["splits"] == 3 and c.op.attrs["head_dim"] == 24)
    run = Attention(case, ((0, 25400, 1), (1, 9, 1)))  # 795 blocks of 32 positions on 3 splits
    out, _ = run.execute(2, MAX_ROWS, emulated=True)
    expected, actual = run.reference(), run.merged(out)
    assert np.linalg.norm(actual - expected) / np.linalg.norm(expected) < 8e-3


@pytest.mark.parametrize("case", [c for c in ATTENTION if c.op.attrs["splits"] in (3, 33)], ids=lambda c: c.label)
def test_attention_takes_inputs_that_come_late_and_in_any_order(case: Case) -> None:
    for segments in (case.steps[2], case.steps[3], case.steps[5], case.steps[6], *DECODING[:2], DECODING[-1]):
        run = Attention(case, segments)
        (out, pages), (expected, expected_pages) = (run.execute(2, MAX_ROWS, True, late) for late in (True, False))
        assert np.array_equal(out.view(np.uint32), expected.view(np.uint32)) and np.array_equal(pages, expected_pages), f"{segments}"


@pytest.mark.parametrize("splits", [3, 33])
def test_combine_takes_partial_results_that_come_late_and_in_any_order(splits: int) -> None:
    case = next(c for c in COMBINE if c.op.attrs["splits"] == splits)
    heads, kv_heads, head_dim = (int(case.op.attrs[n]) for n in ("heads", "kv_heads", "head_dim"))
    for segments in (case.steps[2], ((0, 3, 2), (1, 90, 3)), DECODING[0], DECODING[-1]):
        step = step_view(segments, 33)
        rng = np.random.default_rng(2)
        partial = rng.standard_normal((MAX_ROWS, kv_heads, splits, heads // kv_heads, head_dim + STATISTICS), dtype=np.float32)
        partial[..., -3] = np.abs(partial[..., -3]) + 1
        results = []
        for late in (True, False):
            m = Machine(emulated=True, max_batch=MAX_ROWS)
            put_step(m, segments, step.tokens, step.logit_rows, MAX_ROWS)
            m.buffers(("partial", "out"), 0, partial=partial, out=np.zeros((len(step.tokens), heads * head_dim), np.uint16))
            if late:
                m.hold_back("partial")
            m.run("attention_combine", kind_of(case.op).variant(case.op, case.graph, "bf16"), kind_of(case.op).operands, spread(heads, 2))
            results.append(m.get("out"))
        assert np.array_equal(results[0], results[1]), f"{segments}"


@pytest.mark.gpu
@pytest.mark.parametrize("case", COMBINE, ids=lambda c: c.label)
def test_combine_merges_the_splits_that_have_work(case: Case) -> None:
    a, kind = case.op.attrs, kind_of(case.op)
    heads, kv_heads, head_dim, splits = (int(a[n]) for n in ("heads", "kv_heads", "head_dim", "splits"))
    for segments, form in ((s, f) for s in case.steps for f in (False, True)):
        step = step_view(segments, 33)
        rows = len(step.tokens)
        max_rows = max(rows, MAX_ROWS) if form else rows  # with room for it, a step that only decodes has a form of its own
        rng = np.random.default_rng(2)
        buffer = rng.standard_normal((max_rows, kv_heads, splits, heads // kv_heads, head_dim + STATISTICS), dtype=np.float32)
        buffer[..., -3] = np.abs(buffer[..., -3]) + 1
        places = partial_places(segments, heads // kv_heads, int(a["window"]), head_dim, splits, max_rows)
        parts, used = gathered(buffer, places, head_dim)
        work = used[:, None, :, None, None]
        held = np.where(work, buffer, POISON)
        attrs = {**a, "share_rows": False, "splits": parts.shape[1]}
        op = SimpleNamespace(**{**vars(case.op), "attrs": attrs})
        partial = parts.transpose(0, 2, 1, 3, 4).reshape(rows, -1)
        env = Env({case.op.inputs[0]: partial, case.op.outputs[0]: np.zeros((rows, heads * head_dim), np.float32)}, {}, step, lambda _: np.zeros(0, np.float32), case.graph)
        importlib.import_module("mpk.tasks.attention_combine.reference").run(op, Task(0, 0, op.kind, 0, heads, (), ()), env)
        for blocks in (heads, 2, 1):
            m = Machine(max_batch=4)
            put_step(m, segments, step.tokens, step.logit_rows, max_rows)
            m.buffers(("partial", "out"), min(2, rows), partial=held, out=np.zeros((rows, heads * head_dim), np.uint16))
            m.run("attention_combine", kind.variant(case.op, case.graph, "bf16"), kind.operands, spread(heads, blocks))
            assert m.is_cleared("out")
            np.testing.assert_allclose(from_bf16(m.get("out")), env.buffers[case.op.outputs[0]], 2.0**-7, 1e-5)
            left = m.get("partial").view(np.uint32)
            assert (np.where(work, left, 0xFFFFFFFF)[..., : head_dim + 2] == 0xFFFFFFFF).all(), "what was read is empty again"
            assert (np.where(work, held, left.view(np.float32)).view(np.uint32)[..., : head_dim + 2] == held.view(np.uint32)[..., : head_dim + 2]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("case", EMBED, ids=lambda c: c.label)
def test_embeddings_are_copied_bit_for_bit(case: Case) -> None:
    hidden, kind = int(case.op.attrs["hidden"]), kind_of(case.op)
    matrix = to_bf16(RandomWeights(case, "bf16").tensors["embedding"])
    for segments in case.steps:
        step = step_view(segments, len(matrix))
        m = Machine(max_batch=4)
        put_step(m, segments, step.tokens, step.logit_rows, len(step.tokens))
        m.put("weights", matrix)
        m.buffers(("x",), min(2, len(step.tokens)), x=np.zeros((len(step.tokens), hidden), np.uint16))
        tiles = kind.tiles(case.op, case.graph)
        m.run("embed", kind.variant(case.op, case.graph, "bf16"), kind.operands, spread(tiles, min(3, tiles)))
        assert np.array_equal(m.get("x"), matrix[step.tokens]) and m.is_cleared("x")


@pytest.mark.gpu
@pytest.mark.parametrize("case", ROPE, ids=lambda c: c.label)
def test_rotation_table_is_accurate_at_any_position(case: Case) -> None:
    kind, head_dim = kind_of(case.op), int(case.op.attrs["head_dim"])
    for segments in (*case.steps, ((0, 131071, 1), (1, 40000, 3))):
        step = step_view(segments, 33)
        rows = len(step.tokens)
        m = Machine(max_batch=4)
        put_step(m, segments, step.tokens, step.logit_rows, rows)
        m.put("params", kind.params(case.op, case.graph, RandomWeights(case, "bf16")))
        m.buffers(("rope",), min(2, rows), rope=np.zeros((rows, head_dim), np.float32))
        m.run("rope_table", kind.variant(case.op, case.graph, "bf16"), kind.operands, [(0, 1)])
        frequencies, factor = case.graph.config.rope.inverse_frequencies(head_dim)
        angles = (step.positions.astype(np.float32)[:, None] * frequencies[None]).astype(np.float64)
        expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * factor
        assert np.abs(m.get("rope") - expected).max() < 4e-7 and m.is_cleared("rope")


# ---- sampling
def put_sampling(m: Machine, sequences: np.ndarray, slots: np.ndarray, constants: Mapping[str, Scalar]) -> None:
    """What sampling needs besides logits and tokens: the sequences, pages, and which of the rows of logits (of `slots`) are drawn or special."""
    vocab = int(constants["vocab"])
    drawn = special = 0
    for row, s in enumerate(sequences[slots]):
        filtered = 0 < s["top_k"] < vocab or s["top_p"] < 1 or s["min_p"] > 0
        penalised = s["repetition_penalty"] != 1 or s["presence_penalty"] != 0 or s["frequency_penalty"] != 0
        drawn |= int(s["temperature"] > 0) << row
        special |= int(s["all_logits"] or penalised or s["top_logprobs"] >= 0 or (s["temperature"] > 0 and filtered)) << row
    m.launch["drawn_rows"], m.launch["special_rows"] = drawn, special
    m.put("sequences", sequences)
    m.put("messages", np.zeros((16, 4), np.uint32))
    for name, count in (("page_table", 64 * len(sequences)), ("free_pages", 64 * len(sequences)), ("free_page_count", 1), ("cancel", 1)):
        m.put(name, np.zeros(count, np.int32))
    m.launch["max_pages"] = 64


def sample(m: Machine, constants: Mapping[str, Scalar], logits: np.ndarray, batch: int, blocks: int = 0, first: str = "head") -> None:
    """`first`, the head behind its product or `logit_slices`, then `sample` and `advance`."""
    parts, rows = int(constants["parts"]), max(len(logits), 1)
    m.buffers(logits=logits, choice=np.zeros((batch, MESSAGE_COLUMNS), np.int32), tops=np.zeros((rows, parts * MESSAGE_COLUMNS), np.float32),
              parts=np.full((rows, parts * PART_COLUMNS), POISON, np.float32), values=np.full((rows, int(constants["vocab"])), POISON, np.float32))
    m.run(first, constants, ("", "logits", "tops", "parts", "values"), spread(parts, blocks or parts))
    m.run("sample", constants, ("logits", "choice", "parts", "values"), spread(batch, batch))
    m.run("advance", constants, ("choice", "tops", "logits"), [(0, 1)])


class Sampling:
    """Sequences of a batch with a row of logits each; slot s has logits[s], and `histories[s]` = (prompt, output)."""

    def __init__(self, logits: np.ndarray, histories: list[tuple[list[int], list[int]]], options: list[TokenOptions], workers: int,
                 top_logprobs: list[int] | None = None, first: str = "head") -> None:
        self.batch, self.vocab = logits.shape
        constants = sliced(self.vocab, workers)
        lengths = np.array([len(p) + len(o) for p, o in histories])
        context = int(lengths.max()) + 1
        self.m = Machine(max_batch=self.batch, max_context=context)
        sequences, tokens = np.zeros(self.batch, layout.dtype("Sequence")), np.zeros((self.batch, context), np.int32)
        for slot, ((prompt, output), o) in enumerate(zip(histories, options, strict=True)):
            s = sequences[slot : slot + 1]
            for name, value in vars(o).items():
                s[name] = value
            s["active"], s["prompt_length"], s["length"] = 1, len(prompt), lengths[slot]
            s["max_length"], s["computed"] = lengths[slot] + 1, lengths[slot] - 1
            s["top_logprobs"] = -1 if top_logprobs is None else top_logprobs[slot]
            tokens[slot, : lengths[slot]] = [*prompt, *output]
        order = np.random.default_rng(4).permutation(self.batch).astype(np.int32)  # logit row l belongs to row order[l], that is to its slot
        put_step(self.m, [(slot, int(lengths[slot]) - 1, 1) for slot in range(self.batch)], np.zeros(self.batch, np.int32), order, self.batch)
        put_sampling(self.m, sequences, order, constants)
        self.m.put("tokens", tokens)
        self.m.put("chosen_logprob", np.zeros((self.batch, context), np.float32))
        self.m.put("top_logprob", np.zeros((self.batch, context, layout.MAX_TOP_LOGPROBS), np.float32))
        self.m.put("top_token", np.zeros((self.batch, context, layout.MAX_TOP_LOGPROBS), np.int32))
        sample(self.m, constants, logits[order], self.batch, first=first)
        chosen, finish = self.m.get("tokens")[np.arange(self.batch), lengths], self.m.get("sequences")["finish"]
        self.choice = np.where(finish == layout.FINISH["error"], -1, chosen)
        assert set(finish.tolist()) <= {layout.FINISH["error"], layout.FINISH["length"]}


def history(rng: np.random.Generator, vocab: int) -> tuple[list[int], list[int]]:
    return rng.integers(0, vocab, int(rng.integers(1, 40))).tolist(), rng.integers(0, min(vocab, 9), int(rng.integers(0, 20))).tolist()


def check_choice(token: int, logits: np.ndarray, prompt: list[int], output: list[int], o: TokenOptions) -> None:
    """The reference's token, or one whose interval of the cumulative distribution lies within rounding of the draw."""
    assert 0 <= token < len(logits)
    if o.temperature == 0:
        x = sampling.penalized(logits, prompt, output, o)
        assert x[token] >= x.max() - 1e-6 * abs(x.max()), (token, int(np.argmax(x)))
        return
    p = sampling.distribution(logits, prompt, output, o)
    end = np.cumsum(p)
    u = sampling.philox_uniform(o.seed, len(prompt) + len(output))
    slack = 1e-5 + 0.002 * (o.top_p < 1 or o.min_p > 0)  # a filter's edge may fall on the other side of one token
    assert end[token] - p[token] - slack <= u <= end[token] + slack, (token, o, u, end[token] - p[token], end[token])


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "workers"), SLICED)
def test_choices_follow_the_rules_of_the_reference(vocab: int, workers: int) -> None:
    rng = np.random.default_rng(8)
    for scale in (1.0, 4.0):
        options = [TokenOptions(**{**vars(o), "seed": int(rng.integers(2**62))}) for o in OPTIONS * 2]
        logits = (rng.standard_normal((len(options), vocab)) * scale).astype(np.float32)
        histories = [history(rng, vocab) for _ in options]
        run = Sampling(logits, histories, options, workers)
        for slot, o in enumerate(options):
            check_choice(int(run.choice[slot]), logits[slot], *histories[slot], o)


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "workers", "count"), [(33, 132, 1), (1000, 3, 2), (1000, 3, 16), (5000, 7, 3), (5000, 7, 5)])
def test_slices_of_logits_in_memory_leave_what_the_head_leaves(vocab: int, workers: int, count: int) -> None:
    """Few rows are shared among warps, more are not; several slices a task."""
    rng = np.random.default_rng(9)
    options = [TokenOptions(**{**vars(OPTIONS[s % len(OPTIONS)]), "seed": int(rng.integers(2**62))}) for s in range(count)]
    logits = rng.standard_normal((count, vocab)).astype(np.float32)
    histories = [history(rng, vocab) for _ in options]
    runs = [Sampling(logits, histories, options, workers, first=first) for first in ("head", "logit_slices")]
    assert np.array_equal(runs[0].choice, runs[1].choice)
    parts = int(sliced(vocab, workers)["parts"])
    tops = [run.m.get("tops").view(np.uint32).reshape(count, parts, MESSAGE_COLUMNS) for run in runs]
    assert np.array_equal(tops[0][..., [0, 1, 3]], tops[1][..., [0, 1, 3]])
    assert np.allclose(tops[0][..., 2].view(np.float32), tops[1][..., 2].view(np.float32), rtol=1e-5)


@pytest.mark.gpu
def test_a_single_sequence_draws_each_token_as_often_as_its_probability() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]])).astype(np.float32)
    counts = np.zeros(4, int)
    for seed in range(60):
        counts[Sampling(logits, [([0], [])], [TokenOptions(temperature=1.0, seed=seed)], 132).choice[0]] += 1
    expected = [int(sampling.choose(logits[0], [0], [], TokenOptions(temperature=1.0, seed=seed))) for seed in range(60)]
    assert counts.tolist() == np.bincount(expected, minlength=4).tolist()


@pytest.mark.gpu
def test_ties_keep_the_lowest_tokens_in_a_nucleus_and_all_tokens_in_top_k() -> None:
    logits, vocab = np.zeros((16, 5000), np.float32), 5000
    options = [TokenOptions(temperature=1.0, top_p=0.1, seed=s) for s in range(8)] + [TokenOptions(temperature=1.0, top_k=3, seed=s) for s in range(8)]
    choice = Sampling(logits, [([0], [])] * 16, options, 132).choice
    expected = [sampling.choose(logits[0], [0], [], o) for o in options]
    assert np.abs(choice - expected).max() <= 1
    assert choice[:8].max() < vocab // 10 and choice[8:].max() > vocab // 10


@pytest.mark.gpu
def test_logits_without_a_finite_maximum_give_no_token() -> None:
    logits = np.zeros((3, 300), np.float32)
    logits[0], logits[1, 7], logits[2, 5] = np.nan, np.inf, np.nan
    logits[2, 6] = 1.0
    for o in (TokenOptions(), TokenOptions(temperature=1.0, top_k=2), TokenOptions(temperature=0.01)):
        choice = Sampling(logits, [([0], [])] * 3, [o] * 3, 132).choice
        assert choice[:2].tolist() == [-1, -1]
        assert choice[2] == 6 or o.top_k == 2


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "workers"), SLICED)
def test_log_probabilities_are_those_of_the_logits_as_they_came_in(vocab: int, workers: int) -> None:
    rng = np.random.default_rng(9)
    logits = (rng.standard_normal((4, vocab)) * 3).astype(np.float32)
    logits[1] = np.round(logits[1])  # many ties
    histories = [history(rng, vocab) for _ in range(4)]
    options = [TokenOptions(), TokenOptions(repetition_penalty=1.5), TokenOptions(temperature=0.8, top_k=9, seed=5), TokenOptions()]
    tops = [20, 20, 5, 0]
    run = Sampling(logits, histories, options, workers, tops)
    chosen, top, ids = (run.m.get(n) for n in ("chosen_logprob", "top_logprob", "top_token"))
    for slot in range(4):
        place, x = sum(len(part) for part in histories[slot]), logits[slot].astype(np.float64)
        expected = x - x.max() - np.log(np.exp(x - x.max()).sum())
        check_choice(int(run.choice[slot]), logits[slot], *histories[slot], options[slot])
        assert chosen[slot, place] == pytest.approx(expected[run.choice[slot]], abs=2e-5)
        order = np.argsort(-x, kind="stable")[: tops[slot]]
        assert ids[slot, place, : len(order)].tolist() == order.tolist()
        np.testing.assert_allclose(top[slot, place, : len(order)], expected[order], atol=2e-5)


def all_logits_machine(segments: list[tuple[int, int, int]], rows: int, logit_rows: np.ndarray, all_logits: list[int], lengths: list[int]) -> Machine:
    """Two sequences with options that change nothing; the tokens that are chosen are appended to zeros."""
    m = Machine(max_batch=2, max_context=16, logits_out_positions=16)
    put_step(m, segments, np.zeros(rows, np.int32), logit_rows, rows)
    sequences = np.zeros(2, layout.dtype("Sequence"))
    sequences["top_logprobs"], sequences["all_logits"], sequences["length"], sequences["max_length"] = -1, all_logits, lengths, 16
    sequences["repetition_penalty"] = sequences["top_p"] = sequences["active"] = 1
    slots = np.array([slot for slot, _, count in segments for _ in range(count)], np.int32)
    put_sampling(m, sequences, slots[logit_rows], sliced(1000, 3))
    m.put("tokens", np.full((2, 16), -1, np.int32))
    m.put("logits_out", np.zeros((2, 16, 1000), np.float32))
    return m


@pytest.mark.gpu
@pytest.mark.parametrize("logit_rows", [0, 3])
def test_steps_without_a_row_to_sample_from_choose_nothing(logit_rows: int) -> None:
    """A prompt chunk that is not the last one has no row of logits; a sequence that keeps all of them has no choice to make."""
    m = all_logits_machine([(1, 4, 3)], 3, np.arange(logit_rows, dtype=np.int32), [1, 1], [20, 20])
    logits = np.random.default_rng(3).standard_normal((3, 1000)).astype(np.float32)
    sample(m, sliced(1000, 3), logits, 2)
    assert (m.get("tokens") == -1).all() and not m.get("choice").any()
    assert np.array_equal(m.get("logits_out")[1, 4 : 4 + logit_rows], logits[:logit_rows])


@pytest.mark.gpu
def test_all_logits_are_kept_where_a_sequence_asks_for_them() -> None:
    m = all_logits_machine([(1, 4, 3), (0, 9, 1)], 4, np.arange(4, dtype=np.int32), [0, 1], [10, 7])
    logits = np.random.default_rng(3).standard_normal((4, 1000)).astype(np.float32)
    sample(m, sliced(1000, 3), logits, 2, blocks=2)
    assert np.array_equal(m.get("logits_out")[1, 4:7], logits[:3])
    assert not m.get("logits_out")[0].any()
    assert m.get("tokens")[0, 10] == np.argmax(logits[3]) and (m.get("tokens")[1] == -1).all()
    assert m.get("sequences")["finish"].tolist() == [layout.FINISH["running"], layout.FINISH["length"]]


@pytest.mark.gpu
def test_a_flat_distribution_with_more_candidates_than_fit_is_filtered_all_the_same() -> None:
    rng = np.random.default_rng(12)
    logits = (rng.standard_normal((8, 60000)) * 0.3).astype(np.float32)
    options = [TokenOptions(temperature=1.5, top_p=0.97, seed=s) for s in range(4)] + [TokenOptions(temperature=1.5, top_k=20000, top_p=0.9, seed=s) for s in range(4)]
    choice = Sampling(logits, [([0], [])] * 8, options, 132).choice
    for slot, o in enumerate(options):
        check_choice(int(choice[slot]), logits[slot], [0], [], o)


def test_sliced_vocabularies_are_covered_once() -> None:
    for vocab, workers in SLICED:
        parts, size = slices(vocab, workers)
        assert (parts - 1) * size < vocab <= parts * size and size % 16 == 0 and parts <= workers


def test_reference_of_rotary_attention_is_attention_for_any_number_of_splits() -> None:
    """Partial results of all splits merge to the same as one split, on the reference executor's side."""
    case = next(c for c in ATTENTION if int(c.op.attrs["splits"]) > 2)
    run = Attention(case, ((0, 100, 3),))
    step: StepView = run.step
    width = run.heads * run.splits * (run.head_dim + STATISTICS)
    env = Env({case.op.inputs[0]: run.qkv, case.op.inputs[1]: run.rope, case.op.outputs[0]: np.zeros((run.rows, width), np.float32)},
              {case.op.inputs[2]: run.plain}, step, lambda name: run.weights.tensors[name], case.graph)
    module = importlib.import_module("mpk.tasks.rotary_attention.reference")
    module.run(case.op, Task(0, 0, case.op.kind, 0, run.kv_heads * run.splits, (), ()), env)
    parts = env.buffers[case.op.outputs[0]].reshape(run.rows, run.kv_heads, run.splits, run.group, run.head_dim + STATISTICS)
    scale = np.exp(parts[..., run.head_dim] - parts[..., run.head_dim].max(axis=2, keepdims=True))
    merged = (scale[..., None] * parts[..., : run.head_dim]).sum(axis=2) / (scale * parts[..., run.head_dim + 1]).sum(axis=2)[..., None]
    np.testing.assert_allclose(merged.reshape(run.rows, run.heads, run.head_dim), run.reference(), 1e-4, 1e-5)
