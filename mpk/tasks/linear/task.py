"""Task kind `linear`: a product with packed weights, RMS norm before and epilogue after; a tile is 16 output columns (CUDA: perhaps fewer).

Operator: inputs (input [rows, k],) or, for `residual`, (input, x); outputs (out [rows, n],), for `residual` perhaps x itself (always in
the C++ back end), and this rank's part of a message for `send`, with the attrs of one {columns, ranks, two_shot_rows, message, messages}
(`mpk.tasks.messages`);
weights {weight: (name,) [n, k], (gate, up) for `swiglu`, or for `store` several that are stacked (CUDA only); norm: (name,) optional;
bias: as many names as weight, optional}; attrs {n, k, eps, epilogue: store | residual | swiglu | send, gather_logit_rows, tile_columns
(output columns of a tile, default 16)}. With `gather_logit_rows` row r of the output belongs to
row logit_rows[r] of the input. A product with weights {embedding: (name,)} (CUDA only) has the step instead of an input: its input is the rows of
the step's tokens in that matrix.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpk.errors import InternalError
from mpk.graph.sm_task_graph import Cost, Region
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import TaskKind, WeightSource
from mpk.tasks.messages import message_of
from mpk.tasks.packing import PANEL, pack_rows, padded_vector, panel_bytes, panel_view
from mpk.tasks.stages import stages_of

EPILOGUES = {"store": 0, "residual": 1, "swiglu": 2, "send": 3}  # kStore, kResidual, kSwiglu, kSend of cpp.hpp
PANEL_GROUP = 8  # kPanelGroup of matmul.hpp: panels multiplied at a time, whose sums stand in scratch


class Linear(TaskKind):
    name = "linear"
    operands: tuple[str, ...] = ("input", "output", "residual")
    cuda_form = "stages"
    overlaps = True
    halves = True

    def tiles(self, op: Operator, graph: TensorGraph) -> int:
        return -(-int(op.attrs["n"]) // tile_columns(op))

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        residual = {"residual": op.inputs[1]} if op.attrs["epilogue"] == "residual" else {}
        given = {} if self.gathered(op) else {"input": op.inputs[0]}
        return {**given, "output": op.outputs[0], **residual}

    def reads(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        regions = () if self.gathered(op) else (Region(op.inputs[0], 0, int(op.attrs["k"])),)
        return (*regions, self._columns(op, op.inputs[1], begin, end)) if op.attrs["epilogue"] == "residual" else regions

    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return (self._columns(op, op.outputs[0], begin, end),)

    @staticmethod
    def _columns(op: Operator, buffer: str, begin: int, end: int) -> Region:
        columns = tile_columns(op)
        return Region(buffer, begin * columns, min(end * columns, int(op.attrs["n"])))

    def gathered(self, op: Operator) -> str:
        return f"{'+'.join(op.weights['embedding'])}.rows" if "embedding" in op.weights else ""

    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        k, width = int(op.attrs["k"]), tile_columns(op)
        rows = (end - begin) * self._panels_a_tile(op) * width  # of weights
        columns = min(end * width, int(op.attrs["n"])) - begin * width
        return Cost(rows * panel_bytes(k, dtype) // PANEL, 4 * (k + columns), 2 * rows * k)

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        sent: dict[str, Scalar] = {name: int(op.attrs[name]) for name in ("columns", "ranks", "two_shot_rows") if name in op.attrs}
        return {
            **sent,
            "bf16": dtype == "bf16", "n": int(op.attrs["n"]), "k": int(op.attrs["k"]), "eps": float(op.attrs["eps"]),
            "norm": "norm" in op.weights, "bias": "bias" in op.weights, "epilogue": self._epilogue(op),
            "gather_logit_rows": bool(op.attrs["gather_logit_rows"]), "tile_columns": tile_columns(op),
        }

    def body(self, op: Operator, graph: TensorGraph) -> tuple[Scalar, ...] | None:
        """How the matrix is cut (`Shape` of input.cuh), and where the output goes."""
        shape, attrs = stages_of(op), op.attrs
        sent = tuple(int(attrs[name]) for name in ("n", "columns", "ranks", "two_shot_rows")) if attrs["epilogue"] == "send" else ()
        return (shape.rows, shape.depth * shape.rows, bool(attrs["gather_logit_rows"]), *sent)

    def arguments(self, op: Operator) -> tuple[int, int]:
        return message_of(op.attrs) if op.attrs["epilogue"] == "send" else (0, 0)

    def scratch_bytes(self, op: Operator, graph: TensorGraph, max_rows: int) -> int:
        """Sums of a group of panels for all rows, and the gathered or normalised input."""
        prepared = "norm" in op.weights or bool(op.attrs["gather_logit_rows"])
        return 4 * max_rows * (PANEL_GROUP * PANEL + (int(op.attrs["k"]) if prepared else 0))

    def packed_bytes(self, op: Operator, graph: TensorGraph, dtype: str) -> int:
        return self.tiles(op, graph) * self._panels_a_tile(op) * panel_bytes(int(op.attrs["k"]), dtype)

    def pack(self, op: Operator, graph: TensorGraph, source: WeightSource, dtype: str, out: np.ndarray) -> None:
        """Panels in order; for `swiglu` gate 0, up 0, gate 1, up 1, ..."""
        panels, names = panel_view(out, int(op.attrs["k"]), dtype), op.weights["weight"]
        for place, name in enumerate(names):
            pack_rows(source, name, 0, int(op.attrs["n"]), panels[place :: len(names)])

    def params(self, op: Operator, graph: TensorGraph, source: WeightSource) -> np.ndarray:
        """norm [k], then the bias (of both matrices for `swiglu`) padded to whole panels; as far as the operator has them."""
        parts = [source.read(name).reshape(-1) for name in op.weights.get("norm", ())]
        names = op.weights.get("bias", ())
        if len(names) > 1 and op.attrs["epilogue"] != "swiglu":  # stacked matrices, stacked biases
            stacked = np.concatenate([source.read(name).reshape(-1) for name in names])
            parts.append(np.pad(stacked, (0, -len(stacked) % PANEL)))
        else:
            parts += [padded_vector(source, name) for name in names]
        return np.concatenate(parts).astype(np.float32) if parts else np.zeros(0, np.float32)

    @staticmethod
    def _panels_a_tile(op: Operator) -> int:
        """Matrices side by side in a tile; those of a `store` are stacked one below the other."""
        return 2 if op.attrs["epilogue"] == "swiglu" else 1

    @staticmethod
    def _epilogue(op: Operator) -> int:
        name, matrices = str(op.attrs["epilogue"]), len(op.weights["weight"])
        if name not in EPILOGUES or (matrices != (2 if name == "swiglu" else 1) and name != "store"):
            raise InternalError(f"operator {op.name}: epilogue {name} with {matrices} matrices, expected residual and send with 1, swiglu with 2")
        return EPILOGUES[name]


def tile_columns(op: Operator) -> int:
    """Output columns of a tile."""
    return int(op.attrs.get("tile_columns", PANEL))


KIND = Linear()
