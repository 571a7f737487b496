"""What the kinds of prompt steps have in common. A prompt step computes many rows, so its tasks share rows as well as columns.

An operator is cut into `shares`, one a task. Which rows and columns a share is depends on the rows of the step, so its regions are
nominal: every task reads all of its inputs and writes an own part of the columns of each output. A reader thus waits for all tasks
of the operators that it reads from, whatever they turn out to write.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpk.graph.sm_task_graph import Cost, Region
from mpk.graph.tensor_graph import Operator, Scalar, TensorGraph
from mpk.tasks.base import TaskKind

CHUNK = 64  # columns of a chunk: CHUNK of mpk/tiles.cuh


def padded(columns: int) -> int:
    """Columns of a buffer in chunks."""
    return -(-columns // CHUNK) * CHUNK


class PromptKind(TaskKind):
    """Tiles are shares; attrs {shares}."""

    def tiles(self, op: Operator, graph: TensorGraph) -> int:
        return int(op.attrs["shares"])

    def reads(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        return tuple(Region(name, 0, graph.values[name].columns) for name in op.inputs if name != "step")

    def writes(self, op: Operator, graph: TensorGraph, begin: int, end: int) -> tuple[Region, ...]:
        shares = int(op.attrs["shares"])
        return tuple(Region(name, columns * begin // shares, columns * end // shares)
                     for name in op.outputs if name != "step" for columns in (graph.values[name].columns,))

    def cost(self, op: Operator, graph: TensorGraph, begin: int, end: int, dtype: str) -> Cost:
        """Of what is moved: activations of all inputs and outputs, shared."""
        columns = sum(graph.values[name].columns for name in (*op.inputs, *op.outputs) if name != "step")
        return Cost(0, 2 * columns * (end - begin) // int(op.attrs["shares"]), 0)

    def buffers(self, op: Operator, graph: TensorGraph) -> dict[str, str]:
        names = [name for name in (*op.inputs, *op.outputs) if name != "step" and graph.values[name].kind == "activation"]
        return dict(zip(self.operands, names, strict=False))

    def variant(self, op: Operator, graph: TensorGraph, dtype: str) -> Mapping[str, Scalar]:
        return {"shares": int(op.attrs["shares"])}


def own_columns(op: Operator, columns: int, begin: int, end: int) -> slice:
    """The part of an output that shares [begin, end) write, in terms of regions."""
    shares = int(op.attrs["shares"])
    return slice(columns * begin // shares, columns * end // shares)
