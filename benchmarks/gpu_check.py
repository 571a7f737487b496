"""Everything that is checked and measured on a machine with GPUs, in one command that ends by itself: `python -m benchmarks.gpu_check --output DIR`.

First all programs are compiled, on all processors. Then every GPU takes one part after the other: first those that measure, then those that check;
what needs several GPUs comes last, alone. Every part is a process with a time limit and a log in the folder; `summary.jsonl` there has a line a
part: how it ended and how long it took. With `--seconds` no part is started that might end later. Measurements go to `results.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import entry
from mpk.runtime import cuda_device
from tests.support.models import TINY_MODELS
from tests.support.smollm2 import MODEL
from tests.test_cuda_shapes import SHAPES, config_of

PYTHON = sys.executable
MEASURED = ("Llama-3.1-8B", "Llama-3.2-1B", "Qwen3-0.6B", "Qwen3-8B", "Qwen3-1.7B")
BESIDE_TORCH = MEASURED[:4]
TINY, ODD = tuple(TINY_MODELS), tuple(SHAPES)
SHARED, CHECKED = "ranks-", "checked-"
SANITIZERS = ("memcheck", "racecheck", "synccheck")


@dataclass(frozen=True)
class Part:
    """One process. `gpus`: how many it needs; `programs`: (shape or tiny model, devices that share it, max_batch) to compile before."""

    name: str
    command: tuple[str, ...]
    limit_s: int
    gpus: int = 1
    programs: tuple[tuple[str, int, int], ...] = ()


def module(name: str, *arguments: str) -> tuple[str, ...]:
    return (PYTHON, "-m", name, *arguments)


def bench(shape: str, *arguments: str, batch: str = "1", tp: int = 1) -> tuple[str, ...]:
    return module("mpk", "bench", "--model", shape, "--target", "auto", "--batch", batch, "--tp", str(tp), "--json", "--output", "{results}", *arguments)


def parts(devices: int) -> list[Part]:
    """All parts, in the order in which they are taken."""
    tiny = tuple((name, 1, 16) for name in TINY)
    measure = [Part(f"steps {shape}", bench(shape, "--context", "512"), 90, programs=((shape, 1, 1),)) for shape in MEASURED]
    measure += [
        Part("batches", bench("Llama-3.1-8B", "--context", "512", "--repeats", "1", batch="1,8,16"), 120, programs=(("Llama-3.1-8B", 1, 16),)),
        Part("contexts 8B", bench("Llama-3.1-8B", "--context", "4096,32768", "--repeats", "1"), 120, programs=(("Llama-3.1-8B", 1, 1),)),
        Part("contexts 1B", bench("Llama-3.2-1B", "--context", "4096", "--repeats", "1"), 60, programs=(("Llama-3.2-1B", 1, 1),)),
        Part("prompts 8B", module("benchmarks.prompt", "Llama-3.1-8B", "512", "2048"), 90, programs=(("Llama-3.1-8B", 1, 16),)),
        Part("prompts 1B", module("benchmarks.prompt", "Llama-3.2-1B", "512", "2048"), 60, programs=(("Llama-3.2-1B", 1, 16),)),
        Part("trace", module("mpk", "trace", "Llama-3.2-1B", "--target", "auto", "--context", "512", "--json", "--output", "{folder}/trace.pftrace",
                             "--html", "{folder}/trace.html"), 60, programs=(("Llama-3.2-1B", 1, 1),)),
        Part("first token", module("benchmarks.first_token", "Llama-3.2-1B"), 120, programs=(("Llama-3.2-1B", 1, 1),)),
    ]
    measure += [Part(f"beside torch {shape}", bench(shape, "--context", "512", "--against", "torch-compile"), 150, programs=((shape, 1, 1),))
                for shape in BESIDE_TORCH]
    check = [
        Part("kinds", module("pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *_tests("test_cuda_kinds", "test_cuda_advance", "test_cuda_prompt_kinds",
                                                                                               "test_cuda_prompt_linear")), 180),
        Part("engine", module("pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/test_cuda_engine.py"), 240, programs=tiny),
        Part("shapes", module("pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/test_cuda_shapes.py"), 300, programs=tuple((name, 1, 16) for name in ODD)),
        Part("real weights", module("pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/test_cuda_smollm2.py"), 180, programs=((MODEL, 1, 16),)),
        Part("prompts against torch", module("tests.support.prompt_check", "--alone", "llama", "qwen3-biases", "qwen2-window", "llama-llama3"), 240, programs=tiny),
        Part("soak", module("benchmarks.soak"), 240, programs=(("SmolLM2-135M", 1, 16),)),
    ]
    check += [Part(tool, (*(("env", "MPK_CHECKED=1") if tool == "racecheck" else ()), "compute-sanitizer", "--tool", tool, "--print-limit", "20", "--error-exitcode", "1", *module("tests.support.cuda_sanitize")), 120,
                   programs=((CHECKED + "qwen3" if tool == "racecheck" else "qwen3", 1, 4),)) for tool in SANITIZERS]
    small_shared = tuple((SHARED + name, ranks, 16) for name in ("qwen3", "llama") for ranks in (1, 2))
    shared = [Part(f"tensor parallel {part}", module("benchmarks.tensor_parallel", "--tp", "2", "--part", part, "--here"), 300, gpus=2,
                   programs=tuple((shape, 2, 16) for shape in ("Llama-3.1-8B", "Llama-3.1-70B")) if part in ("steps", "trace") else small_shared if part == "correct" else ())
              for part in ("correct", "soak", "steps", "trace")]
    return measure + check + (shared if devices > 1 else [])


def _tests(*names: str) -> list[str]:
    return [f"tests/{n}.py" for n in names if Path(f"tests/{n}.py").exists()]


def lowered(name: str, ranks: int, batch: int) -> Any:
    """The graph of a program: of a named shape, a tiny model, a shape of the tests, or (`ranks-NAME`) a small one that ranks share."""
    import mpk
    from mpk import frontend

    if name.startswith(SHARED):
        from benchmarks import tensor_parallel

        return tensor_parallel.lower(tensor_parallel.SMALL[name.removeprefix(SHARED)], ranks, None)
    compiler = mpk.Compiler("auto", tensor_parallel_size=ranks, max_batch=batch)
    if name in TINY:
        from tests.support.cuda_check import rounded_model

        return compiler.lower_model(rounded_model(name))
    if name in ODD:
        with tempfile.TemporaryDirectory() as folder:
            config_of(name).save_pretrained(folder)
            return compiler.lower_model(frontend.load(folder, shapes=True))
    return compiler.lower_model(frontend.load(name, shapes=True))


def compile_program(program: tuple[str, int, int]) -> str:
    """Compile one program into the cache; a line with its time and the kernel's resources."""
    from mpk.codegen.cuda_program import CudaProgramBuilder, compile_cuda_program
    from mpk.codegen.prompt_program import PromptProgram
    from mpk.runtime.cuda_engine import prompt_graph
    from mpk.targets import hardware

    name, *sizes = program
    os.environ["MPK_CHECKED"] = str(int(name.startswith(CHECKED)))
    begin = time.perf_counter()
    graph = lowered(name.removeprefix(CHECKED), *sizes)
    target = hardware.load(graph.target)
    assert target.kernel is not None
    end = time.perf_counter()
    builder = CudaProgramBuilder(graph)
    cubin = compile_cuda_program(builder, target.kernel, PromptProgram(prompt_graph(graph, target), builder) if graph.ranks == 1 else None)
    return json.dumps({"program": program, "lowered_s": round(end - begin, 1), "compiled_s": round(time.perf_counter() - end, 1),
                       "kernel": str(cubin.resources["mpk_run"])})


class Run:
    """All parts on all GPUs."""

    def __init__(self, chosen: Sequence[Part], devices: int, folder: Path, seconds: float) -> None:
        self.devices, self.folder, self.end = devices, folder, time.monotonic() + seconds
        self.chosen = chosen
        self.failed: list[str] = []
        self.lock = threading.Lock()

    def compile(self) -> None:
        programs = list(dict.fromkeys(p for part in self.chosen for p in part.programs))
        fresh = multiprocessing.get_context("spawn")  # a forked process could not use the driver
        with ProcessPoolExecutor(max(1, min(len(programs), os.cpu_count() or 1)), mp_context=fresh) as pool, (self.folder / "compile.log").open("w") as log:
            for line in pool.map(compile_program, programs):
                print(line, file=log, flush=True)

    def run(self) -> None:
        begin = time.monotonic()
        self.compile()
        self._say({"part": "compile", "ended": 0, "seconds": round(time.monotonic() - begin, 1)})
        waiting = deque(p for p in self.chosen if p.gpus == 1)
        lanes = [threading.Thread(target=self._lane, args=(gpu, waiting)) for gpu in range(self.devices)]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        for part in self.chosen:
            if part.gpus > 1:
                self._part(part, None)

    def _lane(self, gpu: int, waiting: deque[Part]) -> None:
        while True:
            with self.lock:
                if not waiting:
                    return
                part = waiting.popleft()
            self._part(part, gpu)

    def _part(self, part: Part, gpu: int | None) -> None:
        limit = min(part.limit_s, self.end - time.monotonic())
        if limit < part.limit_s / 3:
            self._say({"part": part.name, "ended": "not started: too little time left", "seconds": 0})
            return
        given = {"folder": str(self.folder), "results": str(self.folder / "results.jsonl")}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["."] + [p for p in [os.environ.get("PYTHONPATH", "")] if p])}
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
        begin = time.monotonic()
        with (self.folder / f"{part.name.replace(' ', '_')}.log").open("w") as log:
            try:
                code = _ended(subprocess.Popen([a.format(**given) for a in part.command], stdout=log, stderr=subprocess.STDOUT, env=environment), limit)
            except OSError as error:
                code = f"cannot be started: {error}"
        self._say({"part": part.name, "gpu": gpu, "ended": code, "seconds": round(time.monotonic() - begin, 1)})

    def _say(self, line: dict[str, object]) -> None:
        with self.lock, (self.folder / "summary.jsonl").open("a") as summary:
            print(json.dumps(line), flush=True)
            print(json.dumps(line), file=summary, flush=True)
            if line["ended"] != 0:
                self.failed.append(str(line["part"]))


def _ended(process: subprocess.Popen[bytes], limit: float) -> int | str:
    """The exit status, or what it was stopped for: first as by Ctrl-C, so that it says what it has found."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
    return f"longer than {limit:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of logs and results")
    parser.add_argument("--seconds", type=float, default=3600.0, help="time for everything")
    parser.add_argument("--only", action="append", help="parts whose names contain this (may be given several times)")
    parser.add_argument("--list", action="store_true", help="name the parts and end")
    given = parser.parse_args()
    devices = cuda_device.device_count()
    chosen = [p for p in parts(max(devices, 2) if given.list else devices) if not given.only or any(text in p.name for text in given.only)]
    if given.list:
        print("\n".join(f"{p.name}: at most {p.limit_s} s, {p.gpus} GPU{'s' if p.gpus > 1 else ''}" for p in chosen))
        return
    entry.require_gpus()
    given.output.mkdir(parents=True, exist_ok=True)
    run = Run(chosen, devices, given.output, given.seconds)
    run.run()
    raise SystemExit(f"failed: {', '.join(run.failed)}" if run.failed else 0)


if __name__ == "__main__":
    entry.run(main)
