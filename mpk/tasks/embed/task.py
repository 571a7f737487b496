"""Task kind `embed`: the embeddings of the step's tokens; a tile is 16 columns.

Operator: inputs (step), outputs (x [rows, hidden],), weights {weight: (name,)} [vocab, hidden], attrs {vocab, hidden}. The matrix
is packed like a product's, so that a tied head shares it.

With attrs of a message {columns, ranks, two_shot_rows, message, messages} (`mpk.tasks.messages`) ranks share the vocabulary: `vocab` is
a rank's share, and the output its part of the message, zeros for tokens of others. Behind the last column of row 0 stands
whether the host has cancelled.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpk.graph.sm_task_graph import Cost, Region
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import TaskKind, WeightSource
from mpk.tasks.messages import CONTROL_COLUMNS, message_of
from mpk.tasks.packing import ELEMENT_BYTES, PANEL, pack_rows, panel_bytes, panel_view, panels_of


class Embed(TaskKind):
    name = "embed"
    operands = ("x",)
    cuda_form = "rows"

    def tiles(self, op: Operator, graph: TensorGraph) -> int:
        return panels_of(int(op.attrs["hidden"]))

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        return {"x": op.outputs[0]}

    def reads(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return ()

    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        last = min(end * PANEL, int(op.attrs["hidden"]))
        control = "message" in op.attrs and last == int(op.attrs["hidden"])
        return (Region(op.outputs[0], begin * PANEL, last + CONTROL_COLUMNS * control),)

    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        columns = min(end * PANEL, int(op.attrs["hidden"])) - begin * PANEL
        # two columns of a token are one piece of a cache line of 64 bytes (bf16), one column in float32
        lines = columns * ELEMENT_BYTES[dtype] // 4
        return Cost(0, lines * 64 + columns * 4, 0)

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        names = ("hidden", "vocab", "columns", "ranks", "two_shot_rows") if "message" in op.attrs else ("hidden",)
        return {"bf16": dtype == "bf16", "send": "message" in op.attrs, **{name: int(op.attrs[name]) for name in names}}

    def arguments(self, op: Operator) -> tuple[int, int]:
        return message_of(op.attrs) if "message" in op.attrs else (0, 0)

    def packed_bytes(self, op: Operator, graph: TensorGraph, dtype: str) -> int:
        return panels_of(int(op.attrs["vocab"])) * panel_bytes(int(op.attrs["hidden"]), dtype)

    def pack(self, op: Operator, graph: TensorGraph, source: WeightSource, dtype: str, out: np.ndarray) -> None:
        pack_rows(source, op.weights["weight"][0], 0, int(op.attrs["vocab"]), panel_view(out, int(op.attrs["hidden"]), dtype))


KIND = Embed()
