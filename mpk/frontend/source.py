"""What every source of weights shares: checked block reads, warnings for values that are not finite, checks against a graph."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mpk.errors import InternalError, ModelError
from mpk.graph.tensor_graph import TensorGraph
from mpk.models.config import DecoderConfig
from mpk.models.decoder import EMBEDDING, HEAD
from mpk.models.registry import build_graph
from mpk.tasks.base import WeightSource
from mpk.tasks.packing import to_bf16

if TYPE_CHECKING:
    from mpk.frontend.tokenizer import Tokenizer

INFINITY_BF16 = 0x7F80  # bits without the sign; all above are no numbers
BLOCK_ELEMENTS = 1 << 22  # elements compared at once where two tensors are checked for equality


class NonFiniteWeightsWarning(UserWarning):
    """A tensor of the model holds NaN or infinite values."""


@dataclass
class LoadedModel:
    """A model ready to lower: its sizes, where its weights come from, how text becomes tokens (None: token ids only)."""

    config: DecoderConfig
    source: WeightSource
    tokenizer: Tokenizer | None
    name: str


class TensorSource(ABC):
    """Base of the weight sources (the protocol `mpk.tasks.base.WeightSource`); subclasses say how rows are read."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    @abstractmethod
    def names(self) -> list[str]:
        """Names of all tensors, in transformers' naming."""

    @abstractmethod
    def _shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that exists; `ModelError` if its type is not supported."""

    @abstractmethod
    def _rows(self, name: str, begin: int, end: int) -> np.ndarray:
        """Rows [begin, end) of a tensor that exists, as float32."""

    @abstractmethod
    def where(self, name: str) -> str:
        """The file (or object) that holds the tensor, or would hold it, for errors."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of what identifies the contents; another one whenever they may have changed."""

    @abstractmethod
    def __contains__(self, name: object) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor ([out, in] for a matrix); `ModelError` if there is none of that name."""
        if name not in self:
            raise ModelError(f"tensor {name} is missing in {self.where(name)}")
        return self._shape(name)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Rows [begin, end) (elements of a vector) as float32, C-contiguous; warns once a tensor about NaN and infinity."""
        rows = self.shape(name)[0]
        end = rows if end is None else end
        if not 0 <= begin <= end <= rows:
            raise InternalError(f"rows [{begin}, {end}) of {name}, which has {rows}")
        block = np.ascontiguousarray(self._rows(name, begin, end), np.float32)
        if block.size and name not in self._warned and not _all_finite(block):
            self._warn(name)
        return block

    def read_bf16(self, name: str, begin: int, end: int) -> np.ndarray:
        """Rows [begin, end) as bits of bf16 (uint16), without a detour where they are stored so; warns as `read` does."""
        stored = self._bf16_rows(name, begin, end) if self.shape(name) else None
        if stored is None:
            return to_bf16(self.read(name, begin, end))
        if stored.size and name not in self._warned and int((stored & np.uint16(0x7FFF)).max()) >= INFINITY_BF16:
            self._warn(name)
        return stored

    def _bf16_rows(self, name: str, begin: int, end: int) -> np.ndarray | None:
        """Rows of a tensor that is stored in bf16, as uint16 (a view of the file if possible); None for other types."""
        return None

    def _warn(self, name: str) -> None:
        self._warned.add(name)
        warnings.warn(f"tensor {name} in {self.where(name)} holds values that are not finite", NonFiniteWeightsWarning, stacklevel=3)

    def same_contents(self, first: str, second: str) -> bool:
        """Whether two tensors hold the same values (compared block by block)."""
        if self.shape(first) != self.shape(second):
            return False
        return all(np.array_equal(self._rows(first, a, z), self._rows(second, a, z)) for a, z in self._blocks(first))

    def _blocks(self, name: str) -> Iterator[tuple[int, int]]:
        shape = self.shape(name)
        step = max(1, BLOCK_ELEMENTS // max(1, int(np.prod(shape[1:], dtype=np.int64))))
        for begin in range(0, shape[0], step):
            yield begin, min(begin + step, shape[0])


def _all_finite(block: np.ndarray) -> bool:
    """NaN spreads through min and max, so two reductions tell without a temporary array."""
    return bool(np.isfinite(block.min()) and np.isfinite(block.max()))


def resolve_tied_head(config: DecoderConfig, source: TensorSource) -> DecoderConfig:
    """As transformers does: a stored head that differs from the embedding is used even where the configuration ties them."""
    if config.tie_embeddings and HEAD in source and EMBEDDING in source and not source.same_contents(HEAD, EMBEDDING):
        return replace(config, tie_embeddings=False)
    return config


def check_weights(config: DecoderConfig, source: TensorSource) -> TensorGraph:
    """Refuse (`ModelError`: tensor, expected and actual shape, file) a source that does not fit the graph; returns the graph.

    Tensors of the layers that the graph would leave out (a bias the configuration does not mention) are refused too.
    """
    graph = build_graph(config)
    for weight in graph.weights.values():
        expected = f"shape {list(weight.shape)}"
        if weight.name not in source:
            raise ModelError(f"tensor {weight.name} is missing in {source.where(weight.name)}", expected=expected)
        shape = source.shape(weight.name)
        if shape != weight.shape:
            raise ModelError(f"tensor {weight.name} in {source.where(weight.name)}", expected=expected, actual=f"shape {list(shape)}")
    for name in source.names():
        if name not in graph.weights and _changes_result(name, config):
            raise ModelError(f"tensor {name} in {source.where(name)} has no place in {config.architecture} with this configuration",
                             remedy="check the biases and norms that the configuration names")
    return graph


def _changes_result(name: str, config: DecoderConfig) -> bool:
    if name == "lm_head.bias":
        return True
    parts = name.split(".")
    in_layers = len(parts) > 3 and parts[:2] == ["model", "layers"] and parts[2].isdigit() and int(parts[2]) < config.num_layers
    return in_layers and not name.endswith("rotary_emb.inv_freq")  # a buffer that old files kept; computed from the config
