"""The memory an instance runs in, in the layout that the program shares, and its `Launch`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import numpy as np

from mpk.codegen import layout
from mpk.codegen.layout import KV_PAGE_TOKENS, MAX_TOP_LOGPROBS
from mpk.codegen.program import Tables
from mpk.codegen.weights import PackedWeights
from mpk.errors import RequestError, TargetError
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.runtime.memory import address, available_bytes, zeroed
from mpk.runtime.request import SamplingOptions
from mpk.targets.hardware import available_cpus
from mpk.tasks.sample.options import TokenOptions

MEMORY_SHARE = 0.9  # of the available memory that the key-value cache may take
# Polls before a waiting worker yields its processor at every poll: about 3 us. Longer spinning gains nothing when every worker has
# a processor (a yield returns at once), and costs dearly when two share one: 356 us a step against 21 with 3000 polls instead of 100
# in a program of five hand-offs, measured beside another busy process on two processors.
SPINS = 100
SPINS_CROWDED = 4  # with more workers than processors


def pages_for(tokens: int) -> int:
    """Pages of the key-value cache that hold so many positions."""
    return -(-tokens // KV_PAGE_TOKENS)


def page_bytes(graph: SMTaskGraph) -> int:
    """Bytes of one page of the key-value cache over all layers."""
    return KV_PAGE_TOKENS * sum(b.row_bytes for b in graph.buffers.values() if b.kind == "cache")


class State:
    """Arrays of one instance. Large ones are mapped lazily, so a long context costs memory only when it is used."""

    def __init__(self, graph: SMTaskGraph, max_batch: int, max_context: int, explicit: bool, available: int | None = None,
                 on_host: bool = True, rows: int = 0) -> None:
        """rows: of the largest step, where steps of other graphs hold more than `graph`. available: bytes that the key-value cache may take a share of (default: of this machine). on_host: the program runs in the
        host's memory; otherwise these arrays are copies, and activations and cache have none.
        """
        self.graph, self.max_batch, self.max_context = graph, max_batch, max_context
        self.vocab = graph.tensor_graph.config.vocab_size
        self.max_pages = pages_for(max_context)
        self.page_bytes = page_bytes(graph)
        self.num_pages = self._affordable_pages(explicit, available_bytes() if available is None else available)
        rows = max(rows, graph.max_rows)
        self.sequences = np.zeros(max_batch, layout.dtype("Sequence"))
        self.step = np.zeros(1, layout.dtype("Step"))
        self.segments = np.zeros(rows, layout.dtype("Segment"))
        self.rows = {name: np.zeros(rows, np.int32) for name in ("row_token", "row_slot", "row_position", "logit_row")}
        self.tokens = zeroed((max_batch, max_context), np.int32)
        self.token_ns = zeroed((max_batch, max_context), np.int64)
        self.page_table = np.zeros((max_batch, self.max_pages), np.int32)
        self.free_pages = np.zeros(max(self.num_pages, 1), np.int32)
        self.free_page_count = np.zeros(1, np.int32)
        self.cancel = np.zeros(1, np.int32)
        self.stall = np.zeros(1, layout.dtype("Stall"))
        self.arena = zeroed((graph.arena_bytes if on_host else 0,), np.uint8, huge_pages=True)
        self.kv = zeroed((self.num_pages * self.page_bytes if on_host else 0,), np.uint8)
        self.logprobs: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def _affordable_pages(self, explicit: bool, available: int | None) -> int:
        wanted = self.max_batch * self.max_pages
        if available is None or wanted * self.page_bytes <= available * MEMORY_SHARE:
            return wanted
        affordable = int(available * MEMORY_SHARE) // self.page_bytes
        if explicit or affordable < 1:
            raise TargetError(f"key-value cache of {self.max_batch} sequences of {self.max_context} tokens: {gib(wanted * self.page_bytes)}",
                              expected=f"at most {MEMORY_SHARE:.0%} of the {gib(available)} of memory available",
                              remedy=f"max_context={max(affordable // self.max_batch, 0) * KV_PAGE_TOKENS} fits")
        return affordable

    def require_pages(self, lengths: list[int]) -> None:
        """Raise `RequestError` unless sequences that grow to `lengths` tokens fit the cache together."""
        needed = sum(pages_for(n - 1) for n in lengths)  # the last token is never computed
        if needed > self.num_pages:
            raise RequestError(f"key-value cache for {sum(lengths)} tokens: {gib(needed * self.page_bytes)}",
                               expected=f"at most {gib(self.num_pages * self.page_bytes)}, what this machine's memory allows",
                               remedy="fewer sequences, shorter prompts or fewer new tokens")

    def reset(self) -> None:
        """Forget all sequences; every page is free, the lowest number on top of the stack."""
        self.sequences[:] = np.zeros((), self.sequences.dtype)
        self.step[:] = np.zeros((), self.step.dtype)
        self.stall[:] = np.zeros((), self.stall.dtype)
        self.free_pages[: self.num_pages] = np.arange(self.num_pages - 1, -1, -1)
        self.free_page_count[0] = self.num_pages
        self.cancel[0] = 0

    def set_sequence(self, slot: int, prompt: np.ndarray, options: SamplingOptions, all_logits: bool = False) -> None:
        """Put a prompt into a slot; options are those that `SamplingOptions.check` passed."""
        s = self.sequences[slot]
        self.tokens[slot, : len(prompt)] = prompt
        s["active"], s["all_logits"] = 1, int(all_logits)
        s["prompt_length"] = s["length"] = len(prompt)
        s["max_length"] = len(prompt) + (0 if all_logits else options.max_new_tokens)
        for option in fields(TokenOptions):
            s[option.name] = getattr(options, option.name)
        s["top_logprobs"] = -1 if options.logprobs is None else options.logprobs
        s["stop_count"] = len(options.stop_tokens)
        s["stop"][: len(options.stop_tokens)] = options.stop_tokens
        if options.logprobs is not None and self.logprobs is None:
            shape = (self.max_batch, self.max_context)
            self.logprobs = (zeroed(shape, np.float32), zeroed((*shape, MAX_TOP_LOGPROBS), np.float32),
                             zeroed((*shape, MAX_TOP_LOGPROBS), np.int32))

    def arrays(self, tables: Tables, weights: PackedWeights, *, logits_out: np.ndarray | None = None, pipelining: bool = True,
               spans: np.ndarray | None = None, span_count: np.ndarray | None = None) -> dict[str, np.ndarray | None]:
        """What the addresses of a `Launch` point to, by the names of its fields."""
        chosen, top, top_token = self.logprobs or (None, None, None)
        return {
            "weights": weights.weights, "params": weights.params, "arena": self.arena, "kv": self.kv, "step": self.step,
            "segments": self.segments, **self.rows, "sequences": self.sequences, "tokens": self.tokens, "page_table": self.page_table,
            "free_pages": self.free_pages, "free_page_count": self.free_page_count, "chosen_logprob": chosen, "top_logprob": top,
            "top_token": top_token, "logits_out": logits_out, "token_ns": self.token_ns, "cancel": self.cancel,
            "instructions": tables.instructions, "stream_begin": tables.stream_begin, "waits": tables.waits, "signals": tables.signals,
            "prefetch": tables.prefetch if pipelining else None, "stall": self.stall, "spans": spans, "span_count": span_count,
        }

    def launch(self, arrays: Mapping[str, np.ndarray | None], scratch_bytes: int, stall_limit_s: float, threads: int | None = None) -> np.ndarray:
        """The `Launch` of one run over `arrays`, which must outlive the run; `threads`: that run at the same time (default: the workers)."""
        logits, spans = arrays["logits_out"], arrays["spans"]
        out = self.launch_at({name: address(a) for name, a in arrays.items()}, 0 if logits is None else logits.shape[1],
                             0 if spans is None else spans.shape[1], scratch_bytes, stall_limit_s)
        if threads is not None and threads > available_cpus():
            out["spin_limit"] = SPINS_CROWDED
        return out

    def launch_at(self, addresses: Mapping[str, int], logits_positions: int, span_capacity: int, scratch_bytes: int,
                  stall_limit_s: float) -> np.ndarray:
        """The `Launch` of one run over memory at `addresses` (by the names of its fields), which must outlive the run."""
        graph, out = self.graph, np.zeros(1, layout.dtype("Launch"))
        values = {
            "logits_out_positions": logits_positions, "flagged_stride": graph.flagged_bytes, "max_batch": self.max_batch,
            "max_rows": graph.max_rows, "max_context": self.max_context, "max_pages": self.max_pages, "num_pages": self.num_pages,
            "workers": graph.num_workers, "span_capacity": span_capacity,
            "scratch_bytes": scratch_bytes, "stall_limit_ns": int(stall_limit_s * 1e9), "num_events": len(graph.events),
            "ranks": 1, "spin_limit": SPINS if available_cpus() >= graph.num_workers else SPINS_CROWDED,
        }
        for name, value in {**addresses, **values}.items():
            out[name] = value
        return out


def gib(size: float) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.2f} GiB"
