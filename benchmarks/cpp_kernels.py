"""Times the C++ task bodies on the shapes of SmolLM2-135M beside what the machine can do: read bandwidth and multiply-adds.

    python benchmarks/cpp_kernels.py [--json] [--threads 1 2] [--rows 1 16 256] [--dtype bf16] [--portable]

Products cycle through as many copies of their weights as take 256 MB, and attention through as many layers, so that nothing is in a
cache that a whole model would not have there. Every figure is the median of `--repeats` runs; the machine's figures are taken in the
same process beside it. GB/s count weights (or keys and values) once per pass.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import entry  # noqa: E402
from mpk.codegen import layout  # noqa: E402
from mpk.codegen.compile import compile_program  # noqa: E402
from mpk.codegen.layout import KV_PAGE_TOKENS  # noqa: E402
from mpk.codegen.program import BACKEND, ProgramSource, constant  # noqa: E402
from mpk.errors import RequestError  # noqa: E402
from mpk.graph.tensor_graph import Operator, TensorGraph  # noqa: E402
from mpk.models.config import DecoderConfig  # noqa: E402
from mpk.runtime.memory import zeroed  # noqa: E402
from mpk.tasks.base import kind_of  # noqa: E402
from mpk.tasks.packing import ELEMENT_BYTES  # noqa: E402

SMOLLM2 = DecoderConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 1e-5, 8192)
GRAPH = TensorGraph(SMOLLM2)
COLD_BYTES = 256 << 20
MOST_ROWS = 256  # for which there is room in the activations' memory
SIZES = {"heads": 9, "kv_heads": 3, "head_dim": 64}


def _linear(name: str, n: int, k: int, epilogue: str, *, norm: bool, gather: bool = False) -> Operator:
    weights = {"weight": ("gate", "up") if epilogue == "swiglu" else ("w",), **({"norm": ("norm",)} if norm else {})}
    attrs = {"n": n, "k": k, "eps": 1e-5 if norm else 0.0, "epilogue": epilogue, "gather_logit_rows": gather}
    return Operator(name, "linear", ("in", "x") if epilogue == "residual" else ("in",), ("out",), weights, attrs, 0)


PRODUCTS = (
    Operator("qkv", "qkv", ("x", "rope"), ("q", "kv"), {"weight": ("q", "k", "v"), "norm": ("norm",)},
             {**SIZES, "hidden": 576, "eps": 1e-5}, 0),
    _linear("o", 576, 576, "residual", norm=False),
    _linear("gate_up", 1536, 576, "swiglu", norm=True),
    _linear("down", 576, 1536, "residual", norm=False),
    _linear("logits", 49152, 576, "store", norm=True, gather=True),
)


def _attention(window: int = 0) -> Operator:
    return Operator("attention", "attention", ("q", "kv"), ("attn",), {}, {**SIZES, "window": window, "scale": 0.125, "splits": 1}, 0)


def build(operators: list[Operator], dtype: str, portable: bool) -> ctypes.CDLL:
    """A library with one body an operator, in order."""
    lines = [f'#include "{kind}/cpp.hpp"' for kind in sorted({op.kind for op in operators})]
    bodies = []
    for number, op in enumerate(operators):
        constants = kind_of(op).variant(op, GRAPH, dtype)
        lines.append(f"struct V{number} {{ " + " ".join(f"static constexpr {constant(n, v)};" for n, v in constants.items()) + " };")
        bodies.append(f"mpk::{op.kind}::run<V{number}>")
    lines += ['#include "cpp_kernels.cpp"', f"const TaskBody kBodies[] = {{{', '.join(bodies)}}};"]
    folders = (BACKEND / "include", ROOT / "mpk" / "tasks", ROOT / "benchmarks", ROOT / "tests" / "cpp")
    text = "\n".join(lines) + "\n"
    flags = (*(("-DMPK_PORTABLE",) if portable else ()), "-fvisibility=default")
    library = ctypes.CDLL(str(compile_program(ProgramSource(text, folders), portable=portable, extra_flags=flags)))
    for name in ("read_bandwidth", "peak_rate", "time_body"):
        getattr(library, name).restype = ctypes.c_double
    return library


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def time_operator(library: ctypes.CDLL, number: int, op: Operator, dtype: str, memory: np.ndarray, *, rows: int, position: int,
                  threads: int, repeats: int, segments: list[tuple[int, int, int, int]] | None = None) -> tuple[float, int]:
    """(seconds a pass, bytes of weights a pass) with `rows` rows of one sequence from `position` on."""
    kind = kind_of(op)
    packed = kind.packed_bytes(op, GRAPH, dtype)
    copies = max(1, len(memory) // packed) if packed else 1
    pages = -(-(position + rows) // KV_PAGE_TOKENS)
    layers = 30
    kv = zeroed((layers * pages * 3 * 2 * KV_PAGE_TOKENS * 64 * ELEMENT_BYTES[dtype],), np.uint8, huge_pages=True)
    kv[:] = 0
    arena = np.zeros(1 << 20, np.float32) if op.name != "logits" else np.zeros(rows * 49152 + (1 << 20), np.float32)
    arena[:] = 0.01
    half = (rows * 1536 * 4 + 4096) // 64 * 64
    instruction = np.zeros(1, layout.dtype("Instruction"))
    instruction["operand"] = [0, half, half + rows * 64 * 4, -1, -1, -1, -1, -1] if op.kind == "qkv" else [0, half] + [-1] * 6
    step, table = np.zeros(1, layout.dtype("Step")), np.arange(pages, dtype=np.int32)
    step["rows"], step["logit_rows"], step["segments"] = rows, rows, 1
    segment = np.array([(0, 0, rows, position)], layout.dtype("Segment"))
    places, zeros, params = np.arange(position, position + rows, dtype=np.int32), np.zeros(rows, np.int32), np.ones(8192, np.float32)
    given = (ctypes.c_int64 * 15)(*(a.ctypes.data for a in (memory, params, arena, kv, step, segment, zeros, zeros, places,
                                                             np.arange(rows, dtype=np.int32), table)), 0, rows, pages, pages)
    work = kind.cost(op, GRAPH, 0, kind.tiles(op, GRAPH), dtype).flops * rows
    passes = max(1, min(copies if rows < 8 else 64, int(3e9 // max(work, 1)) or 1))
    if op.kind == "attention":
        passes = layers
    scratch = kind.scratch_bytes(op, GRAPH, rows)
    seconds = library.time_body(number, given, pointer(instruction), kind.tiles(op, GRAPH), threads, passes, copies,
                                ctypes.c_int64(packed), layers, ctypes.c_int64(scratch), repeats)
    return seconds, packed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--dtype", choices=["bf16", "f32"], default="bf16")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--portable", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    entry.require_least(options, threads=1, rows=1, repeats=1)
    if max(options.rows) > MOST_ROWS:
        raise RequestError("rows", expected=f"{MOST_ROWS} or less", actual=str(max(options.rows)))
    operators = [*PRODUCTS, _attention()]
    library = build(operators, options.dtype, options.portable)
    memory = zeroed((COLD_BYTES,), np.uint8, huge_pages=True)
    memory[:] = 0
    for threads in options.threads:
        for number, op in enumerate(operators):
            for rows in options.rows:
                if op.name == "logits" and rows > 16:
                    continue
                # beside every figure the machine's own, taken at that moment: other work comes and goes
                bandwidth = library.read_bandwidth(pointer(memory), ctypes.c_int64(COLD_BYTES), threads, 3)
                peak = library.peak_rate(threads, options.repeats)
                context = 1024 if op.kind == "attention" else rows
                seconds, packed = time_operator(library, number, op, options.dtype, memory, rows=rows, position=context - rows,
                                                threads=threads, repeats=options.repeats)
                moved, flops = packed, 2.0 * packed / ELEMENT_BYTES[options.dtype] * rows
                if op.kind == "attention":
                    moved = context * 3 * 64 * 2 * ELEMENT_BYTES[options.dtype]
                    flops = 4.0 * 9 * 64 * rows * (context - rows / 2)
                gb_s, gflop_s = moved / seconds * 1e-9, flops / seconds * 1e-9
                report({"what": op.name, "threads": threads, "rows": rows, "us": round(seconds * 1e6, 1), "gb_s": round(gb_s, 2),
                        "of_bandwidth": round(gb_s / bandwidth, 2), "machine_gb_s": round(bandwidth, 1), "gflop_s": round(gflop_s, 1),
                        "of_peak": round(gflop_s / peak, 2), "machine_gflop_s": round(peak, 1)},
                       options.json)


def report(line: dict[str, object], as_json: bool) -> None:
    print(json.dumps(line) if as_json else "  ".join(f"{k} {v}" for k, v in line.items()), flush=True)


if __name__ == "__main__":
    entry.run(main)
