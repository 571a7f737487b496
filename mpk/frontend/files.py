"""JSON objects from files, and fingerprints of files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from mpk.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; `ModelError` naming the file if it is missing, unreadable or no object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ModelError(f"cannot read {path}", actual=e.strerror or str(e)) from e
    except ValueError as e:
        raise ModelError(f"{path} is not valid JSON", actual=str(e)) from e
    if not isinstance(data, dict):
        raise ModelError(str(path), expected="a JSON object", actual=type(data).__name__)
    return data


SAMPLES = 64
SAMPLE_BYTES = 4096


def files_fingerprint(files: Iterable[tuple[Path, int]]) -> str:
    """Hash of what identifies each file's contents without reading all of them; `ModelError` if a file cannot be read any more.

    Path, size, inode, times of modification and of the last change of the inode (which no program sets back), the first bytes (the
    header, of the given length), and blocks spread evenly from the first to the last.
    """
    h = xxhash.xxh3_128()
    for path, header_bytes in files:
        try:
            with open(path, "rb") as f:
                stat = os.fstat(f.fileno())
                h.update(f"{path.resolve()}|{stat.st_size}|{stat.st_ino}|{stat.st_mtime_ns}|{stat.st_ctime_ns}|".encode())
                h.update(f.read(header_bytes))
                for begin in _sample_places(stat.st_size):
                    f.seek(begin)
                    h.update(f.read(SAMPLE_BYTES))
        except OSError as e:
            raise ModelError(f"cannot read {path}", actual=e.strerror or str(e), remedy="the model must stay in place until it is built") from e
    return h.hexdigest()


def _sample_places(size: int) -> list[int]:
    """Where the samples of a file begin: at 0, at the last whole sample, and evenly between."""
    last = max(size - SAMPLE_BYTES, 0)
    return sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)})
