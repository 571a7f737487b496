"""nccl-graph: torch on several GPUs, one process each: products by cuBLAS, pieces between them compiled, NCCL all-reduce, the step in a CUDA graph.

The same shards as ours: q, k, v, gate and up by outputs, o and down by inputs, the head by vocabulary; the embedding is whole on every GPU.
The step includes embedding, head, argmax over all shards and feedback. Rank 0 times steps by CUDA events around replays queued back to back.
NVLink multicast (NVLS) is switched off. This process speaks with the ranks through pipes; they end when it does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpk.commands.peers.cuda_graph import capture, replay
from mpk.errors import RequestError
from mpk.models.config import DecoderConfig

LIMIT_S = 300  # for one measurement, compiling and capturing included
SHARES = True  # takes tensor_parallel


class _Ranks:
    """The processes of all ranks."""

    def __init__(self, config: DecoderConfig, dtype: str, steps: int, tp: int) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="mpk-nccl-")
        given = json.dumps({"config": config.to_json(), "dtype": dtype, "steps": steps, "ranks": tp, "meeting": str(Path(self.folder.name) / "meeting")})
        environment = {**os.environ, "NCCL_NVLS_ENABLE": "0"}
        self.processes = [subprocess.Popen([sys.executable, "-m", "mpk.commands.peers.nccl_graph", str(rank), given], stdin=subprocess.PIPE,
                                           stdout=subprocess.PIPE, text=True, env=environment) for rank in range(tp)]
        self._end = weakref.finalize(self, _end, self.processes)

    def ask(self, message: dict[str, int]) -> list[float]:
        """Send a measurement to all ranks; milliseconds of its steps, from rank 0."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
        limit = threading.Timer(LIMIT_S, _end, [self.processes])  # a killed process ends its output, and so the wait for it
        limit.start()
        try:
            lines = [process.stdout.readline() for process in self.processes if process.stdout is not None]
        finally:
            limit.cancel()
        if not all(lines):
            self._end()
            raise RequestError("--against nccl-graph: a process of the peer ended", expected=f"an answer of every rank within {LIMIT_S} s",
                               remedy="its message is above; torch needs NCCL and enough memory")
        return list(json.loads(lines[0]))


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()


def system(config: DecoderConfig, dtype: str, steps: int, tp: int) -> Callable[[int, int], list[float]]:
    """See `mpk.commands.peers`; raises `RequestError` without as many CUDA devices."""
    import torch

    found = torch.cuda.device_count()
    if found < tp:
        raise RequestError(f"--against nccl-graph with --tp {tp}", expected=f"{tp} CUDA devices that torch sees", actual=str(found))
    ranks = _Ranks(config, dtype, steps, tp)
    return lambda batch, context: ranks.ask({"batch": batch, "context": context})


# ---- one rank
class _Rank:
    """Weights, caches and the step of one rank."""

    def __init__(self, config: DecoderConfig, dtype: Any, rank: int, ranks: int) -> None:
        import torch

        from mpk.commands.peers import torch_compile as pieces

        c = config
        self.config, self.dtype, self.rank, self.ranks = c, dtype, rank, ranks
        self.device = torch.device("cuda", rank)
        heads, kv_heads, inner = c.num_heads // ranks, max(1, c.num_kv_heads // ranks), c.intermediate_size // ranks
        self.sizes = pieces.Sizes(heads, kv_heads, c.head_dim, c.rms_norm_eps, c.qk_norm)
        self.share = -(-c.vocab_size // ranks)
        generator = torch.Generator(device=self.device).manual_seed(rank)

        def matrix(*shape: int) -> Any:
            return torch.empty(*shape, device=self.device, dtype=dtype).normal_(0, 0.02, generator=generator)

        def ones(n: int) -> Any:
            return torch.ones(n, device=self.device, dtype=dtype)

        self.embedding, self.head, self.final = matrix(c.vocab_size, c.hidden_size), matrix(self.share, c.hidden_size), ones(c.hidden_size)
        width = (heads + 2 * kv_heads) * c.head_dim
        self.layers = [{
            "norm1": ones(c.hidden_size), "norm2": ones(c.hidden_size), "qkv": matrix(width, c.hidden_size), "o": matrix(c.hidden_size, heads * c.head_dim),
            "gate_up": matrix(2 * inner, c.hidden_size), "down": matrix(c.hidden_size, inner), "q_norm": ones(c.head_dim), "k_norm": ones(c.head_dim),
            **({"bias": matrix(width)} if c.qkv_bias else {})} for _ in range(c.num_layers)]

        def mlp(x: Any, w: dict[str, Any]) -> Any:
            gate, up = torch.nn.functional.linear(pieces.norm(x, w["norm2"], c.rms_norm_eps), w["gate_up"]).chunk(2, -1)
            return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, w["down"])

        def largest(x: Any, final: Any, head: Any) -> Any:
            return torch.nn.functional.linear(pieces.norm(x, final, c.rms_norm_eps), head).float().max(-1)

        self.qkv, self.attend, self.mlp, self.largest = (torch.compile(f, fullgraph=True, dynamic=False) for f in (pieces.qkv, pieces.attention, mlp, largest))

    def start(self, batch: int, context: int, steps: int) -> None:
        """Random caches for `batch` sequences that have `context` tokens."""
        import torch

        from mpk.commands.peers.torch_compile import SPAN

        c = self.config
        span = -(-(context + steps + 8) // SPAN) * SPAN
        shape = (c.num_layers, batch, self.sizes.kv_heads, span, c.head_dim)
        self.keys = torch.empty(shape, device=self.device, dtype=self.dtype).normal_()
        self.values = torch.empty(shape, device=self.device, dtype=self.dtype).normal_()
        frequencies, factor = c.rope.inverse_frequencies(c.head_dim)
        angles = torch.outer(torch.arange(span, dtype=torch.float32), torch.from_numpy(frequencies))
        self.cos, self.sin = (angles.cos() * factor).to(self.device), (angles.sin() * factor).to(self.device)
        self.token = torch.ones(batch, dtype=torch.long, device=self.device)
        self.position = torch.full((1,), context, dtype=torch.long, device=self.device)
        self.best = torch.empty(self.ranks, 2, batch, device=self.device)

    def step(self) -> None:
        import torch
        import torch.distributed as dist

        x = torch.nn.functional.embedding(self.token, self.embedding)
        for i, w in enumerate(self.layers):
            q = self.qkv(self.sizes, x, w, self.cos, self.sin, self.position, self.keys[i], self.values[i])
            part = torch.nn.functional.linear(self.attend(q, self.keys[i], self.values[i], self.position), w["o"])
            dist.all_reduce(part)
            x = x + part
            part = self.mlp(x, w)
            dist.all_reduce(part)
            x = x + part
        value, token = self.largest(x, self.final, self.head)
        dist.all_gather_into_tensor(self.best.view(-1), torch.stack((value, (token + self.rank * self.share).float())).view(-1))
        winner = self.best[:, 0].argmax(0)
        self.token.copy_(self.best[:, 1].gather(0, winner[None])[0].long().clamp_(max=self.config.vocab_size - 1))
        self.position.add_(1)


def _serve(rank: int, given: dict[str, Any]) -> None:
    """Answer measurements until the pipe is closed."""
    import torch
    import torch.distributed as dist

    steps, ranks = given["steps"], given["ranks"]
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{given['meeting']}", rank=rank, world_size=ranks)
    with torch.no_grad():
        decoder = _Rank(DecoderConfig.from_json(given["config"]), torch.bfloat16 if given["dtype"] == "bf16" else torch.float32, rank, ranks)
        graphs: dict[tuple[int, int], Any] = {}
        for line in sys.stdin:
            asked = json.loads(line)
            key, first = (asked["batch"], asked["context"]), asked["context"] - steps // 2
            if key not in graphs:
                graphs.clear()  # a graph owns the caches of its batch and context
                decoder.start(asked["batch"], first, steps)
                graphs[key] = capture(decoder.step, "thread_local")  # NCCL's own threads look at events meanwhile
            decoder.position.fill_(first)
            dist.barrier()
            print(json.dumps(replay(graphs[key], steps)), flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), json.loads(sys.argv[2]))
