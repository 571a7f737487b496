"""A rank's part of a model's weights, read from the source part by part: a `WeightSource` of the shapes that a sharded graph has."""

from __future__ import annotations

import json

import numpy as np

from mpk.errors import InternalError
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.graph.tensor_graph import Shard, TensorGraph
from mpk.tasks.base import WeightSource


def shard_sources(graph: SMTaskGraph, source: WeightSource) -> list[WeightSource]:
    """Of every rank what it reads its weights from."""
    return [source] if graph.ranks == 1 else [ShardSource(source, graph.tensor_graph, rank) for rank in range(graph.ranks)]


class ShardSource:
    """What rank `rank` holds of `source`, as `graph` says; a matrix that is cut by columns is read a block of whole rows at a time."""

    def __init__(self, source: WeightSource, graph: TensorGraph, rank: int) -> None:
        self.source, self.rank = source, rank
        self.weights = graph.weights

    def names(self) -> list[str]:
        return list(self.weights)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.weights:
            raise InternalError(f"the graph has no weight {name}")
        return self.weights[name].shape

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Rows [begin, end) of this rank's part as float32; zeros beyond the tensor."""
        shape, shard = self.shape(name), self.weights[name].shard
        end = shape[0] if end is None else end
        if not 0 <= begin <= end <= shape[0]:
            raise InternalError(f"rows [{begin}, {end}) of {name}, of which a rank has {shape[0]}")
        if shard is None:
            return self.source.read(name, begin, end)
        if shard.axis == 1:
            first = shard.starts[self.rank]
            return np.ascontiguousarray(self.source.read(name, begin, end)[:, first : first + shape[1]])
        return self._rows(name, shard, begin, end)

    def _rows(self, name: str, shard: Shard, begin: int, end: int) -> np.ndarray:
        start, whole = shard.starts[self.rank], shard.whole[0]
        first, last = min(start + begin, whole), min(start + end, whole)
        if last - first == end - begin:
            return self.source.read(name, first, last)
        out = np.zeros((end - begin, *shard.whole[1:]), np.float32)
        if first < last:
            out[: last - first] = self.source.read(name, first, last)
        return out

    def fingerprint(self) -> str:
        parts = [[w.name, w.shape, w.shard.axis, w.shard.starts[self.rank]] for w in self.weights.values() if w.shard is not None]
        return f"{self.source.fingerprint()} rank {self.rank} {json.dumps(parts)}"
