"""Engines of the toy model, and a context in which its task kinds stand for the project's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.runtime.engine import Engine, build_engine
from mpk.tasks import base
from tests.support.toy import ToySource, kinds


@contextmanager
def toy_kinds(cache: Path) -> Iterator[None]:
    """Toy task kinds instead of the project's, and a cache folder of the test's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "load_kinds", kinds)
        patch.setenv("MPK_CACHE", str(cache))
        yield


def toy_engine(graph: SMTaskGraph) -> Engine:
    return build_engine(graph, ToySource(graph.tensor_graph.config.vocab_size))
