"""Time of attention and sampling alone on a GPU: `python benchmarks/cuda_kinds.py` prints one JSON line a measurement.

Each operator runs on all SMs, 200 times, with a barrier between repetitions; reported are microseconds from the barrier to the last
SM's end: median over repetitions of the slowest and of the mean block. Repetitions go through layers of a cache larger than the L2.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import entry
from mpk.codegen import layout
from mpk.codegen.layout import KV_PAGE_TOKENS
from mpk.passes.split_attention import choose_splits
from mpk.tasks.head.sharing import MESSAGE_COLUMNS, PART_COLUMNS, slices
from mpk.tasks.rotary_attention.sharing import LEAST_BLOCKS, STATISTICS
from tests.support.cuda_kinds import Machine, put_step, spread

SMS, REPEATS, MAX_ROWS = 132, 200, 16
MODELS = {"llama-3.1-8b": (32, 8, 128), "qwen3-0.6b": (16, 8, 128), "llama-3.2-1b": (32, 8, 64)}


def report(what: str, times: np.ndarray, **more: object) -> None:
    warm = times[REPEATS // 4 :] / 1000
    print(json.dumps({"kind": what, **more, "slowest_us": round(float(np.median(warm.max(axis=1))), 2),
                      "mean_us": round(float(np.median(warm.mean(axis=1))), 2)}), flush=True)


def attention(model: str, batch: int, context: int) -> None:
    heads, kv_heads, head_dim = MODELS[model]
    splits = choose_splits(kv_heads, SMS)
    pages = batch * -(-context // KV_PAGE_TOKENS)
    layer_bytes = pages * kv_heads * 2 * KV_PAGE_TOKENS * head_dim * 2
    layers = max(1, -(-(200 << 20) // layer_bytes))
    m = Machine(max_batch=batch, max_context=context, max_pages=pages // batch, num_pages=pages)
    put_step(m, [(slot, context - 1, 1) for slot in range(batch)], np.zeros(batch, np.int32), np.arange(batch, dtype=np.int32), MAX_ROWS)
    m.put("kv", np.full(layers * layer_bytes // 2, 0x3C00, np.uint16))
    m.put("page_table", np.random.default_rng(0).permutation(pages).astype(np.int32).reshape(batch, -1))
    m.put("params", np.ones(2 * head_dim, np.float32))
    m.buffers(("qkv", "rope", "out"), batch, qkv=np.full((batch, (heads + 2 * kv_heads) * head_dim), 0x3C00, np.uint16), rope=np.ones((batch, head_dim), np.float32),
              out=np.zeros((MAX_ROWS, heads * splits * (head_dim + STATISTICS)), np.float32))
    constants = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "window": 0, "splits": splits, "least": LEAST_BLOCKS,
                 "scale": head_dim**-0.5, "eps": 1e-6, "q_norm": "qwen3" in model, "k_norm": "qwen3" in model}
    floor = batch * context * kv_heads * head_dim * 4 / 4.7e6
    about = {"model": model, "batch": batch, "context": context}
    times = m.run("rotary_attention", constants, ("qkv", "rope", "out"), spread(kv_heads * splits, SMS), REPEATS, layers)
    report("rotary_attention", times, **about, floor_us=round(floor, 2))


def sampling(vocab: int, batch: int, label: str, **options: float) -> None:
    """The head behind its product, `sample` and `advance`, each alone; nobody waits, since all that they poll has been written before."""
    parts, size = slices(vocab, SMS)
    m = Machine(max_batch=batch, max_context=4096)
    put_step(m, [(slot, 2000, 1) for slot in range(batch)], np.zeros(batch, np.int32), np.arange(batch, dtype=np.int32), batch)
    sequences = np.zeros(batch, layout.dtype("Sequence"))
    sequences["repetition_penalty"] = sequences["top_p"] = sequences["active"] = 1
    sequences["top_logprobs"], sequences["length"], sequences["prompt_length"], sequences["max_length"] = -1, 2001, 1000, 4096
    for name, value in options.items():
        sequences[name] = value
    drawn, special = "temperature" in options, any(name != "temperature" for name in options)
    m.launch["drawn_rows"], m.launch["special_rows"] = ((1 << batch) - 1 if on else 0 for on in (drawn, special))
    logits = (np.random.default_rng(1).standard_normal((batch, vocab)) * 3).astype(np.float32)
    m.put("sequences", sequences)
    m.put("tokens", np.random.default_rng(2).integers(0, vocab, (batch, 4096)).astype(np.int32))
    for name, columns, kind in (("chosen_logprob", 1, np.float32), ("top_logprob", layout.MAX_TOP_LOGPROBS, np.float32), ("top_token", layout.MAX_TOP_LOGPROBS, np.int32)):
        m.put(name, np.zeros((batch, 4096, columns), kind))
    for name, count in (("page_table", 64 * batch), ("free_pages", 64 * batch), ("free_page_count", 1), ("cancel", 1), ("messages", 64)):
        m.put(name, np.full(count, 64 if name == "free_page_count" else 0, np.int32))
    m.launch["max_pages"] = 64
    m.buffers(logits=logits, choice=np.zeros((batch, MESSAGE_COLUMNS), np.int32), tops=np.zeros((batch, parts * MESSAGE_COLUMNS), np.float32),
              parts=np.zeros((batch, parts * PART_COLUMNS), np.float32), values=np.zeros_like(logits))
    constants = {"vocab": vocab, "parts": parts, "slice": size}
    about = {"vocab": vocab, "batch": batch, "options": label}
    report("logit_slices", m.run("logit_slices", constants, ("", "logits", "tops", "parts", "values"), spread(parts, SMS), REPEATS), **about)
    report("head behind its product", m.run("head", constants, ("input", "logits", "tops", "parts", "values"), spread(parts, SMS), REPEATS), **about)
    report("sample", m.run("sample", constants, ("logits", "choice", "parts", "values"), spread(batch, SMS), REPEATS), **about)
    report("advance", m.run("advance", constants, ("choice", "tops", "logits"), [(0, 1)], REPEATS), **about)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    entry.require_gpus()
    for model in MODELS:
        for context in (32, 512, 4096, 32768):
            attention(model, 1, context)
    for batch, context in ((4, 512), (16, 512), (16, 4096)):
        attention("llama-3.1-8b", batch, context)
    for vocab in (49152, 128256, 151936):
        sampling(vocab, 1, "greedy")
        sampling(vocab, 1, "temperature", temperature=0.8)
    sampling(151936, 16, "temperature", temperature=0.8)
    sampling(151936, 1, "top_k 40", temperature=0.8, top_k=40)
    sampling(151936, 1, "top_p 0.9", temperature=0.8, top_p=0.9)
    sampling(151936, 1, "min_p 0.05", temperature=0.8, min_p=0.05)
    sampling(151936, 1, "top_k 40, top_p 0.9, repetition 1.1", temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.1)
    sampling(151936, 1, "greedy, 20 log-probabilities", top_logprobs=20)


if __name__ == "__main__":
    entry.run(main)
