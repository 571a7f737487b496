"""Emit the CUDA program of a graph: source with one template instance a distinct task variant, and the order of tasks and loads as data."""

from __future__ import annotations

from dataclasses import dataclass

import jinja2
import numpy as np

from mpk import settings
from mpk.codegen import cuda_source, layout
from mpk.codegen.cache import Store, digest
from mpk.codegen.nvrtc import Cubin, Resources, compile_cubin, version
from mpk.codegen.program import ProgramBuilder
from mpk.codegen.stage_plan import StagePlan, plan_stages
from mpk.graph.order import STEP_EVENT
from mpk.graph.sm_task_graph import SMTaskGraph, Task
from mpk.targets.hardware import KernelPlan
from mpk.tasks.base import kind_of, load_kinds

KERNEL = "mpk_run"
PACK_KERNEL = "mpk_pack"


@dataclass(frozen=True)
class CudaTables:
    """The order of tasks and loads as data, in the shared layout; all blocks' parts one after the other.

    `records`: Record [tasks]; `stream_begin`: int32 [blocks + 1]; `loads`: LoadRun; `load_begin`: int32 [blocks + 1]; `waits`, `signals`:
    what does not fit the records stands here too. `planner`: the block that runs `advance`.
    """

    records: np.ndarray
    stream_begin: np.ndarray
    loads: np.ndarray
    load_begin: np.ndarray
    waits: np.ndarray
    signals: np.ndarray
    planner: int


@dataclass(frozen=True)
class Body:
    """An instance of a kind's device code, compiled for the variant `struct`; `shared`: it serves the variants of all `opcodes`, whose constants are arguments."""

    kind: str
    struct: str
    opcodes: tuple[int, ...]
    shared: bool


class CudaProgramBuilder(ProgramBuilder):
    """Source, tables and stage plans of one graph for the CUDA back end."""

    def __init__(self, graph: SMTaskGraph) -> None:
        super().__init__(graph)
        self.bodies = self._bodies()
        by_op: dict[int, list[Task]] = {}
        for task in graph.tasks:
            by_op.setdefault(task.op, []).append(task)
        operators = graph.tensor_graph.operators
        self.plans: dict[int, StagePlan] = {i: plan_stages(graph, op, by_op[i]) for i, op in enumerate(operators) if kind_of(op).cuda_form == "stages"}

    def _bodies(self) -> list[Body]:
        """Instances of device code, in the order of their first opcodes."""
        tensors = self.graph.tensor_graph
        found: dict[tuple[object, ...], dict[int, None]] = {}
        for op, opcode in zip(tensors.operators, self.opcodes, strict=True):
            body = kind_of(op).body(op, tensors)
            found.setdefault((op.kind, body is not None, body if body is not None else opcode), {})[opcode] = None
        return [Body(str(kind), self.variants[min(opcodes)].struct, tuple(sorted(opcodes)), bool(shared)) for (kind, shared, _), opcodes in found.items()]

    def text(self, stages: int, prompt: ProgramBuilder | None = None) -> str:
        """The program's CUDA source, for a ring of so many stages; `prompt`: of the graph that reads prompts."""
        prompts = prompt.variants if prompt is not None else []
        environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
        template = environment.from_string((cuda_source.TARGETS / "cuda" / "program.cu.j2").read_text())
        return template.render(kinds=sorted({v.kind for v in (*self.variants, *prompts)}), variants=self.variants, bodies=self.bodies,
                               shared=sorted({b.kind for b in self.bodies if b.shared}), prompt_variants=prompts, stages=stages,
                               flagged=int(self.graph.flagged_bytes > 0), checked=int(settings.checked()))

    def cuda_tables(self) -> CudaTables:
        """Streams of all blocks; needs queues, events, arena and offsets."""
        tables = self.tables()
        records = np.zeros(len(tables.instructions), layout.dtype("Record"))
        records["instruction"] = tables.instructions
        records["instruction"]["signal_count"][tables.instructions["op"] == self.graph.tasks[-1].op] = 0  # the plan's messages are the step event
        for name, table in (("wait", tables.waits), ("signal", tables.signals)):
            begin, count = tables.instructions[f"{name}_begin"], records["instruction"][f"{name}_count"]
            for place in range(layout.INLINE_EVENTS):
                has = count > place
                records[f"{name}s"][has, place] = table[begin[has] + place]
        for queue, first in zip(self.graph.queues, tables.stream_begin, strict=False):
            for place, task in enumerate(queue):
                records["apart"][first + place] = place == 0 or not self._overlap(queue[place - 1], task)
        loads, load_begin = self._loads()
        return CudaTables(records, tables.stream_begin, loads, load_begin, tables.waits, tables.signals, self.graph.tasks[-1].worker)

    def awaited(self, task: Task) -> list[int]:
        """All but the step event, for which every block waits before the step's first instruction."""
        return [e for e in super().awaited(task) if e != STEP_EVENT]

    def _overlap(self, before: int, task: int) -> bool:
        """Whether fast warps of a block may begin `task` while slow ones finish `before`: both kinds allow it, and all that they touch waits
        for itself (the order of a queue makes plain memory visible only because all threads meet)."""
        pair = (self.graph.tasks[before], self.graph.tasks[task])
        return all(load_kinds()[t.kind].overlaps and all(self.graph.buffers[r.buffer].says_itself for r in (*t.reads, *t.writes)) for t in pair)

    def _loads(self) -> tuple[np.ndarray, np.ndarray]:
        rows: list[tuple[int, ...]] = []
        begin = [0]
        bases = {op: self.matrix_offset(self.graph.tensor_graph.operators[op]) for op in self.plans}
        for queue in self.graph.queues:
            for place, t in enumerate(queue):
                op = self.graph.tasks[t].op
                if op not in self.plans:
                    continue
                plan, base = self.plans[op], bases[op]
                rows += [(base + r.offset, r.stride, r.count, plan.shape.bytes, place) for r in plan.runs[t]]
            begin.append(len(rows))
        return np.array(rows, layout.dtype("LoadRun")), np.array(begin, np.int32)


def compile_cuda_program(builder: CudaProgramBuilder, plan: KernelPlan, prompt: ProgramBuilder | None = None) -> Cubin:
    """Machine code of the program, from the cache where it is there."""
    architecture = plan.architecture
    variants = [*builder.variants, *(prompt.variants if prompt is not None else [])]
    text, headers = builder.text(plan.stages, prompt), cuda_source.headers(v.kind for v in variants)
    key = digest(text, architecture, *cuda_source.OPTIONS, str(version()), *(part for item in sorted(headers.items()) for part in item))
    store = Store("programs", ".cubin")
    entry = store.find(key)
    if entry is not None:
        return Cubin(entry.path.read_bytes(), architecture, {n: Resources(*r) for n, r in entry.notes["resources"].items()})
    cubin = compile_cubin(text, headers, architecture, cuda_source.OPTIONS)
    path = store.temporary(key)
    try:
        with store.writing():
            path.write_bytes(cubin.image)
        resources = {n: [r.registers, r.stack, r.spill_stores, r.spill_loads, r.shared] for n, r in cubin.resources.items()}
        store.commit(key, path, {"resources": resources})
    finally:
        path.unlink(missing_ok=True)
    return cubin
