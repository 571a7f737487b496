"""Choices of the passes that `mpk tune` found, kept beside compiled programs and looked up when the same model is lowered again."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from typing import Any

from mpk import __version__, settings
from mpk.codegen.cache import Store, digest
from mpk.models.config import DecoderConfig
from mpk.passes.partition import Options
from mpk.targets import hardware
from mpk.targets.hardware import Target

SORT, SUFFIX = "tuned", ".json"
GIVEN = ("max_rows", "max_batch", "dtype")  # fields of Options that the caller chooses; the others are tuned


def key(config: DecoderConfig, target: Target, options: Options) -> str:
    """Hash of what a choice was made for: the model, the target as it is described, its workers, and the caller's options."""
    given = {name: getattr(options, name) for name in GIVEN}
    parts = (config.to_json(), hardware.description(target.name), {"workers": target.workers, **given})
    return digest(__version__, *(json.dumps(p, sort_keys=True, default=str) for p in parts))


def require_writable() -> None:
    """Raise `TargetError`, which names the folder, where nothing could be kept; called before long work is done for it."""
    Store(SORT, SUFFIX)


def store(config: DecoderConfig, target: Target, options: Options, report: dict[str, Any]) -> None:
    """Keep the tuned fields of `options`; `report` says how they were found. Raises `TargetError` if the cache cannot be written."""
    place, name = Store(SORT, SUFFIX), key(config, target, options)
    path = place.temporary(name)
    try:
        with place.writing():
            path.write_text(json.dumps({k: v for k, v in asdict(options).items() if k not in GIVEN}))
        place.commit(name, path, report)
    finally:
        path.unlink(missing_ok=True)


def find(config: DecoderConfig, target: Target, options: Options) -> Options:
    """`options` with what was tuned for them, or as they are."""
    name = key(config, target, options)
    if not (settings.cache_folder() / SORT / f"{name}.json").is_file():  # a cache that is not there, or not writable, is no error here
        return options
    entry = Store(SORT, SUFFIX).find(name)
    if entry is None:
        return options
    data = json.loads(entry.path.read_text())
    known = {f.name for f in fields(Options)} - set(GIVEN)
    values = {k: v for k, v in data.items() if k in known}
    values["tasks"] = tuple((str(name), int(count)) for name, count in values.get("tasks", ()))
    if values.get("flight") is not None:
        values["flight"] = tuple(values["flight"])
    return replace(options, **values)
