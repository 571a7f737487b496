"""Where the packed matrix of an operator is found and how large it is, which depends on the back end."""

from __future__ import annotations

from mpk.errors import InternalError
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.graph.tensor_graph import Operator
from mpk.targets.hardware import backend_of
from mpk.tasks.base import TaskKind
from mpk.tasks.packing import PANEL
from mpk.tasks.stages import packed_tiles, stages_of


def matrix_key(kind: TaskKind, op: Operator, graph: SMTaskGraph) -> str:
    """Name of the operator's packed matrix in `weight_offsets`; operators with one name share it."""
    if backend_of(graph.target) == "cuda" and kind.cuda_form:
        return f"{kind.packed_key(op)}.{kind.cuda_form}"
    return kind.packed_key(op)


def matrix_bytes(kind: TaskKind, op: Operator, graph: SMTaskGraph) -> int:
    """Bytes of the operator's packed matrix; 0: it has none."""
    if backend_of(graph.target) != "cuda":
        return kind.packed_bytes(op, graph.tensor_graph, graph.dtype)
    if kind.cuda_form == "stages":
        shape = stages_of(op)
        return packed_tiles(int(op.attrs["n"]), int(op.attrs.get("tile_columns", PANEL))) * shape.count * shape.bytes
    if kind.cuda_form == "rows":
        rows, columns = matrix_shape(op, graph)
        return rows * columns * 2
    return 0


def matrix_shape(op: Operator, graph: SMTaskGraph) -> tuple[int, int]:
    """Rows (of all matrices, stacked) and columns of the operator's weight."""
    shapes = [graph.tensor_graph.weights[name].shape for name in op.weights["weight"]]
    if len({s[1] for s in shapes}) != 1:
        raise InternalError(f"operator {op.name}: matrices of different depth {shapes}")
    return sum(s[0] for s in shapes), shapes[0][1]
