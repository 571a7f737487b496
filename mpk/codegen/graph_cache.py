"""Lowered and verified graphs, kept beside compiled programs: a new process does not lower a model again.

A graph's key is all that lowering depends on: the model's configuration, the target's description, the options, and the source of the
code that lowers. What was proven stays proven only as long as it is unchanged: an entry holds the fingerprint that `verify` left.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path

from mpk.codegen.cache import Store, digest
from mpk.errors import GraphError, TargetError
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.graph.tensor_graph import TensorGraph
from mpk.passes.partition import Options
from mpk.targets.hardware import Target

LOG = logging.getLogger("mpk.cache")
LOWERING = ("graph", "models", "passes", "targets", "tasks")  # folders of code that a lowered graph depends on


@cache
def _sources() -> str:
    root = Path(__file__).parent.parent
    files = sorted(p for folder in LOWERING for p in (root / folder).rglob("*.py"))
    return digest(*(part for p in files for part in (str(p.relative_to(root)), p.read_bytes())))


def key(graph: TensorGraph, target: Target, options: Options, purpose: str = "") -> str:
    """Hash of what lowering `graph` depends on; `purpose`: where a model has several graphs, which one."""
    return digest(json.dumps(graph.config.to_json(), sort_keys=True), json.dumps(asdict(target), sort_keys=True),
                  json.dumps(asdict(options), sort_keys=True), purpose, _sources())


def lowered(graph: TensorGraph, target: Target, options: Options, lower: Callable[[], SMTaskGraph], purpose: str = "") -> SMTaskGraph:
    """What `lower()` returns, or an equal graph from the cache; without a cache folder that can be written, always the former."""
    try:
        store = Store("graphs", ".npz")
    except TargetError as error:  # no reason to refuse to look at a graph; who builds a program will hear of it
        LOG.info("graphs are not kept: %s", error)
        return lower()
    name = key(graph, target, options, purpose)
    entry = store.find(name)
    if entry is not None:
        try:
            found = SMTaskGraph.load(str(entry.path))
        except GraphError:  # written by a version of the file format that this one does not read
            found = None
        if found is not None:
            found.proof = str(entry.notes["proof"])
            return found
    made = lower()
    path = store.temporary(name)
    try:
        with store.writing():
            made.save(str(path))
        store.commit(name, path, {"proof": made.proof})
    except (GraphError, TargetError) as error:  # a full disk, say
        LOG.info("the graph is not kept: %s", error)
    finally:
        path.unlink(missing_ok=True)
    return made
