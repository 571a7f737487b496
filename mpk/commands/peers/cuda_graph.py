"""What peers that run a whole step in one CUDA graph share: capturing it, and timing its replays."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any


def capture(step: Callable[[], None], mode: str = "global") -> Any:
    """`step` as a CUDA graph, after three warm-up runs on another stream; `mode`: torch's capture_error_mode."""
    import torch

    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        step()
    return graph


def replay(graph: Any, steps: int) -> list[float]:
    """Milliseconds of each of `steps` replays queued back to back, by CUDA events."""
    import torch

    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]
