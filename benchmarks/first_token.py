"""How long a new process takes to its first token with a warm cache: `python -m benchmarks.first_token SHAPE [--folder F] [--target T]`.

Writes a model folder of random bf16 weights of a named shape (unless the folder holds one), then starts processes that load it, build
and generate one token: the first fills the caches, the others are measured. Beside them the time in which the same bytes are only read, by as
many threads. Prints one JSON line: seconds from the start of the process to its first token, and of that beyond reading.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mpk
from benchmarks import entry
from mpk.models import registry, shapes
from mpk.targets.hardware import available_cpus

CHILD = """
import sys, time
import mpk
from mpk import frontend
from mpk.errors import UserError
try:
    loaded = frontend.load(sys.argv[1])
    compiler = mpk.Compiler(sys.argv[2], max_batch=1)
    graph = compiler.lower_model(loaded)
    lowered = time.time()
    engine = compiler.build(graph)
    built = time.time()
    engine.create_instance(max_batch=1, max_context=256).generate([[1, 2, 3]], max_new_tokens=1, stop_tokens=[])
except UserError as error:
    sys.exit(str(error))
print(lowered, built, time.time())
"""
SHARD_BYTES = 1 << 30
READ_BYTES = 8 << 20
LIMIT_S = 600  # of one process


def write_folder(name: str, folder: Path) -> None:
    """config.json and shards of safetensors with bf16 values of deviation 0.02."""
    import torch
    from safetensors.torch import save_file

    config = shapes.shape(name)
    folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def flush() -> None:
        file = f"model-{len(set(weight_map.values())):05d}.safetensors"
        save_file(shard, folder / file)
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for weight in registry.build_graph(config).weights.values():
        values = torch.empty(weight.shape, dtype=torch.bfloat16, device=device)
        shard[weight.name] = (values.normal_(0, 0.02) if len(weight.shape) > 1 else values.fill_(1)).cpu()
        if sum(t.nbytes for t in shard.values()) > SHARD_BYTES:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(dict(shapes.SHAPES[next(n for n in shapes.SHAPES if n.lower() == name.lower())])))


def read_seconds(folder: Path) -> float:
    """Time to read all shards into memory."""
    parts = [(p, at) for p in sorted(folder.glob("*.safetensors")) for at in range(0, p.stat().st_size, READ_BYTES)]

    def read(part: tuple[Path, int]) -> int:
        with part[0].open("rb") as file:
            file.seek(part[1])
            return len(file.read(READ_BYTES))

    begin = time.perf_counter()
    with ThreadPoolExecutor(min(8, available_cpus())) as pool:
        list(pool.map(read, parts))
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--target", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    entry.require_least(arguments, repeats=1)
    mpk.Compiler(arguments.target).require_device()  # before gigabytes of weights are written
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        if not (folder / "config.json").exists():
            write_folder(arguments.shape, folder)
        runs = []
        for _ in range(arguments.repeats + 1):
            begin = time.time()
            done = subprocess.run([sys.executable, "-c", CHILD, str(folder), arguments.target], capture_output=True, text=True, check=False, timeout=LIMIT_S)
            if done.returncode != 0:
                raise SystemExit(f"first_token: {done.stderr.strip()}")
            runs.append([float(t) - begin for t in done.stdout.split()])
        reading = statistics.median(read_seconds(folder) for _ in range(arguments.repeats))
        lowered, built, token = (statistics.median(column) for column in zip(*runs[1:], strict=True))
        print(json.dumps({"model": arguments.shape, "target": arguments.target, "first_token_s": round(token, 2), "reading_s": round(reading, 2),
                          "beyond_reading_s": round(token - reading, 2), "lowered_s": round(lowered, 2), "built_s": round(built, 2),
                          "cold_first_token_s": round(runs[0][2], 2)}))


if __name__ == "__main__":
    entry.run(main)
