"""mpk compiles a transformer's inference into one persistent program that executes an SM-level task graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mpk import frontend
    from mpk.compiler import Compiler
    from mpk.graph.sm_task_graph import SMTaskGraph
    from mpk.graph.tensor_graph import TensorGraph

__all__ = ["Compiler", "SMTaskGraph", "TensorGraph", "__version__", "frontend"]

_LAZY = {"Compiler": "mpk.compiler", "SMTaskGraph": "mpk.graph.sm_task_graph", "TensorGraph": "mpk.graph.tensor_graph"}


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that `import mpk` costs nothing."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    if name == "frontend":
        import importlib

        return importlib.import_module("mpk.frontend")
    raise AttributeError(f"module 'mpk' has no attribute '{name}'")
