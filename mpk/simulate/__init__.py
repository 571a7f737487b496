"""Simulation of task graphs on described hardware. `simulate(graph)` is all that most need; see docs/simulation.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpk.graph.sm_task_graph import SMTaskGraph
    from mpk.simulate.simulator import Simulation, simulate
    from mpk.simulate.teaching import MPKMegaKernelEngine, PersistentSMWorker, TaskTile
    from mpk.simulate.timeline import Timeline

_PLACES = {"SMTaskGraph": "mpk.graph.sm_task_graph", "Simulation": "mpk.simulate.simulator", "simulate": "mpk.simulate.simulator",
           "MPKMegaKernelEngine": "mpk.simulate.teaching", "PersistentSMWorker": "mpk.simulate.teaching", "TaskTile": "mpk.simulate.teaching",
           "Timeline": "mpk.simulate.timeline"}

__all__ = ["MPKMegaKernelEngine", "PersistentSMWorker", "SMTaskGraph", "Simulation", "TaskTile", "Timeline", "simulate"]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        import importlib

        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
