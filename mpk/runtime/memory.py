"""Memory of a running program: large zeroed areas that the operating system provides page by page as they are touched."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

import numpy as np

from mpk.errors import TargetError


def zeroed(shape: tuple[int, ...], dtype: np.dtype | type, huge_pages: bool = False) -> np.ndarray:
    """A zeroed array in anonymous mapped memory, page-aligned; untouched pages take no memory. Raises `TargetError` where the process may not map so much."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    try:
        area = mmap.mmap(-1, max(size, 1))
    except OSError as error:  # a limit of the process; the machine's memory is checked before
        raise TargetError(f"{size} bytes for activations and cache cannot be mapped", actual=error.strerror or str(error),
                          remedy="a shorter max_context, or a larger limit of this process (ulimit -v)") from error
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # not offered by every kernel; only speed depends on it
            area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, np.dtype(dtype), int(np.prod(shape, dtype=np.int64))).reshape(shape)


def address(array: np.ndarray | None) -> int:
    """Address of an array's first element; 0 for None and for an empty array."""
    return 0 if array is None or array.size == 0 else int(array.__array_interface__["data"][0])


def available_bytes() -> int | None:
    """Memory that this process may still take: the least of the machine's and the control group's; None: unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            found.append(int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return max(0, min(found)) if found else None
