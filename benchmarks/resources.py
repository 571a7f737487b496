"""What programs for GPUs take to compile and of the machine, without a GPU: `python -m benchmarks.resources SHAPE[:RANKS] ... [--spills] [--keep FOLDER]`.

One JSON line a program: seconds of processor time, registers, bytes of spill stores and loads a thread. `--spills` compiles with line numbers and lists which
source lines spill, innermost first (needs `nvdisasm`, of the package nvidia-cuda-nvdisasm or a CUDA toolkit, on the PATH). `--keep` leaves machine code there.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import entry
from mpk.codegen import cuda_source
from mpk.codegen.cuda_program import KERNEL, CudaProgramBuilder
from mpk.codegen.nvrtc import Cubin, compile_cubin
from mpk.codegen.prompt_program import PromptProgram
from mpk.errors import TargetError
from mpk.models import registry, shapes
from mpk.passes import pipeline
from mpk.passes.partition import Options
from mpk.runtime.cuda_engine import prompt_graph
from mpk.targets import hardware

LOCATION = re.compile(r'## File "([^"]+)", line (\d+)')
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(.*?);")
SHOWN = 4  # lines of a chain of inlined calls


def compiled(name: str, ranks: int, lines: bool) -> tuple[Cubin, float]:
    """The program of a named shape for an H200, never from the cache, and the seconds of processor time."""
    target = hardware.load("h200")
    assert target.kernel is not None
    graph = pipeline.lower(registry.build_graph(shapes.shape(name)), target, Options(target.max_rows, target.max_rows, "bf16", ranks))
    builder = CudaProgramBuilder(graph)
    prompt = PromptProgram(prompt_graph(graph, target), builder) if ranks == 1 else None
    variants = [*builder.variants, *(prompt.variants if prompt is not None else [])]
    options = (*cuda_source.OPTIONS, *(("--generate-line-info",) if lines else ()))
    begin = time.process_time()
    cubin = compile_cubin(builder.text(target.kernel.stages, prompt), cuda_source.headers(v.kind for v in variants), target.kernel.architecture, options)
    return cubin, time.process_time() - begin


def spills(text: str) -> Iterator[tuple[str, str]]:
    """(LDL or STL, source lines) of every spill of the kernel in what `nvdisasm -c -gi` prints."""
    inside, fresh = False, False
    chain: list[str] = []
    for line in text.splitlines():
        if line.startswith("\t.section"):
            inside = KERNEL in line
        if found := LOCATION.search(line):
            chain = [] if not fresh else chain
            fresh = True
            chain.append(f"{'/'.join(Path(found[1]).parts[-2:])}:{found[2]}")
        elif inside and (instruction := INSTRUCTION.search(line)):
            fresh = False
            if kind := re.search(r"\b(LDL|STL)\b", instruction[1]):
                yield kind[1], " < ".join(chain[:SHOWN])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", help="a named shape, or one with the number of GPUs that share it: Llama-3.1-8B:2")
    parser.add_argument("--spills", action="store_true")
    parser.add_argument("--keep", type=Path, help="folder for machine code")
    given = parser.parse_args()
    if given.spills and shutil.which("nvdisasm") is None:
        raise TargetError("nvdisasm is not on the PATH", remedy="pip install nvidia-cuda-nvdisasm, or a CUDA toolkit")
    for name, ranks in map(entry.shape_and_ranks, given.shapes):
        cubin, seconds = compiled(name, ranks, given.spills)
        r = cubin.resources[KERNEL]
        print(json.dumps({"model": name, "tp": ranks, "seconds": round(seconds, 1), "code_kb": len(cubin.image) // 1024, "registers": r.registers, "stack": r.stack,
                          "spill_stores": r.spill_stores, "spill_loads": r.spill_loads}), flush=True)
        if given.keep is not None:
            given.keep.mkdir(parents=True, exist_ok=True)
            (given.keep / f"{name}-{ranks}.cubin").write_bytes(cubin.image)
        if given.spills:
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                Path(file.name).write_bytes(cubin.image)
                text = subprocess.run(["nvdisasm", "-c", "-gi", file.name], check=True, capture_output=True, text=True).stdout
            for kind, where in spills(text):
                print(kind, where, flush=True)


if __name__ == "__main__":
    entry.run(main)
