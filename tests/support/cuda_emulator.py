"""Task bodies of the CUDA back end on the CPU: the same kernel source, compiled as C++ around tests/cuda/emulated, for machines without a GPU."""

from __future__ import annotations

import ctypes
import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mpk.codegen import cuda_source
from mpk.codegen.cache import digest
from mpk.codegen.compile import compile_program
from mpk.codegen.program import ProgramSource

EMULATED = Path(__file__).parent.parent / "cuda" / "emulated"
PROVIDED = ("cstddef", "cstdint", "mpk/layout.hpp")  # by the C++ compiler and by its driver
ENTRY = """
namespace { TestLaunch the_launch; }
extern "C" __attribute__((visibility("default"))) void hold_back(const emulation::LateWord* words, int64_t count) {
  emulation::next_late = words, emulation::late_end = words + count, emulation::last_looks = count != 0 ? 4 * emulation::THREADS : 0;
}
extern "C" __attribute__((visibility("default"))) int run_blocks(const TestLaunch* launch, int blocks) {
  the_launch = *launch;
  emulation::blocks = blocks, emulation::body = [] { run_kind(the_launch); };
  for (emulation::block = 0; emulation::block < blocks; ++emulation::block) {
    const auto& instruction = reinterpret_cast<const mpk::Instruction*>(launch->instructions)[emulation::block];
    const auto* places = reinterpret_cast<const int64_t*>(launch->stages);
    emulation::stages = reinterpret_cast<const unsigned char*>(launch->weights) + (places != nullptr ? places[emulation::block] : instruction.weights);
    if (!emulation::run_block()) return 1;
  }
  return 0;
}
"""


class EmulatedMemory:
    """Host memory with the interface of `mpk.runtime.cuda_device.Memory`."""

    def __init__(self, size: int) -> None:
        self._raw = np.zeros(size + 256, np.uint8)
        begin = -self._raw.ctypes.data % 256
        self.bytes, self.size = self._raw[begin : begin + size], size
        self.address = self.bytes.ctypes.data

    def upload(self, data: np.ndarray, offset: int = 0) -> None:
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self.bytes[offset : offset + flat.size] = flat

    def download(self, dtype: type, count: int, offset: int = 0) -> np.ndarray:
        return self.bytes[offset : offset + np.dtype(dtype).itemsize * count].copy().view(dtype)

    def fill(self, byte: int = 0) -> None:
        self.bytes[:] = byte


class EmulatedDevice:
    """What the tests need of `mpk.runtime.cuda_device.Device`; blocks run one after the other."""

    def allocate(self, size: int) -> EmulatedMemory:
        return EmulatedMemory(size)

    def launch(self, function: ctypes.CDLL, blocks: int, threads: int, shared_bytes: int, argument: np.ndarray) -> None:
        assert argument["repeats"][0] == 1, "repetitions wait for all blocks"
        assert function.run_blocks(ctypes.c_void_p(argument.ctypes.data), blocks) == 0, "threads wait for each other for ever"

    def synchronize(self) -> None:
        """Launches are over when they return."""


@functools.cache
def library(source: str, *kinds: str) -> ctypes.CDLL:
    """The kernel `source` (see `cuda_kinds.source_of`) as a library; `kinds`: whose headers it needs."""
    headers: Mapping[str, str] = cuda_source.headers(kinds)
    text = source.replace("extern __shared__ __align__(128) unsigned char scratch[];", "unsigned char* scratch = emulation::shared_memory;")
    # The cache of programs looks at sources and *.hpp only.
    contents = digest(*(part for item in sorted(headers.items()) for part in item), *(p.read_text() for p in sorted(EMULATED.rglob("*.cuh"))))
    text = f'// {contents}\n#include "emulation.hpp"\n' + text.replace("__shared__", "static") + ENTRY
    with tempfile.TemporaryDirectory(prefix="mpk-emulated-") as folder:
        for name, content in headers.items():
            if name not in PROVIDED and not (EMULATED / name).is_file():
                path = Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content)
        return ctypes.CDLL(str(compile_program(ProgramSource(text, (EMULATED, Path(folder))), extra_flags=("-w",))))

