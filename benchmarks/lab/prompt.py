"""Products of prompt steps alone on a GPU: `python benchmarks/lab/prompt.py` prints one JSON line a shape and number of rows.

Every product runs on all SMs several times with a barrier between repetitions; the time is from the barrier to the last SM's end, the
median over repetitions. Weights and activations are random; weights of a matrix are more than the L2 holds or take turns.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from mpk.tasks.packing import to_bf16
from mpk.tasks.stages import stage_shape
from tests.support.cuda_kinds import Machine, put_step

SMS, REPEATS = 132, 12
PRODUCTS = {  # n, k, epilogue
    "llama-3.1-8b": {"qkv": (6144, 4096, 0), "o": (4096, 4096, 1), "gate_up": (14336, 4096, 2), "down": (4096, 14336, 1)},
    "llama-3.2-1b": {"qkv": (3072, 2048, 0), "o": (2048, 2048, 1), "gate_up": (8192, 2048, 2), "down": (2048, 8192, 1)},
}


def random_bits(count: int, scale: float) -> np.ndarray:
    block = to_bf16(np.random.default_rng(1).standard_normal(1 << 22, np.float32) * np.float32(scale))
    return np.tile(block, -(-count // len(block)))[:count]


def product(model: str, name: str, rows: int) -> None:
    n, k, epilogue = PRODUCTS[model][name]
    columns = 8 if epilogue == 2 else 16
    shape, tiles, room = stage_shape(k), -(-n // columns), rows
    stages = tiles * shape.count
    m = Machine(prompt_room=room)
    m.put("weights", random_bits(stages * shape.bytes // 2, 0.02))
    m.put("places", np.concatenate([[16], np.arange(stages, dtype=np.int64) * shape.bytes]))
    head = np.zeros(16, np.float32)
    head[:5] = n, k, epilogue, 0, SMS
    m.put("params", head)
    put_step(m, [(0, 0, rows)], np.zeros(0, np.int32), np.zeros(0, np.int32), max(rows, 32))
    m.buffers(input=random_bits(-(-k // 64) * room * 64, 1.0), output=np.zeros((-(-n // 64) * 64, room), np.uint16), old=random_bits(room * n, 1.0))
    times = m.run("prompt_linear", {}, ("input", "output", "old"), [(s, s + 1) for s in range(SMS)], repeats=REPEATS)
    warm = times[2:] / 1000
    us = float(np.median(warm.max(axis=1)))
    flops = 2.0 * rows * k * n * (2 if epilogue == 2 else 1)
    print(json.dumps({"product": f"{model} {name}", "rows": rows, "us": round(us, 1), "mean_sm_us": round(float(np.median(warm.mean(axis=1))), 1),
                      "tflop_s": round(flops / us / 1e6, 1)}), flush=True)


if __name__ == "__main__":
    for model, products in PRODUCTS.items():
        for name in products:
            for rows in (64, 256, 512, 1024, 2048):
                product(model, name, rows)
