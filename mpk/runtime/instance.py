"""Instance: memory for a batch of sequences, and the calls that run the program on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpk.codegen import layout
from mpk.errors import InternalError, RequestError, StallError, TargetError
from mpk.runtime.arguments import check_instance_arguments
from mpk.runtime.memory import available_bytes
from mpk.runtime.request import (
    FINISH_REASONS,
    GenerateResult,
    SamplingOptions,
    TokenLogprob,
    as_prompts,
    check_prompts,
    is_torch,
    options_per_sequence,
)
from mpk.runtime.stalls import stall_text
from mpk.runtime.state import MEMORY_SHARE, gib

if TYPE_CHECKING:
    from mpk.runtime.engine import Engine

TokenCallback = Callable[[int, int], None]
POLL_S = 0.008  # how often the host looks for new tokens when somebody wants them; a look takes about 50 us of a processor
IDLE_POLL_S = 0.1  # and how often it wakes to notice an interrupt when nobody does


class Instance:
    """Runs one batch at a time; make several instances of one engine to run several."""

    def __init__(self, engine: Engine, *, max_batch: int | None = None, max_context: int | None = None,
                 device_ids: Sequence[int] | None = None, stall_limit_s: float = 10.0, trace_spans: int = 0) -> None:
        graph, config = engine.graph, engine.graph.tensor_graph.config
        limit = min(self._graph_batch(engine), graph.max_rows)
        check_instance_arguments(max_batch, max_context, device_ids, stall_limit_s, trace_spans, graph.ranks * graph.num_workers)
        batch = limit if max_batch is None else int(max_batch)
        context = config.max_context if max_context is None else int(max_context)
        if not 1 <= batch <= limit:
            raise RequestError("max_batch", expected=f"1 to {limit}", actual=str(batch), remedy="lower the model for a larger batch")
        if not 1 <= context <= config.max_context:
            raise RequestError("max_context", expected=f"1 to {config.max_context} (the model's context)", actual=str(context))
        self.engine, self.stall_limit_s = engine, float(stall_limit_s)
        self.executor = engine.executor(batch, context, max_context is not None, device_ids, self.stall_limit_s)
        self.state = self.executor.state
        self.max_batch, self.max_context = batch, context
        workers = graph.ranks * graph.num_workers
        self._spans = np.zeros((workers, trace_spans), layout.dtype("Span")) if trace_spans > 0 else None
        self._span_count = np.zeros(workers, np.int64)
        self._busy = threading.Lock()

    @staticmethod
    def _graph_batch(engine: Engine) -> int:
        """Sequences that the graph's sampling was lowered for."""
        return max((int(op.attrs["max_batch"]) for op in engine.graph.tensor_graph.operators if op.kind == "sample"), default=1)

    # ---- calls
    def forward(self, prompt_tokens: Any) -> Any:
        """Logits float32 [batch, tokens, vocab] of int64 [batch, tokens]; a torch tensor in gives a torch tensor out.

        Raises `RequestError` for what cannot run: shapes, token ids, lengths, memory.
        """
        prompts = as_prompts(prompt_tokens)
        check_prompts(prompts, vocab=self.state.vocab, max_batch=self.max_batch)
        length = len(prompts[0])
        if any(len(p) != length for p in prompts):
            raise RequestError("forward takes prompts of one length", actual=str([len(p) for p in prompts]),
                               remedy="call it once a length, or use generate, which takes different lengths")
        self._check_lengths([length] * len(prompts), "prompt")
        size = len(prompts) * length * self.state.vocab * 4
        available = available_bytes()
        if available is not None and size > available * MEMORY_SHARE:
            raise RequestError(f"logits of {len(prompts)} x {length} tokens: {gib(size)}",
                               expected=f"at most {MEMORY_SHARE:.0%} of the {gib(available)} available", remedy="a smaller batch or shorter prompts")
        logits = np.empty((len(prompts), length, self.state.vocab), np.float32)
        with self._exclusive():
            self.state.reset()
            for slot, prompt in enumerate(prompts):
                self.state.set_sequence(slot, prompt, SamplingOptions(), all_logits=True)
            if self._run(logits, None):
                raise KeyboardInterrupt
        if is_torch(prompt_tokens):
            import torch

            return torch.from_numpy(logits)
        return logits

    def generate(self, prompt_tokens: Any, *, max_new_tokens: int | Sequence[int] = 64, stop_tokens: Any = None,
                 on_token: TokenCallback | None = None, **options: Any) -> GenerateResult:
        """Continue one prompt (vector or flat list) or a batch (matrix, or a list of prompts of different lengths).

        Further options are those of `SamplingOptions`; each may be a list with one value a sequence. `stop_tokens`: None takes the
        model's own. `on_token(slot, token)` is called from this thread as tokens appear. KeyboardInterrupt stops the program and
        returns what there is, with finish reason "cancelled". Raises `RequestError` before anything runs, `StallError` if the
        program stops making progress.
        """
        if on_token is not None and not callable(on_token):
            raise RequestError("on_token", expected="None or a function of (slot, token)", actual=type(on_token).__name__)
        prompts = as_prompts(prompt_tokens)
        check_prompts(prompts, vocab=self.state.vocab, max_batch=self.max_batch)
        stop = self.engine.graph.tensor_graph.config.eos_tokens if stop_tokens is None else stop_tokens
        given = {"max_new_tokens": max_new_tokens, "stop_tokens": stop, **options}
        chosen = options_per_sequence(len(prompts), given, self.state.vocab)
        self._check_lengths([len(p) + o.max_new_tokens for p, o in zip(prompts, chosen, strict=True)], "prompt and new tokens")
        with self._exclusive():
            self.state.reset()
            for slot, (prompt, option) in enumerate(zip(prompts, chosen, strict=True)):
                self.state.set_sequence(slot, prompt, option)
            start = self.executor.now_ns()
            self._run(None, on_token)
            return self._result(chosen, start)

    def spans(self) -> list[np.ndarray]:
        """Trace of the last run: Span arrays, one a worker (`task`, `phase` 0 run / 1 wait, `begin_ns`, `end_ns`); workers of rank 0 first.

        Raises `RequestError` if the instance was made without `trace_spans`.
        """
        return [worker[worker["task"] < len(self.engine.graph.tasks)] for worker in self._all_spans()]

    def prompt_spans(self) -> list[np.ndarray]:
        """The same of tasks that read prompts by a graph of their own, numbered as there (`Engine.locate`)."""
        begin = len(self.engine.graph.tasks)
        found = [worker[worker["task"] >= begin] for worker in self._all_spans()]
        for spans in found:
            spans["task"] -= begin
        return found

    def _all_spans(self) -> list[np.ndarray]:
        if self._spans is None:
            raise RequestError("the instance keeps no trace", remedy="create it with trace_spans, the number of spans a worker")
        return [worker[:count].copy() for worker, count in zip(self._spans, self._span_count, strict=True)]

    # ---- running
    def _check_lengths(self, lengths: list[int], what: str) -> None:
        for slot, length in enumerate(lengths):
            if length > self.max_context:
                remedies = ["a shorter prompt", *(["fewer new tokens"] if "new tokens" in what else [])]
                if self.max_context < self.engine.graph.tensor_graph.config.max_context:
                    remedies.append("an instance with a larger max_context")
                raise RequestError(f"sequence {slot}: {what}", expected=f"at most {self.max_context} (the context)", actual=str(length),
                                   remedy=" or ".join(remedies))
        self.state.require_pages(lengths)

    def _exclusive(self) -> _Exclusive:
        return _Exclusive(self._busy)

    def _run(self, logits: np.ndarray | None, on_token: TokenCallback | None) -> bool:
        """Run the program in a thread of its own, while this thread streams; returns whether KeyboardInterrupt cut the run short."""
        self._span_count[:] = 0
        executor = self.executor
        executor.start(logits, self._spans, self._span_count, on_token is not None)
        code: list[int] = []
        failures: list[BaseException] = []
        finished = threading.Event()

        def body() -> None:
            try:
                code.append(executor.run())
            except BaseException as error:
                failures.append(error)
            finally:
                finished.set()

        thread = threading.Thread(target=body, name="mpk-worker-0", daemon=True)
        stream = _Stream(self, on_token)
        interrupted = False
        thread.start()
        try:
            while not finished.wait(POLL_S if on_token else IDLE_POLL_S):
                stream.deliver()
        except KeyboardInterrupt:
            interrupted = True
            executor.cancel()
        except BaseException:
            executor.cancel()
            _join(thread)
            raise
        _join(thread)
        if failures:
            raise failures[0]
        self._check_result(code[0])
        stream.deliver()
        return interrupted

    def _check_result(self, code: int) -> None:
        if code == layout.RESULT["stalled"]:
            raise StallError(stall_text(self.engine.graph, self.executor.stalls(), self.stall_limit_s, self.engine.locate))
        if code == layout.RESULT["no_thread"]:
            raise TargetError("the operating system gives no more threads", expected=f"{self.engine.graph.num_workers} workers",
                              remedy="lower the model for fewer workers")
        if code == layout.RESULT["no_memory"]:
            raise TargetError("a worker's scratch memory cannot be allocated",
                              expected=f"{self.engine.graph.num_workers} x {self.engine.program.scratch_bytes} bytes",
                              remedy="lower the model with fewer rows a step (max_rows)")
        if code != layout.RESULT["done"]:
            raise InternalError(f"the program returned {code}")

    # ---- results
    def _result(self, options: list[SamplingOptions], start: int) -> GenerateResult:
        state, count = self.state, len(options)
        spans = [(int(s["prompt_length"]), int(s["length"])) for s in state.sequences[:count]]
        times = [((state.token_ns[slot, a:b] - start) / 1e6).tolist() for slot, (a, b) in enumerate(spans)]
        longest = max(times, key=len)
        logprobs = None
        if any(o.logprobs is not None for o in options):
            logprobs = [self._logprobs(slot, *spans[slot], options[slot]) for slot in range(count)]
        return GenerateResult(
            tokens=[state.tokens[slot, a:b].tolist() for slot, (a, b) in enumerate(spans)],
            finish_reasons=[FINISH_REASONS[int(s["finish"])] for s in state.sequences[:count]],
            first_token_ms=min((t[0] for t in times if t), default=0.0),
            ms_per_token=(longest[-1] - longest[0]) / (len(longest) - 1) if len(longest) > 1 else 0.0,
            steps=int(state.step[0]["number"]) - 1,
            prompt_tokens=[a for a, _ in spans],
            token_ms=times,
            logprobs=logprobs,
        )

    def _logprobs(self, slot: int, begin: int, end: int, options: SamplingOptions) -> list[TokenLogprob]:
        if options.logprobs is None or self.state.logprobs is None:
            return []
        chosen, top, top_token = self.state.logprobs
        return [TokenLogprob(int(self.state.tokens[slot, i]), float(chosen[slot, i]),
                             tuple((int(top_token[slot, i, j]), float(top[slot, i, j])) for j in range(options.logprobs)
                                   if top_token[slot, i, j] >= 0))
                for i in range(begin, end)]


def _join(thread: threading.Thread) -> None:
    """Wait for the program to leave; further interrupts change nothing, since it still uses the instance's memory."""
    while True:
        try:
            thread.join()
            return
        except KeyboardInterrupt:
            continue


class _Exclusive:
    """Holds the instance for one call; a second call at the same time is refused rather than queued."""

    def __init__(self, lock: threading.Lock) -> None:
        self.lock = lock

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            raise RequestError("the instance is running another call", remedy="wait for it, or create a second instance")

    def __exit__(self, *exception: object) -> None:
        self.lock.release()


class _Stream:
    """Hands new tokens to the callback, sequence by sequence."""

    def __init__(self, instance: Instance, on_token: TokenCallback | None) -> None:
        self.instance, self.on_token = instance, on_token
        self.told = instance.state.sequences["prompt_length"].astype(np.int64)
        self.length = np.zeros(instance.max_batch, np.int32)
        self.finish = np.zeros(instance.max_batch, np.int32)

    def deliver(self) -> None:
        if self.on_token is None:
            return
        state = self.instance.state
        self.instance.executor.poll(self.length, self.finish)
        for slot, length in enumerate(self.length):
            for place in range(int(self.told[slot]), int(length)):
                self.told[slot] = place + 1
                self.on_token(slot, int(state.tokens[slot, place]))
