"""Compile CUDA C++ with NVRTC: no CUDA toolkit and no GPU needed, only the packages `cuda-bindings` and `nvidia-cuda-nvrtc`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpk.errors import InternalError, TargetError

# __CUDA_ARCH_FEAT_SM90_A instructions (bulk copies to shared memory, wgmma) need the architecture with the "a".
BASE_OPTIONS = ("--std=c++17", "--device-int128", "--ptxas-options=-v", "--extra-device-vectorization")


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of one kernel. Bytes a thread for stack and spills, bytes a block for static shared memory."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


@dataclass(frozen=True)
class Cubin:
    """Machine code of one program for one architecture, with the resources of each kernel by name, and what ptxas says costs time."""

    image: bytes
    architecture: str
    resources: Mapping[str, Resources]
    losses: tuple[str, ...] = ()


def _bindings() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise TargetError("NVRTC is not installed", remedy="pip install 'mpk[cuda]' (cuda-bindings and nvidia-cuda-nvrtc)") from error
    return nvrtc


def version() -> tuple[int, int]:
    """Version of the NVRTC library found; raises `TargetError` if there is none."""
    nvrtc = _bindings()
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise TargetError("the NVRTC library cannot be loaded", actual=str(error), remedy="pip install nvidia-cuda-nvrtc") from error
    return int(major), int(minor)


def compile_cubin(source: str, headers: Mapping[str, str], architecture: str, options: Sequence[str] = ()) -> Cubin:
    """Compile `source` (with `headers` by include name) for `architecture` ("sm_90a").

    Raises `TargetError` where NVRTC is missing or does not know the architecture, `InternalError` with the compiler's log for
    code that does not compile.
    """
    version()
    nvrtc = _bindings()
    names, texts = list(headers), [headers[n].encode() for n in headers]
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"program.cu", len(names), texts, [n.encode() for n in names])
    try:
        flags = [f"--gpu-architecture={architecture}", *BASE_OPTIONS, *options]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace")
        if result == nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION:
            raise TargetError(f"NVRTC {version()} does not take the options for {architecture}", actual=log.strip(),
                              remedy="install nvidia-cuda-nvrtc 12.4 or newer")
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise InternalError(f"generated CUDA source does not compile:\n{log}")
        image = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Cubin(image, architecture, parse_resources(log), tuple(line.strip() for line in log.splitlines() if "Performance Loss" in line))


def _text(size: Any, get: Any, program: Any) -> bytes:
    _, count = size(program)
    data = b" " * count
    get(program, data)
    return data


def parse_resources(log: str) -> dict[str, Resources]:
    """Resources per kernel from the verbose log of ptxas."""
    out: dict[str, Resources] = {}
    name, stack = "", (0, 0, 0)
    for line in log.splitlines():
        if match := re.search(r"(?:Compiling entry function|Function properties for) '?([\w$]+)'?", line):
            name = match.group(1)
        if match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack = (int(match.group(1)), int(match.group(2)), int(match.group(3)))
        if match := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            out[name] = Resources(int(match.group(1)), *stack, int(shared.group(1)) if shared else 0)
    return out
