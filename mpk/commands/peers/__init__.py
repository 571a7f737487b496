"""Systems that `mpk bench --against` measures beside ours, in the same process: one file a peer, each with `system`.

`system(config, dtype, steps)` (with `tp` behind where a module says SHARES) builds the peer with random weights of the shape and returns a function
(batch, mean context) -> milliseconds of `steps` single decode steps.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from mpk.errors import RequestError
from mpk.models.config import DecoderConfig

PEERS = {
    "torch-eager": "mpk.commands.peers.torch_eager",
    "torch-compile": "mpk.commands.peers.torch_compile",
    "nccl-graph": "mpk.commands.peers.nccl_graph",
}


def peer_system(name: str, config: DecoderConfig, dtype: str, steps: int, tp: int = 1) -> Callable[[int, int], list[float]]:
    """The peer called `name` on `tp` GPUs; raises `RequestError` where torch is not installed or lacks what the peer needs, or the peer cannot share."""
    try:
        module = importlib.import_module(PEERS[name])
        if getattr(module, "SHARES", False):
            return module.system(config, dtype, steps, tp)
        if tp > 1:
            raise RequestError(f"--against {name} with --tp {tp}", expected="--tp 1", remedy="nccl-graph shares a model among GPUs")
        return module.system(config, dtype, steps)
    except ImportError as error:
        raise RequestError(f"--against {name}: {error}", remedy="pip install torch transformers") from error
