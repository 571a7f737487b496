"""Compile a program's source into a shared library, once for every combination of what it depends on."""

from __future__ import annotations

import errno
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mpk.codegen import layout
from mpk.codegen.cache import Store, digest
from mpk.codegen.program import ProgramSource
from mpk.errors import InternalError, TargetError

# What a compiler says (of itself or of the assembler and linker it starts) when it cannot write.
DISK_ERRORS = (*map(os.strerror, (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)), "File size limit exceeded")
CANDIDATES = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wall")
NATIVE = ("-march=native",)
LANGUAGE_TEST = "#if __cplusplus < 201703L\n#error C++17\n#endif\n#include <atomic>\n#include <thread>\nint main() { return 0; }\n"


@dataclass(frozen=True)
class CompilerTool:
    """A C++17 compiler: the command that starts it, and what it says about itself."""

    command: tuple[str, ...]
    version: str


def find_compiler() -> CompilerTool:
    """$CXX, or the first of c++, g++, clang++; raises `TargetError` if none is there or it cannot do C++17."""
    chosen = os.environ.get("CXX")
    if chosen:
        try:
            command = tuple(shlex.split(chosen))
        except ValueError as error:
            raise TargetError(f"C++ compiler '{chosen}' (from CXX) is no command line ({error})", remedy="set CXX to a C++17 compiler, or unset it") from error
        if not command or shutil.which(command[0]) is None:
            raise TargetError(f"C++ compiler '{chosen}' (from CXX) is not there", remedy="set CXX to a C++17 compiler, or unset it")
        return _ask(command)
    for name in CANDIDATES:
        if shutil.which(name) is not None:
            return _ask((name,))
    raise TargetError("no C++ compiler found", expected="c++, g++ or clang++ in PATH",
                      remedy="install one (g++ 9 or clang 10 and newer), or set CXX")


def _ask(command: tuple[str, ...]) -> CompilerTool:
    return CompilerTool(command, _version(command, os.environ.get("PATH", "")))


@cache
def _version(command: tuple[str, ...], path: str) -> str:
    try:
        return subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace", timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise TargetError(f"C++ compiler '{' '.join(command)}' does not run ({error})", remedy="set CXX to a C++17 compiler") from error


@cache
def processor() -> str:
    """What `-march=native` depends on: architecture, model and instruction set extensions."""
    parts = [platform.machine()]
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return " ".join([*parts, platform.processor()])
    for key in ("model name", "flags", "Features"):
        match = re.search(rf"^{key}\s*:\s*(.*)$", text, re.MULTILINE)
        parts.append(match.group(1) if match else "")
    return " ".join(parts)


def compile_program(source: ProgramSource, *, portable: bool = False, sanitize: str | None = None, extra_flags: Sequence[str] = ()) -> Path:
    """Path of the compiled library, from the cache where it is there.

    `portable` leaves out `-march=native`; `sanitize` is a sanitizer's name ("thread"), for tests. Raises `TargetError` if there is
    no compiler or the cache cannot be written, `InternalError` with the compiler's first message if the source does not compile.
    """
    compiler = find_compiler()
    flags = [*FLAGS, *(() if portable else NATIVE), *([f"-fsanitize={sanitize}", "-g"] if sanitize else []), *extra_flags]
    header = layout.header()
    key = digest(source.text, header, *_headers(source.include_dirs), " ".join(compiler.command), compiler.version, " ".join(flags), processor())
    store = Store("programs", ".so")
    entry = store.find(key)
    if entry is None:
        made = store.temporary(key)
        try:
            build_library(compiler, source, header, flags, made)
            entry = store.commit(key, made, {"compiler": compiler.version.partition("\n")[0], "flags": flags})
        finally:
            made.unlink(missing_ok=True)
    return entry.path


def _headers(folders: Sequence[Path]) -> list[str]:
    return [part for folder in folders for path in sorted(folder.rglob("*.hpp")) for part in (str(path.relative_to(folder)), path.read_text())]


def build_library(compiler: CompilerTool, source: ProgramSource, header: str, flags: Sequence[str], out: Path) -> None:
    """Run the compiler in a folder of its own; `header` becomes mpk/layout.hpp. Raises as `compile_program` does."""
    try:
        with tempfile.TemporaryDirectory(prefix="mpk-build-") as folder:
            _build_in(Path(folder), compiler, source, header, flags, out)
    except OSError as error:
        raise TargetError(f"the program cannot be compiled in the temporary folder ({error.strerror or error})",
                          remedy="set TMPDIR to a folder that can be written, with enough space") from error


def _build_in(work: Path, compiler: CompilerTool, source: ProgramSource, header: str, flags: Sequence[str], out: Path) -> None:
    (work / "mpk").mkdir()
    (work / "mpk" / "layout.hpp").write_text(header)
    (work / "program.cpp").write_text(source.text)
    includes = [f"-I{work}", *(f"-I{d}" for d in source.include_dirs)]
    done = _run([*compiler.command, *flags, *includes, "-o", str(out), str(work / "program.cpp")])
    if done.returncode and "-march=native" in flags and not _accepts(compiler, work, ["-march=native"]):
        flags = [f for f in flags if f != "-march=native"]
        done = _run([*compiler.command, *flags, *includes, "-o", str(out), str(work / "program.cpp")])
    if done.returncode:
        if not _accepts(compiler, work, []):
            raise TargetError(f"C++ compiler '{' '.join(compiler.command)}' cannot compile C++17 with threads",
                              remedy="set CXX to g++ 9 or clang 10 or newer")
        refused = next((text for text in DISK_ERRORS if text in done.stderr), None)
        if refused or done.returncode < 0:
            raise TargetError(f"C++ compiler '{' '.join(compiler.command)}' cannot write {out} ({refused or f'signal {-done.returncode}'})",
                              remedy="set MPK_CACHE and TMPDIR to folders with enough space")
        raise InternalError(f"the generated program does not compile: {_first_error(done.stderr)}")
    if not out.is_file() or not out.stat().st_size:
        raise TargetError(f"C++ compiler '{' '.join(compiler.command)}' reports success but makes no output", remedy="set CXX to a C++17 compiler")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        environment = {**os.environ, "LC_ALL": "C"}  # messages in English
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=environment)
    except OSError as error:
        raise TargetError(f"C++ compiler '{command[0]}' does not run ({error.strerror or error})", remedy="set CXX to a C++17 compiler") from error


def _accepts(compiler: CompilerTool, work: Path, flags: list[str]) -> bool:
    test = work / "test.cpp"
    test.write_text(LANGUAGE_TEST)
    return _run([*compiler.command, "-std=c++17", *flags, "-fsyntax-only", str(test)]).returncode == 0


def _first_error(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line]
    return lines[0] if lines else text[:500]
