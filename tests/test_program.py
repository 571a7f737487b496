"""The persistent program on the toy model, whose every token is known: generation, streaming, refusals, stalls."""

from __future__ import annotations

import _thread
import copy
import itertools
import mmap
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from mpk.codegen import layout
from mpk.codegen.compile import compile_program
from mpk.codegen.program import BACKEND, ProgramBuilder, ProgramSource
from mpk.codegen.weights import load_weights
from mpk.errors import InternalError, RequestError, StallError, TargetError
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.runtime import state
from mpk.runtime.engine import Engine, Program
from mpk.runtime.instance import Instance
from mpk.tasks.sample import reference
from mpk.tasks.sample.options import TokenOptions
from tests.support.toy import EOS, ToySource, toy_graph
from tests.support.toy_engine import toy_engine, toy_kinds

VOCAB = 97
PROMPTS = [[1, 2, 5], [7] * 20, [9], [4, 4, 90, 2, 1, 1, 1, 1, 8, 9]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with toy_kinds(tmp_path_factory.mktemp("cache")):
        yield toy_engine(toy_graph())


def with_graph(engine: Engine, graph: SMTaskGraph) -> Engine:
    """The same compiled program and weights with the order of tasks of another graph (queues, events, rows)."""
    graph.param_offsets = engine.graph.param_offsets
    return Engine(graph, Program(engine.program.library, ProgramBuilder(graph).tables(), engine.program.scratch_bytes), engine.weights)


def greedy(prompt: Sequence[int], count: int, stop: Sequence[int] = (EOS,)) -> list[int]:
    source, tokens = ToySource(VOCAB), list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(int(np.argmax(source.logits(tokens))))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


# ---- generation
@pytest.mark.parametrize("workers", [1, 2, 3, 9])
def test_greedy_tokens_are_those_of_the_model_for_any_number_of_workers(engine: Engine, workers: int) -> None:
    instance = with_graph(engine, toy_graph(workers=workers)).create_instance()
    result = instance.generate(PROMPTS, max_new_tokens=[5, 100, 9, 40], stop_tokens=[])
    assert result.tokens == [greedy(p, n, ()) for p, n in zip(PROMPTS, [5, 100, 9, 40], strict=True)]
    assert result.finish_reasons == ["length"] * 4
    assert result.prompt_tokens == [3, 20, 1, 10]


@pytest.mark.parametrize("max_rows", [4, 5, 64])
def test_chunks_of_a_prompt_do_not_change_the_tokens(engine: Engine, max_rows: int) -> None:
    prompts = [[int(t) for t in np.random.default_rng(n).integers(0, VOCAB, n)] for n in (1, 4, 63, 130)]
    instance = with_graph(engine, toy_graph(max_rows=max_rows)).create_instance()
    assert instance.generate(prompts, max_new_tokens=70, stop_tokens=[]).tokens == [greedy(p, 70, ()) for p in prompts]


def test_a_stop_token_ends_its_sequence_and_is_kept(engine: Engine) -> None:
    expected = greedy(PROMPTS[1], 400)
    assert expected[-1] == EOS and len(expected) < 400
    result = engine.create_instance().generate([PROMPTS[1], PROMPTS[0]], max_new_tokens=[400, 3], stop_tokens=None)
    assert (result.tokens[0], result.finish_reasons[0]) == (expected, "stop")
    own = greedy(PROMPTS[0], 50, ())[7]
    result = engine.create_instance().generate(PROMPTS[0], max_new_tokens=50, stop_tokens=[own, 96])
    assert result.finish_reasons == ["stop"] and result.tokens[0] == greedy(PROMPTS[0], 50, (own, 96))


def test_every_page_is_free_again_after_a_run(engine: Engine) -> None:
    instance = engine.create_instance()
    for count in (1, 64, 65, 300):
        instance.generate(PROMPTS, max_new_tokens=count, stop_tokens=[])
        assert int(instance.state.free_page_count[0]) == instance.state.num_pages == 4 * 8
        assert sorted(instance.state.free_pages[: instance.state.num_pages]) == list(range(instance.state.num_pages))


def test_forward_gives_the_logits_of_every_position(engine: Engine) -> None:
    prompts = np.random.default_rng(0).integers(0, VOCAB, (3, 77))
    logits = engine.create_instance().forward(prompts)
    source = ToySource(VOCAB)
    assert logits.shape == (3, 77, VOCAB) and logits.dtype == np.float32
    for b in range(3):
        for t in range(77):
            assert (logits[b, t] == source.logits(prompts[b, : t + 1])).all()


def test_forward_takes_and_gives_torch_tensors(engine: Engine) -> None:
    torch = pytest.importorskip("torch")
    given = torch.tensor([[1, 2, 3]])
    logits = engine.create_instance().forward(given)
    assert isinstance(logits, torch.Tensor) and logits.shape == (1, 3, VOCAB)
    assert (logits[0, 2].numpy() == ToySource(VOCAB).logits([1, 2, 3])).all()


def test_sampled_tokens_follow_the_numpy_model_and_not_the_batch(engine: Engine) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2,
                               "presence_penalty": 0.3, "frequency_penalty": 0.2}
    alone = [engine.create_instance(max_batch=1).generate(p, max_new_tokens=30, seed=s, stop_tokens=[], **options).tokens[0]
             for s, p in enumerate(PROMPTS)]
    together = engine.create_instance().generate(PROMPTS, max_new_tokens=30, seed=[0, 1, 2, 3], stop_tokens=[], **options)
    assert together.tokens == alone
    source, o = ToySource(VOCAB), TokenOptions(**options, seed=3)
    agree = sum(reference.choose(source.logits(PROMPTS[3] + alone[3][:i]), PROMPTS[3], alone[3][:i], o) == alone[3][i] for i in range(30))
    assert agree >= 29  # float32 against float64 at a boundary
    assert engine.create_instance(max_batch=1).generate(PROMPTS[3], max_new_tokens=30, seed=4, stop_tokens=[], **options).tokens[0] != alone[3]


def test_options_are_those_of_each_sequence(engine: Engine) -> None:
    result = engine.create_instance().generate([PROMPTS[0]] * 3, max_new_tokens=[4, 8, 12], temperature=[0.0, 2.0, 0.0],
                                               stop_tokens=[[], [], [greedy(PROMPTS[0], 12, ())[5]]], seed=1)
    assert result.tokens[0] == greedy(PROMPTS[0], 4, ())
    assert len(result.tokens[1]) == 8 and result.tokens[1] != greedy(PROMPTS[0], 8, ())
    assert result.tokens[2] == greedy(PROMPTS[0], 6, ())


def test_log_probabilities_of_chosen_and_best_tokens(engine: Engine) -> None:
    result = engine.create_instance().generate(PROMPTS[:2], max_new_tokens=6, temperature=1.0, logprobs=[4, None], stop_tokens=[])
    assert result.logprobs is not None and result.logprobs[1] == []
    tokens = list(PROMPTS[0])
    for entry, token in zip(result.logprobs[0], result.tokens[0], strict=True):
        x = ToySource(VOCAB).logits(tokens).astype(np.float64)
        exact = x - np.log(np.exp(x - x.max()).sum()) - x.max()
        assert entry.token == token and entry.logprob == pytest.approx(exact[token], abs=1e-5)
        assert [t for t, _ in entry.top] == np.argsort(-x, kind="stable")[:4].tolist()
        assert [p for _, p in entry.top] == pytest.approx(np.sort(exact)[::-1][:4], abs=1e-5)
        tokens.append(token)


def test_fifty_runs_give_the_same_bits(engine: Engine) -> None:
    instance = engine.create_instance()
    first = instance.generate(PROMPTS, max_new_tokens=20, temperature=0.9, seed=3, stop_tokens=[], logprobs=2)
    for _ in range(49):
        again = instance.generate(PROMPTS, max_new_tokens=20, temperature=0.9, seed=3, stop_tokens=[], logprobs=2)
        assert (again.tokens, again.logprobs, again.steps) == (first.tokens, first.logprobs, first.steps)


def test_times_are_those_of_each_token(engine: Engine) -> None:
    start = time.perf_counter()
    result = engine.create_instance().generate(PROMPTS[:2], max_new_tokens=[3, 50], stop_tokens=[])
    took = (time.perf_counter() - start) * 1e3
    assert [len(t) for t in result.token_ms] == [3, 50]
    assert all(a <= b for times in result.token_ms for a, b in itertools.pairwise(times))
    assert 0 < result.first_token_ms == min(t[0] for t in result.token_ms) < took
    assert result.ms_per_token == pytest.approx((result.token_ms[1][-1] - result.token_ms[1][0]) / 49)
    assert result.steps == 4 + 49  # the prompt of 20 is read in 5 + 7 + 7 + 1 rows beside the other sequence's


# ---- streaming and interrupts
def test_tokens_stream_while_the_program_runs(engine: Engine) -> None:
    slow = with_graph(engine, toy_graph(context=20000))
    seen: list[tuple[int, int]] = []
    running: list[bool] = []
    instance = slow.create_instance()

    def on_token(slot: int, token: int) -> None:
        seen.append((slot, token))
        running.append(int(instance.state.step[0]["done"]) == 0)

    result = instance.generate(PROMPTS[:2], max_new_tokens=[8000, 10], stop_tokens=[], on_token=on_token)
    assert [[t for s, t in seen if s == slot] for slot in (0, 1)] == result.tokens
    assert any(running)


@pytest.mark.parametrize("streaming", [True, False])
def test_an_interrupt_returns_what_there_is(engine: Engine, streaming: bool) -> None:
    instance = with_graph(engine, toy_graph(context=200000)).create_instance()
    timer = threading.Timer(0.15, _thread.interrupt_main)
    timer.start()
    result = instance.generate(PROMPTS[:2], max_new_tokens=[190000, 2], stop_tokens=[], on_token=(lambda s, t: None) if streaming else None)
    timer.join()
    assert result.finish_reasons == ["cancelled", "length"]
    assert 0 < len(result.tokens[0]) < 190000 and len(result.tokens[1]) == 2
    assert result.tokens[0][:50] == greedy(PROMPTS[0], 50, ())
    assert instance.generate(PROMPTS[0], max_new_tokens=3, stop_tokens=[]).tokens[0] == greedy(PROMPTS[0], 3, ())


def test_an_error_in_the_callback_stops_the_program(engine: Engine) -> None:
    instance = with_graph(engine, toy_graph(context=200000)).create_instance()

    def on_token(slot: int, token: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        instance.generate(PROMPTS[0], max_new_tokens=190000, stop_tokens=[], on_token=on_token)
    assert int(instance.state.sequences[0]["length"]) < 190000
    assert instance.generate(PROMPTS[0], max_new_tokens=3, stop_tokens=[]).tokens[0] == greedy(PROMPTS[0], 3, ())


def test_a_second_call_at_the_same_time_is_refused(engine: Engine) -> None:
    instance = engine.create_instance()

    def on_token(slot: int, token: int) -> None:
        with pytest.raises(RequestError, match="another call"):
            instance.generate([1])

    assert instance.generate(PROMPTS[0], max_new_tokens=2, on_token=on_token, stop_tokens=[]).tokens[0] == greedy(PROMPTS[0], 2, ())


# ---- refusals
@pytest.mark.parametrize(("prompts", "options", "message"), [
    ([], {}, "the batch holds no sequence, expected 1 to 4"),
    (np.zeros((0, 3), np.int64), {}, "the batch holds no sequence"),
    ([[1]] * 5, {}, "batch, expected at most 4 sequences, got 5"),
    ([[1], []], {}, "sequence 1: the prompt is empty"),
    ([[1], [2, 97]], {}, "sequence 1: token at place 1, expected an id from 0 to 96, got 97"),
    ([[-1]], {}, "sequence 0: token at place 0, expected an id from 0 to 96, got -1"),
    ([[1] * 500], {"max_new_tokens": 13}, "sequence 0: prompt and new tokens, expected at most 512 (the context), got 513"),
    ([[1.5]], {}, "sequence 0: prompt_tokens, expected whole numbers"),
    ("text", {}, "prompt_tokens, expected token ids"),
    ([[1]], {"max_new_tokens": 0}, "sequence 0: max_new_tokens, expected a whole number from 1, got 0"),
    ([[1], [1]], {"temperature": [0.0, -1.0]}, "sequence 1: temperature, expected a number from 0, got -1.0"),
    ([[1]], {"temperature": float("nan")}, "temperature"),
    ([[1]], {"top_k": -1}, "top_k"),
    ([[1]], {"top_p": 0.0}, "top_p, expected a number above 0 up to 1, got 0.0"),
    ([[1]], {"top_p": 1.1}, "top_p"),
    ([[1]], {"min_p": 1.1}, "min_p"),
    ([[1]], {"repetition_penalty": 0}, "repetition_penalty"),
    ([[1]], {"presence_penalty": float("inf")}, "presence_penalty"),
    ([[1]], {"seed": -1}, "seed"),
    ([[1]], {"logprobs": 21}, "logprobs, expected None or a whole number from 0 to 20, got 21"),
    ([[1]], {"stop_tokens": [97]}, "stop token, expected an id from 0 to 96, got 97"),
    ([[1]], {"stop_tokens": list(range(17))}, "stop_tokens, expected at most 16, got 17"),
    ([[1]], {"temperature": [0.0, 1.0]}, "option temperature, expected one value or 1 (one a sequence), got 2"),
    ([[1]], {"beams": 2}, "option beams; known options: frequency_penalty"),
    ([[1]], {"temperature": 1e-45}, "temperature, expected 0 or a size from 1.2e-38 to 3.4e+38, as it is used in float32, got 1e-45"),
    ([[1]], {"temperature": 1e39}, "temperature, expected 0 or a size"),
    ([[1]], {"temperature": 10**400}, "temperature, expected 0 or a size"),
    ([[1]], {"top_p": 1e-40}, "top_p, expected a size from"),
    ([[1]], {"repetition_penalty": 1e-40}, "repetition_penalty, expected a size from"),
    ([[1]], {"repetition_penalty": 1e39}, "repetition_penalty, expected a size from"),
    ([[1]], {"presence_penalty": -1e39}, "presence_penalty, expected 0 or a size"),
    ([[1]], {"frequency_penalty": 1e39}, "frequency_penalty, expected 0 or a size"),
    ([[1]], {"stop_tokens": 5}, "option stop_tokens, expected a list of ids, or a list of such lists, one a sequence, got 5"),
    ([[1]], {"stop_tokens": [[3], 5]}, "option stop_tokens, expected a list of ids, or a list of such lists, one a sequence, got [[3], 5]"),
    ([[1]], {"stop_tokens": "ab"}, "option stop_tokens, expected a list of ids"),
    ([[1]], {"on_token": 3}, "on_token, expected None or a function of (slot, token), got int"),
    (np.array([[1, 2**64 - 1]], np.uint64), {}, "token at place 1, expected an id from 0 to 96, got 18446744073709551615"),
    (np.ones((1, 3), np.float32), {}, "sequence 0: prompt_tokens, expected whole numbers in one dimension, got float32 in 1"),
])
def test_what_cannot_run_is_refused_in_one_line(engine: Engine, prompts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        engine.create_instance().generate(prompts, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"max_batch": 5}, "max_batch, expected 1 to 4, got 5"),
    ({"max_batch": 0}, "max_batch, expected 1 to 4, got 0"),
    ({"max_context": 513}, "max_context, expected 1 to 512"),
    ({"device_ids": [1]}, "device_ids, expected None or [0]"),
    ({"stall_limit_s": 0}, "stall_limit_s"),
    ({"stall_limit_s": "x"}, "stall_limit_s, expected a time above 0 up to 1e+09 s, got 'x'"),
    ({"stall_limit_s": float("inf")}, "stall_limit_s, expected a time above 0"),
    ({"stall_limit_s": float("nan")}, "stall_limit_s, expected a time above 0"),
    ({"max_batch": 1.5}, "max_batch, expected a whole number or None, got 1.5"),
    ({"max_batch": "2"}, "max_batch, expected a whole number or None, got '2'"),
    ({"max_context": True}, "max_context, expected a whole number or None, got True"),
    ({"device_ids": 0}, "device_ids, expected None or a list of whole numbers, got 0"),
    ({"device_ids": "0"}, "device_ids, expected None or a list of whole numbers, got '0'"),
    ({"trace_spans": -1}, "trace_spans, expected 0 (off) or more spans a worker, got -1"),
    ({"trace_spans": 10**12}, "trace_spans 1000000000000: "),
])
def test_instances_that_cannot_be_are_refused(engine: Engine, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((RequestError, TargetError), match=re.escape(message)):
        engine.create_instance(**arguments)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "complex64"])
def test_torch_tensors_that_are_not_ids_are_refused(engine: Engine, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tokens = torch.ones((1, 3), dtype=getattr(torch, dtype))
    for prompts in (tokens, [tokens[0]]):
        with pytest.raises(RequestError, match=rf"prompt_tokens, expected whole numbers, got torch.{dtype}$"):
            engine.create_instance().generate(prompts)


def test_too_long_a_prompt_is_told_what_would_help(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"^sequence 0: prompt, expected at most 512 \(the context\), got 513; a shorter prompt$"):
        engine.create_instance().forward([[1] * 513])
    with pytest.raises(RequestError, match=r"prompt, .* got 65; a shorter prompt or an instance with a larger max_context$"):
        engine.create_instance(max_context=64).forward([[1] * 65])
    with pytest.raises(RequestError, match=r"prompt and new tokens, .* got 513; a shorter prompt or fewer new tokens$"):
        engine.create_instance().generate([[1] * 500], max_new_tokens=13)


def test_forward_refuses_prompts_of_different_lengths(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"prompts of one length, got \[1, 2\]"):
        engine.create_instance().forward([[1], [1, 2]])


def test_a_cache_beyond_the_machines_memory_is_refused_with_numbers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    page = 64 * 16 * 4
    monkeypatch.setattr(state, "available_bytes", lambda: 12 * page)
    with pytest.raises(TargetError, match=r"sequences of 512 tokens: 0.00 GiB, .* max_context=128 fits"):
        engine.create_instance(max_context=512)
    instance = engine.create_instance()  # the model's context by default: as many pages as fit
    assert instance.state.num_pages == 10
    assert len(instance.generate([[1]] * 2, max_new_tokens=320, stop_tokens=[]).tokens[1]) == 320
    with pytest.raises(RequestError, match="key-value cache for 643 tokens"):
        instance.generate([[1]] * 2, max_new_tokens=[320, 321], stop_tokens=[])


# ---- the watchdog
def stalled(engine: Engine, kind: str) -> tuple[Engine, int, int]:
    """An engine in which the event that the first `kind` task waits for never gets enough signals; (task, event)."""
    graph = toy_graph()
    task = next(t for t in graph.tasks if t.kind == kind)
    event = graph.events[task.waits[-1]]
    assert event.id != 0
    event.threshold += 1
    return with_graph(engine, graph), task.id, event.id


def test_a_stall_names_worker_task_event_and_counts(engine: Engine) -> None:
    broken, task, event = stalled(engine, "advance")
    instance = broken.create_instance(stall_limit_s=0.3)
    start = time.perf_counter()
    with pytest.raises(StallError) as caught:
        instance.generate(PROMPTS, max_new_tokens=3)
    assert 0.3 <= time.perf_counter() - start < 2
    found = re.fullmatch(r"no progress for 0.3 s: worker (\d+) waits in step (\d+) at task (\d+) \((\w+), tiles \d+ to \d+\) for event (\d+), "
                         r"expected (\d+), seen (\d+)", str(caught.value))
    assert found is not None, str(caught.value)
    worker, step, at, operator, waited, expected, seen = found.groups()
    if int(waited) == 0:  # the other worker, which waits for the next step, noticed first
        assert (step, expected, seen) == ("2", "2", "1")
    else:
        threshold = broken.graph.events[event].threshold
        assert (int(worker), int(step), int(at), operator) == (broken.graph.tasks[task].worker, 1, task, "advance")
        assert (int(waited), int(expected), int(seen)) == (event, threshold, threshold - 1)


def test_a_run_longer_than_the_limit_is_no_stall(engine: Engine) -> None:
    instance = with_graph(engine, toy_graph(context=20000)).create_instance(stall_limit_s=0.05)
    start = time.perf_counter()
    result = instance.generate(PROMPTS[0], max_new_tokens=12000, stop_tokens=[])
    assert time.perf_counter() - start > 0.05 and len(result.tokens[0]) == 12000


# ---- the program itself
def test_source_depends_on_variants_and_not_on_workers_or_rows(engine: Engine) -> None:
    a, b = toy_graph(workers=1, max_rows=4), toy_graph(workers=5, max_rows=64, context=4096)
    assert ProgramBuilder(a).source().text == ProgramBuilder(b).source().text
    longer = copy.deepcopy(a)
    longer.tensor_graph.operators.insert(1, copy.deepcopy(longer.tensor_graph.operators[0]))
    assert ProgramBuilder(longer).source().text == ProgramBuilder(a).source().text
    assert "case 0: run_ToyAppend0" in ProgramBuilder(a).source().text
    assert ProgramBuilder(toy_graph(vocab=98)).source().text != ProgramBuilder(a).source().text


def test_tables_are_the_graphs_queues_waits_and_signals(engine: Engine) -> None:
    graph, tables = engine.graph, engine.program.tables
    assert tables.stream_begin.tolist() == [0, *np.cumsum([len(q) for q in graph.queues])]
    assert tables.instructions["task"].tolist() == [t for q in graph.queues for t in q]
    for row, prefetch in zip(tables.instructions, tables.prefetch, strict=True):
        task = graph.tasks[row["task"]]
        waits = tables.waits[row["wait_begin"] : row["wait_begin"] + row["wait_count"]]
        signals = tables.signals[row["signal_begin"] : row["signal_begin"] + row["signal_count"]]
        assert [tuple(w) for w in waits] == [(e, graph.events[e].threshold) for e in task.waits]
        assert [tuple(s) for s in signals] == [(e, 1) for e in task.signals]
        assert (row["tile_begin"], row["tile_end"], row["op"]) == (task.tile_begin, task.tile_end, task.op)
        if task.kind == "toy_logits":
            assert row["operand"].tolist() == [graph.arena["x"].offset, graph.arena["logits"].offset] + [-1] * 6
            assert (row["weights"], row["params"]) == (0, 0)
            assert tuple(prefetch) == (64 * task.tile_begin, 64 * (task.tile_end - task.tile_begin))
        else:
            assert (row["weights"], tuple(prefetch)) == (-1, (0, 0))


def test_layout_drift_does_not_compile(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ProgramSource('#include "mpk/layout.hpp"\n', (BACKEND / "include",))
    compile_program(source, extra_flags=("-O0",))
    header = layout.header()
    monkeypatch.setattr(layout, "header", lambda: header.replace("  int32_t rows;\n", "  int64_t rows;\n", 1))
    with pytest.raises(InternalError, match="differs"):
        compile_program(source, extra_flags=("-O0",))


def test_a_trace_holds_every_task_of_every_step_and_changes_nothing(engine: Engine) -> None:
    plain = engine.create_instance().generate(PROMPTS, max_new_tokens=5, stop_tokens=[])
    instance = engine.create_instance(trace_spans=1000)
    traced = instance.generate(PROMPTS, max_new_tokens=5, stop_tokens=[])
    assert traced.tokens == plain.tokens and traced.steps == plain.steps
    spans = instance.spans()
    for worker, queue in enumerate(engine.graph.queues):
        runs = spans[worker][spans[worker]["phase"] == 0]
        assert runs["task"].tolist() == queue * traced.steps
        assert (spans[worker]["end_ns"] >= spans[worker]["begin_ns"]).all()
        assert (np.diff(runs["begin_ns"]) >= 0).all()
    small = engine.create_instance(trace_spans=3)
    assert small.generate(PROMPTS, max_new_tokens=5, stop_tokens=[]).tokens == plain.tokens
    assert [len(s) for s in small.spans()] == [3, 3]
    with pytest.raises(RequestError, match="trace_spans"):
        engine.create_instance().spans()


def test_pipelining_off_gives_the_same_tokens(engine: Engine) -> None:
    off = Engine(engine.graph, engine.program, engine.weights, pipelining=False)
    assert Instance(off).generate(PROMPTS, max_new_tokens=5, stop_tokens=[]).tokens == [greedy(p, 5, ()) for p in PROMPTS]


def test_graphs_and_engines_show_themselves_in_a_line(engine: Engine) -> None:
    graph = engine.graph
    assert repr(graph) == (f"SMTaskGraph(cpp, {graph.dtype}, {len(graph.tasks)} tasks of {len(graph.tensor_graph.operators)} operators, {len(graph.events)} events, "
                           f"{graph.num_workers} workers)")
    assert repr(engine) == f"Engine({graph!r})"


@pytest.mark.parametrize("what", ["weights", "state"])
def test_a_limit_of_the_process_is_one_line(engine: Engine, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    if what == "weights":
        monkeypatch.setattr(np, "memmap", refused)
        with pytest.raises(TargetError, match=r"cannot be mapped.*Cannot allocate memory"):
            load_weights(engine.graph, ToySource(VOCAB))
    else:
        monkeypatch.setattr(mmap, "mmap", refused)
        with pytest.raises(TargetError, match=r"bytes for activations and cache cannot be mapped.*Cannot allocate memory"):
            engine.create_instance(max_batch=1, max_context=16)
