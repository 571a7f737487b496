"""Structures that the host and the program share, defined once: numpy dtypes here, C structs emitted from them.

`c_structs()` yields the C++ declarations with a `static_assert` on every size and offset, so that neither side can drift.
All fields are naturally aligned; every struct is a multiple of 8 bytes.
"""

from __future__ import annotations

import numpy as np

MAX_OPERANDS = 8
MAX_RANKS = 8
MAX_STOP_TOKENS = 16
MAX_TOP_LOGPROBS = 20
INLINE_EVENTS = 4  # waits and signals that stand beside an instruction of a CUDA block
COUNTER_STRIDE = 128  # bytes between the event counters of the CUDA back end
KV_PAGE_TOKENS = 64  # tokens of one sequence in one page of the key-value cache

Field = tuple[str, str, int]  # name, C type, array length (1: scalar)

C_TYPES: dict[str, str] = {"int32_t": "<i4", "uint32_t": "<u4", "int64_t": "<i8", "uint64_t": "<u8", "float": "<f4"}

STRUCTS: dict[str, list[Field]] = {
    # One task for one worker. Waits and signals are ranges of the wait and signal tables.
    "Instruction": [
        ("opcode", "int32_t", 1),  # which task variant (index into the program's dispatch)
        ("task", "int32_t", 1),  # id in the SMTaskGraph, for traces and stall reports
        ("op", "int32_t", 1),  # operator index in the TensorGraph
        ("layer", "int32_t", 1),  # layer, -1 outside the layers
        ("tile_begin", "int32_t", 1),
        ("tile_end", "int32_t", 1),
        ("wait_begin", "int32_t", 1),
        ("wait_count", "int32_t", 1),
        ("signal_begin", "int32_t", 1),
        ("signal_count", "int32_t", 1),
        ("iargs", "int32_t", 2),  # kind-specific (TaskKind.arguments), e.g. which message of how many
        ("weights", "int64_t", 1),  # byte offset of the operator's packed matrix, -1: none
        ("params", "int64_t", 1),  # byte offset of the operator's packed float32 parameters (norms, biases), -1: none
        ("operand", "int64_t", MAX_OPERANDS),  # byte offsets in the arena (peer buffers: in peer memory), in the order of TaskKind.operands, -1: unused
    ],
    "Wait": [("event", "int32_t", 1), ("count", "int32_t", 1)],  # value needed in step s (from 1): count * s
    "Signal": [("event", "int32_t", 1), ("amount", "int32_t", 1)],
    # Consecutive rows of one sequence in the current step.
    "Segment": [
        ("slot", "int32_t", 1),
        ("row_begin", "int32_t", 1),
        ("rows", "int32_t", 1),
        ("position", "int32_t", 1),  # position in its sequence of the first row
    ],
    # What the current step computes; written by `advance` (and by the host before the start), read by every task.
    "Step": [
        ("number", "int64_t", 1),  # from 1
        ("rows", "int32_t", 1),
        ("logit_rows", "int32_t", 1),
        ("segments", "int32_t", 1),
        ("done", "int32_t", 1),  # 1: no work left, every worker leaves
    ],
    # One sequence of the batch; the host fills it before the start, `advance` keeps it.
    "Sequence": [
        ("active", "int32_t", 1),
        ("prompt_length", "int32_t", 1),
        ("length", "int32_t", 1),  # tokens known: prompt and generated ones; published with release order
        ("computed", "int32_t", 1),  # positions whose keys and values are in the cache
        ("max_length", "int32_t", 1),  # stop when `length` gets here
        ("finish", "int32_t", 1),  # FINISH_*
        ("all_logits", "int32_t", 1),  # 1: keep the logits of every position and sample nothing
        ("top_k", "int32_t", 1),  # 0: off
        ("temperature", "float", 1),  # 0: greedy
        ("top_p", "float", 1),  # 1: off
        ("min_p", "float", 1),  # 0: off
        ("repetition_penalty", "float", 1),  # 1: off
        ("presence_penalty", "float", 1),  # 0: off
        ("frequency_penalty", "float", 1),  # 0: off
        ("top_logprobs", "int32_t", 1),  # how many alternatives to report with each token; -1: no log-probabilities at all
        ("stop_count", "int32_t", 1),
        ("seed", "uint64_t", 1),
        ("stop", "int32_t", MAX_STOP_TOKENS),
    ],
    # Bytes of packed weights that the instruction of the same index begins with; fetched ahead while the worker waits.
    "Prefetch": [("offset", "int64_t", 1), ("bytes", "int64_t", 1)],
    # Everything `mpk_run` needs. Addresses are of the host's memory, which outlives the call; 0: not there.
    "Launch": [
        ("weights", "uint64_t", 1),
        ("params", "uint64_t", 1),
        ("arena", "uint64_t", 1),
        ("kv", "uint64_t", 1),
        ("step", "uint64_t", 1),
        ("segments", "uint64_t", 1),
        ("row_token", "uint64_t", 1),
        ("row_slot", "uint64_t", 1),
        ("row_position", "uint64_t", 1),
        ("logit_row", "uint64_t", 1),
        ("sequences", "uint64_t", 1),
        ("tokens", "uint64_t", 1),
        ("page_table", "uint64_t", 1),
        ("free_pages", "uint64_t", 1),
        ("free_page_count", "uint64_t", 1),
        ("chosen_logprob", "uint64_t", 1),
        ("top_logprob", "uint64_t", 1),
        ("top_token", "uint64_t", 1),
        ("logits_out", "uint64_t", 1),
        ("token_ns", "uint64_t", 1),
        ("cancel", "uint64_t", 1),
        ("logits_out_positions", "int64_t", 1),
        ("flagged_stride", "int64_t", 1),  # bytes between the two copies of flagged buffers
        ("max_batch", "int32_t", 1),
        ("max_rows", "int32_t", 1),
        ("max_context", "int32_t", 1),
        ("max_pages", "int32_t", 1),
        ("num_pages", "int32_t", 1),
        ("workers", "int32_t", 1),
        ("instructions", "uint64_t", 1),  # Instruction [all workers, one stream after the other]
        ("stream_begin", "uint64_t", 1),  # int32 [workers + 1], first instruction of each worker
        ("waits", "uint64_t", 1),
        ("signals", "uint64_t", 1),
        ("prefetch", "uint64_t", 1),  # Prefetch, one an instruction; 0: workers fetch nothing ahead
        ("stall", "uint64_t", 1),  # Stall, written when the return code says so
        ("spans", "uint64_t", 1),  # Span [workers][span_capacity]; 0: no trace
        ("span_count", "uint64_t", 1),  # int64 [workers], spans written (those beyond the capacity are dropped)
        ("span_capacity", "int64_t", 1),
        ("scratch_bytes", "int64_t", 1),  # of one worker
        ("stall_limit_ns", "int64_t", 1),
        ("num_events", "int32_t", 1),
        ("spin_limit", "int32_t", 1),  # polls before a waiting worker begins to yield its processor
        ("rank", "int32_t", 1),  # of this run among those that share the model
        ("ranks", "int32_t", 1),
        ("peers", "uint64_t", 1),  # uint64 [ranks]: addresses of the peer memory of every rank, this one's too; 0: there is one rank
        ("group_stop", "uint64_t", 1),  # int32 that all ranks of the process see, not 0: one of them gave up; 0: not there
        ("halt_step", "int64_t", 1),  # worker 0 stops working in this step, for tests of the watchdog; 0: never
        ("flag_base", "uint32_t", 1),  # what the flags of this run start from
        ("halt_reserved", "int32_t", 1),
    ],
    # What the CUDA kernel needs besides `Launch`. Addresses are of device memory.
    "Kernel": [
        ("records", "uint64_t", 1),  # Record [all blocks, one stream after the other]; `Launch.stream_begin` says where each begins
        ("loads", "uint64_t", 1),  # LoadRun [all blocks]
        ("load_begin", "uint64_t", 1),  # int32 [blocks + 1]
        ("events", "uint64_t", 1),  # counters, COUNTER_STRIDE bytes apart
        ("stop", "uint64_t", 1),  # int32, one of RESULT: not 0, and every block leaves
        ("messages", "uint64_t", 1),  # [MAX_ROWS] of 16 bytes: the planned step, see step.cuh; zeros before a launch
        ("mirror", "uint64_t", 1),  # int64 [max_batch][max_context] in host memory: token + 1 once it is known; 0: nobody looks
        ("planner", "int32_t", 1),  # the block that runs `advance`; it plans the first step too
        ("stages", "int32_t", 1),
        ("flight_bytes", "int32_t", 1),
        ("flight_idle_bytes", "int32_t", 1),
        ("prefetch_bytes", "int32_t", 1),  # weights behind a full ring that are brought to the L2, a block; 0: none
        ("prefetch_ns", "int32_t", 1),  # least time from one stage of them to the next
        ("attention_bytes", "int32_t", 1),  # more keys and values of a layer: none while attention reads them
        ("peers", "uint64_t", MAX_RANKS),  # addresses of the peer memory of every rank
        ("pipelining", "int32_t", 1),  # 0: weights are fetched only once their instruction's events have come
        # Of the graph that reads prompts; zeros where the program has none.
        ("prompt_planner", "int32_t", 1),  # the block that runs `prompt_advance`, and plans the first prompt step
        ("prompt_records", "uint64_t", 1),  # Record [all blocks]
        ("prompt_stream_begin", "uint64_t", 1),  # int32 [blocks + 1]
        ("prompt_step", "uint64_t", 1),  # Step: what the present prompt step computes
        ("places", "uint64_t", 1),  # int64: byte offsets of the stages of packed matrices, matrix by matrix
        ("prompt_event", "int32_t", 1),  # its value is the number of prompt steps planned so far
        ("prompt_over", "int32_t", 1),  # 1 once prompts are read
        ("prompt_task", "int32_t", 1),  # that who waits for a prompt step reports
        ("prompt_rows", "int32_t", 1),  # most of a step
        ("prompt_room", "int32_t", 1),  # rows that buffers have
        ("prompt_least", "int32_t", 1),  # tokens that are worth a prompt step
    ],
    # Stages of packed weights that one instruction uses one after the other: `count` times `bytes`, `stride` apart.
    "LoadRun": [
        ("offset", "int64_t", 1),
        ("stride", "int32_t", 1),
        ("count", "int32_t", 1),
        ("bytes", "int32_t", 1),
        ("instruction", "int32_t", 1),  # place in the block's stream
    ],
    # Argument of the kernel that packs tiles. Addresses are of device memory.
    "Pack": [
        ("rows", "uint64_t", 1),  # bf16 [tiles * tile_rows][columns]
        ("place", "uint64_t", 1),  # int64 [tiles][stages], byte offsets from `out`
        ("out", "uint64_t", 1),
        ("tiles", "int32_t", 1),
        ("columns", "int32_t", 1),
        ("stages", "int32_t", 1),  # of a tile
        ("depth", "int32_t", 1),  # columns of a stage
        ("tile_rows", "int32_t", 1),
        ("unused", "int32_t", 1),
    ],
    # An instruction with its waits and signals beside it, as far as they fit (else they stand in the tables), fetched in one piece.
    "Record": [
        ("instruction", "Instruction", 1),
        ("waits", "Wait", INLINE_EVENTS),
        ("signals", "Signal", INLINE_EVENTS),
        ("apart", "int32_t", 1),  # 1: all threads of the block meet before it begins
        ("reserved", "int32_t", 3),
    ],
    # Written by a worker that gives up.
    "Stall": [
        ("worker", "int32_t", 1),
        ("task", "int32_t", 1),
        ("event", "int32_t", 1),
        ("peer", "int32_t", 1),  # 1 + the rank whose part of a message did not come; 0: it is an event
        ("expected", "int64_t", 1),
        ("seen", "int64_t", 1),
        ("step", "int64_t", 1),
    ],
    # One span of a trace.
    "Span": [
        ("task", "int32_t", 1),
        ("phase", "int32_t", 1),  # 0: run, 1: wait
        ("begin_ns", "int64_t", 1),
        ("end_ns", "int64_t", 1),
    ],
}

RESULT = {"done": 0, "stalled": 1, "no_thread": 2, "no_memory": 3}  # what `mpk_run` returns

STALL_WEIGHTS, STALL_DATA = -1, -2  # Stall.event of waits that are for no counter

FINISH = {"running": 0, "stop": 1, "length": 2, "cancelled": 3, "error": 4}


def dtype(name: str) -> np.dtype:
    """The numpy dtype of a shared struct."""
    types = {t: C_TYPES[t] if t in C_TYPES else dtype(t) for _, t, _ in STRUCTS[name]}
    return np.dtype([(f, types[t], (n,)) if n > 1 else (f, types[t]) for f, t, n in STRUCTS[name]], align=True)


def c_structs() -> str:
    """C++ declarations of all shared structs and constants, with drift checks."""
    out = [f"constexpr int {k} = {v};" for k, v in (("MAX_OPERANDS", MAX_OPERANDS), ("MAX_STOP_TOKENS", MAX_STOP_TOKENS),
                                                   ("MAX_TOP_LOGPROBS", MAX_TOP_LOGPROBS), ("KV_PAGE_TOKENS", KV_PAGE_TOKENS),
                                                   ("INLINE_EVENTS", INLINE_EVENTS), ("COUNTER_STRIDE", COUNTER_STRIDE),
                                                   ("STALL_WEIGHTS", STALL_WEIGHTS), ("STALL_DATA", STALL_DATA))]
    out += [f"constexpr int RESULT_{k.upper()} = {v};" for k, v in RESULT.items()]
    out += [f"constexpr int FINISH_{k.upper()} = {v};" for k, v in FINISH.items()]
    for name, fields in STRUCTS.items():
        d = dtype(name)
        out.append(f"struct {name} {{")
        out += [f"  {t} {f}{f'[{n}]' if n > 1 else ''};" for f, t, n in fields]
        out.append("};")
        out.append(f'static_assert(sizeof({name}) == {d.itemsize}, "{name} differs between host and program");')
        out += [f'static_assert(offsetof({name}, {f}) == {d.fields[f][1]}, "{name}.{f} differs");' for f, _, _ in fields]  # type: ignore[index]
    return "\n".join(out) + "\n"


def header() -> str:
    """The whole of `mpk/layout.hpp`."""
    return f"// Emitted from mpk/codegen/layout.py; do not edit.\n#pragma once\n#include <cstddef>\n#include <cstdint>\n\nnamespace mpk {{\n{c_structs()}}}\n"
