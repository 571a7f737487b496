"""What NVRTC compiles a CUDA program from: headers by the names under which sources include them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mpk.codegen import layout
from mpk.tasks import base

TARGETS = Path(__file__).parent.parent / "targets"
TASKS = Path(base.__file__).parent
SHARED = ("context.hpp", "philox.hpp")  # headers of the C++ back end that both use
USES = {"head": ("linear",), "logit_slices": ("head",)}  # kinds whose headers those of another include
OPTIONS = ("--device-as-default-execution-space",)  # shared headers say nothing of host and device


def headers(kinds: Iterable[str]) -> dict[str, str]:
    """Include name -> text: the emitted layout, the back end's headers, and those of the task kinds named."""
    out = {"mpk/layout.hpp": layout.header()}
    for name in SHARED:
        path = TARGETS / "cpp" / "include" / "mpk" / name
        out[f"mpk/{name}"] = path.read_text()
    for path in sorted((TARGETS / "cuda" / "include" / "std").iterdir()):
        out[path.name] = path.read_text()
    for path in sorted((TARGETS / "cuda" / "include" / "mpk").iterdir()):
        out[f"mpk/{path.name}"] = path.read_text()
    named = set(kinds)
    for kind in sorted(named.union(*(USES.get(kind, ()) for kind in named))):
        for path in sorted((TASKS / kind).glob("*.cuh")):
            out[f"{kind}/{path.name}"] = path.read_text()
    return out
