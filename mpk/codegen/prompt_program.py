"""The tables of the graph that reads prompts: it shares weights, cache and counters' memory with the decode graph, and stands behind it.

Its tasks, events, waits and signals are numbered behind those of the decode graph, its activations and parameters stand behind the
others. Products find the stages of their matrices through a table of places, because the decode graph cut them for its own tasks: for each matrix
the rows of a tile, then the places of all stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpk.codegen import layout
from mpk.codegen.cuda_program import CudaProgramBuilder
from mpk.codegen.program import ProgramBuilder
from mpk.errors import InternalError
from mpk.graph.order import STEP_EVENT
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.graph.tensor_graph import Operator
from mpk.passes.memory import align
from mpk.tasks.base import WeightSource, kind_of
from mpk.tasks.matrices import matrix_key


@dataclass(frozen=True)
class PromptTables:
    """`records`: Record [tasks]; `stream_begin`: int32 [blocks + 1]; `waits`, `signals`: of the decode graph and this one; `places`: int64.

    `planner`: the block that runs `prompt_advance`; `task`: what who waits for a prompt step reports; `event`, `over`: counters of prompt steps
    planned, and of the end of reading; `events`: counters of both graphs together.
    """

    records: np.ndarray
    stream_begin: np.ndarray
    waits: np.ndarray
    signals: np.ndarray
    places: np.ndarray
    planner: int
    task: int
    event: int
    over: int
    events: int


class PromptProgram(ProgramBuilder):
    """Variants and tables of the prompt graph that goes with a decode graph; needs both with queues, events and arenas."""

    def __init__(self, graph: SMTaskGraph, decode: CudaProgramBuilder) -> None:
        super().__init__(graph)
        self.decode = decode
        missing = [key for key in graph.weight_offsets if key not in decode.graph.weight_offsets]
        if missing:
            raise InternalError(f"the prompt graph reads matrices that the decode graph does not have: {missing[0]}")
        graph.weight_offsets, graph.weight_bytes = decode.graph.weight_offsets, decode.graph.weight_bytes
        self.arena_begin = align(decode.graph.arena_bytes)

    @property
    def arena_bytes(self) -> int:
        """Of both graphs."""
        return self.arena_begin + self.graph.arena_bytes

    def join_params(self, decode_params: np.ndarray, source: WeightSource) -> np.ndarray:
        """All small parameters: the decode graph's, then this one's, whose places are noted."""
        from mpk.passes.memory import lay_out_params

        own, begin = lay_out_params(self.graph, source), align(decode_params.nbytes)
        self.graph.param_offsets = {name: begin + offset for name, offset in self.graph.param_offsets.items()}
        return np.concatenate([decode_params, np.zeros((begin - decode_params.nbytes) // 4, np.float32), own])

    def prompt_tables(self, decode_waits: np.ndarray, decode_signals: np.ndarray) -> PromptTables:
        """Streams of all blocks; `decode_*`: the tables that this graph's are appended to."""
        tables, graph = self.tables(), self.graph
        records = np.zeros(len(tables.instructions), layout.dtype("Record"))
        instructions = records["instruction"]
        instructions[:] = tables.instructions
        instructions["task"] += len(self.decode.graph.tasks)
        operands = instructions["operand"]
        operands[operands >= 0] += self.arena_begin
        event = len(self.decode.graph.events)
        places, begins = self._places()
        operators = graph.tensor_graph.operators
        arguments = np.array([(begins.get(matrix_key(kind_of(op), op, graph), 0) if kind_of(op).cuda_form == "stages" else 0,
                               bool(op.attrs.get("only_logits", False))) for op in operators], np.int32)
        instructions["iargs"] = arguments[instructions["op"]]

        # Every block waits for the step event before a step's first instruction.
        kept = tables.waits["event"] != STEP_EVENT
        before = np.concatenate([[0], np.cumsum(kept)])
        begin, end = instructions["wait_begin"].copy(), instructions["wait_begin"] + instructions["wait_count"]
        waits = tables.waits[kept]
        instructions["wait_begin"], instructions["wait_count"] = before[begin], before[end] - before[begin]
        signals = tables.signals.copy()
        waits["event"] += event
        signals["event"] += event
        for name, table in (("waits", waits), ("signals", signals)):
            first, count = instructions[f"{name[:-1]}_begin"], instructions[f"{name[:-1]}_count"]
            for n in range(layout.INLINE_EVENTS):
                has = count > n
                records[name][has, n] = table[first[has] + n]
        instructions["wait_begin"] += len(decode_waits)
        instructions["signal_begin"] += len(decode_signals)
        last = graph.tasks[-1]
        return PromptTables(records, tables.stream_begin, np.concatenate([decode_waits, waits]), np.concatenate([decode_signals, signals]), places,
                            last.worker, len(self.decode.graph.tasks) + last.id, event + STEP_EVENT, event + len(graph.events),
                            event + len(graph.events) + 1)

    def _places(self) -> tuple[np.ndarray, dict[str, int]]:
        """Places of all stages, matrix by matrix, and where in the table each matrix begins."""
        parts: list[np.ndarray] = []
        begins: dict[str, int] = {}
        total = 0
        for index, plan in self.decode.plans.items():
            op: Operator = self.decode.graph.tensor_graph.operators[index]
            begins[matrix_key(kind_of(op), op, self.decode.graph)] = total
            parts.append(np.concatenate([[plan.shape.rows], plan.place.reshape(-1)]))
            total += parts[-1].size
        return np.concatenate(parts), begins
