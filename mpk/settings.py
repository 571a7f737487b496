"""Every environment variable that mpk reads, in one place.

| variable | meaning |
| --- | --- |
| MPK_CACHE | folder of compiled programs and packed weights (default: ~/.cache/mpk) |
| MPK_DUMP | folder into which each pass writes its result as text |
| MPK_STOP_AFTER | `partition` or a pass behind it: lowering stops there, for debugging |
| MPK_DEBUG | 1: show Python tracebacks of refused inputs |
| MPK_CHECKED | 1: programs for GPUs hand over inside a block in ways that compute-sanitizer can follow (slower) |
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    return Path(os.environ.get("MPK_CACHE") or Path.home() / ".cache" / "mpk")


def dump_folder() -> Path | None:
    value = os.environ.get("MPK_DUMP")
    return Path(value) if value else None


def stop_after() -> str | None:
    return os.environ.get("MPK_STOP_AFTER") or None


def checked() -> bool:
    return os.environ.get("MPK_CHECKED", "") not in ("", "0")


def debug() -> bool:
    return os.environ.get("MPK_DEBUG", "") not in ("", "0")
