"""What lies between the last word of qkv and the last word of attn: `python benchmarks/lab/attention.py [folder of cubins]`.

A chain of stand-in products (every SM waits for all of its input's words and writes its share of the output's) with the real attention
and merge between them, keys and values cold, weights streaming. Prints, for each shape and step, medians over layers in microseconds:
`hop` (the chain without attention), `path` (with attention, less the hop), and from the moment the last SM wrote qkv: when the last SM
had its queries, had written its partial results, the last merging SM had them, had written attn, and all SMs had attn. With a folder
and without a GPU the programs are only compiled into it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from mpk.codegen import cuda_source, layout, nvrtc
from mpk.codegen.layout import KV_PAGE_TOKENS
from mpk.codegen.program import constant
from mpk.passes.split_attention import choose_splits
from mpk.runtime.cuda_device import Device, device_count
from mpk.tasks.rotary_attention.sharing import STATISTICS

SMS, LAYERS, STEPS, STREAM = 132, 48, 3, 512 << 20
SHARED = 1024 + 10 * 16384 + 2048 + 65536
SHAPES = {"1b": (32, 8, 64, False), "8b": (32, 8, 128, False), "0.6b": (16, 8, 128, True)}
LAB = np.dtype([("launch", layout.dtype("Launch")), ("kernel", layout.dtype("Kernel")),
                *((n, "<u8") for n in ("qkv", "partial", "attn", "rope", "qkv_bytes", "partial_bytes", "attn_bytes", "times", "arrivals", "stream", "stream_bytes")),
                *((n, "<i4") for n in ("layers", "steps", "flight", "hop_only", "segments", "reserved")), ("segment", layout.dtype("Segment"), 16)], align=True)


def program(shape: str, least: int, junk: int, folder: Path | None) -> bytes:
    heads, kv_heads, head_dim, norm = SHAPES[shape]
    constants = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "window": 0, "splits": choose_splits(kv_heads, SMS), "least": least,
                 "scale": head_dim**-0.5, "eps": 1e-6, "q_norm": norm, "k_norm": norm}
    path = None if folder is None else folder / f"{shape}_{least}_{junk}.cubin"
    if path is not None and path.is_file():
        return path.read_bytes()
    lines = " ".join(f"static constexpr {constant(n, v)};" for n, v in constants.items())
    source = f"#define JUNK {junk}\nstruct V {{ {lines} }};\n" + (Path(__file__).parent / "attention.cuh").read_text()
    made = nvrtc.compile_cubin(source, cuda_source.headers(["rotary_attention", "attention_combine"]), "sm_90a", cuda_source.OPTIONS)
    print(shape, least, junk, made.resources, flush=True)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(made.image)
    return made.image


class Lab:
    """Memory for one shape and step; `run` gives the times of the last step."""

    def __init__(self, device: Device, shape: str, segments: list[tuple[int, int]]) -> None:
        heads, kv_heads, head_dim, _ = SHAPES[shape]
        rows, splits = sum(r for _, r in segments), choose_splits(kv_heads, SMS)
        self.device, lab = device, np.zeros(1, LAB)
        sizes = {"qkv": rows * (heads + 2 * kv_heads) * head_dim * 2, "partial": 16 * heads * splits * (head_dim + STATISTICS) * 4, "attn": rows * heads * head_dim * 2}
        at = 0
        for name, size in sizes.items():
            each = -(-size // 256) * 256
            lab[name], lab[f"{name}_bytes"] = at, each
            at += each * LAYERS
        lab["rope"] = at
        rope = np.random.default_rng(0).standard_normal((rows, head_dim)).astype(np.float32)
        at += -(-rope.nbytes // 256) * 256
        self.stride = at
        pages = [-(-(p + r) // KV_PAGE_TOKENS) for p, r in segments]
        most, total = max(pages), sum(pages)
        table = np.zeros((len(segments), most), np.int32)
        order, used = np.random.default_rng(1).permutation(total), 0
        for s, n in enumerate(pages):
            table[s, :n], used = order[used : used + n], used + n
        page_bytes = kv_heads * 2 * KV_PAGE_TOKENS * head_dim * 2
        self.layers = max(2, min(LAYERS, (8 << 30) // (total * page_bytes)))
        self.memory = {"arena": device.allocate(2 * at), "kv": device.allocate(self.layers * total * page_bytes), "page_table": device.copy(table),
                       "params": device.copy(np.ones(1024, np.float32)), "stop": device.copy(np.zeros(64, np.int32)),
                       "times": device.allocate(8 * LAYERS * 6 * SMS), "arrivals": device.allocate(8), "stream": device.allocate(STREAM), "stall": device.allocate(64 * 256)}
        self.memory["kv"].fill(0x3C)
        self.memory["stream"].fill(0x11)
        self.rope, self.rows = rope, rows
        for name in ("arena", "kv", "page_table", "params", "stall"):
            lab["launch"][name] = self.memory[name].address
        lab["launch"]["flagged_stride"], lab["launch"]["max_pages"], lab["launch"]["num_pages"] = at, most, total
        lab["launch"]["spans"], lab["launch"]["stall_limit_ns"] = self.memory["times"].address, 300_000_000
        lab["kernel"]["stop"] = self.memory["stop"].address
        for name in ("times", "arrivals", "stream"):
            lab[name] = self.memory[name].address
        lab["stream_bytes"] = STREAM
        lab["layers"], lab["steps"], lab["segments"] = self.layers, STEPS, len(segments)
        row = 0
        for s, (position, count) in enumerate(segments):
            lab["segment"][0][s] = (s, row, count, position)
            row += count
        self.lab = lab

    def run(self, image: bytes, flight: int, hop_only: bool) -> np.ndarray:
        """int64 [layers, 6, blocks]: qkv written, queries there, partials written, partials there, attn written, input there."""
        self.memory["arena"].fill(0xFF)
        for copy in (0, 1):
            self.memory["arena"].upload(self.rope, copy * self.stride + int(self.lab["rope"][0]))
        for name in ("arrivals", "times"):
            self.memory[name].fill(0)
        self.lab["flight"], self.lab["hop_only"] = flight, hop_only
        function = self.device.function(self.device.load(image), "run_lab", SHARED)
        self.device.launch(function, SMS, 384, SHARED, self.lab)
        self.device.synchronize()
        return self.memory["times"].download(np.int64, self.layers * 6 * SMS).reshape(self.layers, 6, SMS)


def measure(device: Device, shape: str, segments: list[tuple[int, int]], least: int, junk: int, flight: int, folder: Path | None, label: str) -> None:
    image, lab = program(shape, least, junk, folder), Lab(device, shape, segments)
    runs = {hop: lab.run(image, flight, hop)[1:].astype(float) for hop in (True, False)}
    hops = runs[True]
    hop = np.median(hops[1:, 5].max(1) - hops[:-1, 0].max(1)) / 1e3
    t = runs[False]
    begin = t[:-1, 0].max(1)
    last = [np.median(t[:-1, what].max(1) - begin) / 1e3 for what in (1, 2, 3, 4)] + [np.median(t[1:, 5].max(1) - begin) / 1e3]
    own = [np.median([np.median((row[end] - row[first])[row[first] > 0]) for row in t[:-1]]) / 1e3 for first, end in ((1, 2), (3, 4))]
    _, kv_heads, head_dim, _ = SHAPES[shape]
    bytes_ = sum(p + r for p, r in segments) * kv_heads * head_dim * 4
    print(json.dumps({"shape": shape, "step": label, "least": least, "junk": junk, "flight": flight, "hop": round(float(hop), 2), "path": round(float(last[4] - hop), 2),
                      "queries": round(float(last[0]), 2), "partials": round(float(last[1]), 2), "merging": round(float(last[2]), 2), "attn": round(float(last[3]), 2),
                      "all": round(float(last[4]), 2), "run": round(float(own[0]), 2), "merge": round(float(own[1]), 2),
                      "kv_us_at_4TB": round(bytes_ / 4e6, 2)}), flush=True)


# Shape, segments (position, rows), least blocks of a split, steps of code between layers, stages of weights on their way, label.
CASES = [(shape, [(512, 1)], 4, junk, flight, "512") for shape in SHAPES for junk, flight in ((0, 0), (0, 2), (6000, 2))]
CASES += [(shape, [(context, 1)], 4, 6000, flight, str(context)) for shape, context in (("8b", 4096), ("1b", 4096), ("8b", 32000)) for flight in (2, 0)]
CASES += [(shape, [(512, 1)] * batch, 4, 6000, flight, f"512 x {batch}") for shape in ("8b", "0.6b") for batch in (4, 8, 16) for flight in (2, 0)]
CASES += [(shape, [(37, 1)], 4, 6000, 2, "37") for shape in SHAPES] + [("8b", [(200, 1), (4000, 1), (900, 1)], 4, 6000, 2, "200, 4000, 900"), ("8b", [(512, 16)], 4, 6000, 2, "prompt 16")]


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if device_count() == 0:
        for shape, least, junk in sorted({(c[0], c[2], c[3]) for c in CASES}):
            program(shape, least, junk, folder)
        return
    device = Device(0)
    for shape, segments, least, junk, flight, label in CASES:
        measure(device, shape, segments, least, junk, flight, folder, label)


if __name__ == "__main__":
    main()
