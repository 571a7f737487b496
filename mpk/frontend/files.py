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


def files_fingerprint(files: Iterable[tuple[Path, int]]) -> str:
    """Hash over path, size, modification time and the first bytes (the header, of the given length) of each file."""
    h = xxhash.xxh3_128()
    for path, header_bytes in files:
        stat = os.stat(path)
        h.update(f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|".encode())
        with open(path, "rb") as f:
            h.update(f.read(header_bytes))
    return h.hexdigest()
