"""Files that are expensive to make, kept by the hash of all they depend on.

An entry is a payload file and a manifest that names it with its size and checksum. Both are written under another name
and moved into place, payload first, so a reader sees a whole entry or none; payloads are named by their contents, so two
writers of one key do not disturb each other. Every look-up verifies size and checksum; what does not agree is reported,
removed and made anew. A cache folder that cannot be written is an error, not a silent slow path: packed weights can be
tens of gigabytes, which a temporary folder often cannot hold.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import mmap
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from mpk import settings
from mpk.errors import TargetError

LOG = logging.getLogger("mpk.cache")
FORMAT = 1
BLOCK = 8 << 20
LEFTOVER_AGE_S = 86400.0  # unfinished files of processes that were killed are removed after a day


@dataclass(frozen=True)
class Entry:
    """A verified payload and what was noted about it when it was made."""

    path: Path
    notes: dict[str, Any]


def digest(*parts: str | bytes) -> str:
    """128-bit hash of the parts in order, as hexadecimal digits; where one part ends matters."""
    h = xxhash.xxh3_128()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.hexdigest()


def checksum(path: Path) -> str:
    """64-bit hash of a file's contents; the file is mapped, not read into memory."""
    h = xxhash.xxh3_64()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size:
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
                for begin in range(0, size, BLOCK):
                    with view[begin : begin + BLOCK] as part:
                        h.update(part)
    return h.hexdigest()


class Store:
    """Entries of one sort ("programs", "weights") in the cache folder. Raises `TargetError` if that cannot be written."""

    def __init__(self, sort: str, suffix: str) -> None:
        self.folder = settings.cache_folder() / sort
        self.suffix = suffix
        probe = self.folder / f".probe-{uuid.uuid4().hex}"
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around what writes to the folder: its `OSError` becomes a `TargetError` that names the folder and the reason."""
        try:
            yield
        except OSError as error:
            raise TargetError(f"cache folder {self.folder} cannot be written ({error.strerror or error})",
                              remedy="set MPK_CACHE to a folder that can be written, with enough space") from error

    def find(self, key: str) -> Entry | None:
        """The entry of `key` if it is there and whole; a damaged one is logged and removed."""
        manifest = self._manifest(key)
        if not manifest.exists():
            return None
        try:
            return self._verified(key, manifest)
        except (ValueError, KeyError, TypeError, OSError) as error:  # ValueError: no JSON, no UTF-8, or a check that failed
            LOG.warning("cache entry %s is damaged and will be made again: %s", manifest, error)
        for path in (manifest, *self.folder.glob(f"{key}-*{self.suffix}")):
            with contextlib.suppress(OSError):
                if path.is_dir():
                    path.rmdir()  # an empty one; a full one is somebody's, and writing the entry will say that it is in the way
                else:
                    path.unlink()
        return None

    def _manifest(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _verified(self, key: str, manifest: Path) -> Entry:
        data = json.loads(manifest.read_text())
        payload = self.folder / data["payload"]
        if (data["format"], data["key"]) != (FORMAT, key):
            raise ValueError(f"it is of format {data['format']} for key {data['key']}")
        size = payload.stat().st_size
        if size != data["bytes"]:
            raise ValueError(f"{payload.name} has {size} bytes, expected {data['bytes']}")
        found = checksum(payload)
        if found != data["checksum"]:
            raise ValueError(f"{payload.name} has checksum {found}, expected {data['checksum']}")
        if digest(json.dumps(data["notes"])) != data["notes_digest"]:
            raise ValueError("its notes were altered")
        return Entry(payload, data["notes"])

    def temporary(self, key: str) -> Path:
        """A path in the store's folder for making a payload, unique to this call."""
        for left in self.folder.glob(".*"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > LEFTOVER_AGE_S:
                    left.unlink()
        return self.folder / f".{key}-{uuid.uuid4().hex}{self.suffix}"

    def commit(self, key: str, made: Path, notes: dict[str, Any]) -> Entry:
        """Turn the file `made` (from `temporary`) into the entry of `key`; `TargetError` if the folder cannot be written."""
        with self.writing():
            return self._commit(key, made, notes)

    def _commit(self, key: str, made: Path, notes: dict[str, Any]) -> Entry:
        found = checksum(made)
        payload = self.folder / f"{key}-{found}{self.suffix}"
        data = {"format": FORMAT, "key": key, "payload": payload.name, "bytes": made.stat().st_size, "checksum": found,
                "notes": notes, "notes_digest": digest(json.dumps(notes))}
        draft = self.folder / f".{key}-{uuid.uuid4().hex}.json"
        manifest = self._manifest(key)
        try:
            draft.write_text(json.dumps(data, indent=1))
            if manifest.is_dir():  # found before the payload is in place
                raise IsADirectoryError(errno.EISDIR, f"{manifest.name} is a directory")
            os.replace(made, payload)
            os.replace(draft, manifest)
        finally:
            draft.unlink(missing_ok=True)
        return Entry(payload, notes)

    def require_space(self, needed: int) -> None:
        """Raise `TargetError` unless `needed` bytes are free where the store lives."""
        with self.writing():
            free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise TargetError(f"cache folder {self.folder}", expected=f"{needed / 2**30:.2f} GiB of free space", actual=f"{free / 2**30:.2f}",
                              remedy="free some, or set MPK_CACHE to a larger disk")
