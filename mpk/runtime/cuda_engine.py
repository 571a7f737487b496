"""The engine of GPU targets: one persistent kernel, the weights of a model in a GPU's memory, and runs of both."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpk.codegen import graph_cache, layout
from mpk.codegen.cuda_program import KERNEL, CudaProgramBuilder, CudaTables, compile_cuda_program
from mpk.codegen.cuda_weights import WeightLoader
from mpk.codegen.nvrtc import Cubin
from mpk.codegen.prompt_program import PromptProgram, PromptTables
from mpk.errors import StallError, TargetError
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.models import registry
from mpk.passes import pipeline
from mpk.passes.memory import lay_out_params
from mpk.passes.partition import Options
from mpk.runtime.cuda_device import Device, Memory, PinnedArray
from mpk.runtime.engine import BuildProgress, Engine
from mpk.runtime.state import State, gib
from mpk.targets import hardware
from mpk.targets.hardware import KernelPlan, Target
from mpk.tasks.base import WeightSource

THREADS = 384  # BLOCK_THREADS of block.cuh
RING_OFFSET, SCRATCH_BYTES = 3072, 64 << 10  # shared memory besides the stages: ring.cuh and block.cuh
MESSAGE_BYTES = 16 * 16  # MAX_ROWS messages of step.cuh
ARGUMENTS = np.dtype([("launch", layout.dtype("Launch")), ("kernel", layout.dtype("Kernel"))], align=True)


def shared_bytes(plan: KernelPlan) -> int:
    """Shared memory of a block."""
    return RING_OFFSET + plan.stages * plan.stage_bytes + SCRATCH_BYTES


def launch_plan(graph: SMTaskGraph, pipelining: bool) -> KernelPlan:
    """The target's plan of the kernel, with what the graph has chosen; without pipelining nothing is fetched for later instructions.

    Where the ring and what is brought to the L2 behind it are a layer's weights and more, none of it is needed soon, and attention goes first.
    """
    plan = hardware.load(graph.target).kernel
    assert plan is not None
    flight = graph.flight or (plan.flight_bytes, plan.flight_idle_bytes)
    fetched = graph.num_workers * (plan.stages * plan.stage_bytes + plan.prefetch_bytes)
    return replace(plan, flight_bytes=flight[0], flight_idle_bytes=flight[1], prefetch_bytes=plan.prefetch_bytes if pipelining else 0,
                   attention_bytes=plan.attention_bytes if weights_of_a_layer(graph) > fetched else 0)


def weights_of_a_layer(graph: SMTaskGraph) -> int:
    """Bytes of packed weights that the tasks of one layer read, of the largest."""
    layers: Counter[int] = Counter()
    for task in graph.tasks:
        layers[graph.operator(task).layer] += task.cost.weight_bytes
    return max((count for layer, count in layers.items() if layer >= 0), default=0)


class LoadedProgram:
    """A program, its tables and its weights in the memory of one device."""

    def __init__(self, device: Device, graph: SMTaskGraph, builder: CudaProgramBuilder, cubin: Cubin, tables: CudaTables, plan: KernelPlan,
                 prompt: PromptProgram | None = None, prompts: PromptTables | None = None) -> None:
        self.device, self.graph, self.tables, self.plan, self.prompts = device, graph, tables, plan, prompts
        self.arena_bytes, self.num_events, self.prompt_rows = graph.arena_bytes, len(graph.events), 0
        if prompt is not None and prompts is not None:
            self.arena_bytes, self.num_events, self.prompt_rows = prompt.arena_bytes, prompts.events, prompt.graph.max_rows
        self.shared_bytes = shared_bytes(plan)
        check_device(device, graph, plan, self.shared_bytes, self.arena_bytes - graph.arena_bytes)
        self.module = device.load(cubin.image)
        self.function = device.function(self.module, KERNEL, self.shared_bytes)
        self.weights = device.allocate(graph.weight_bytes)
        self.loader = WeightLoader(builder, device, self.module, self.weights)
        self.constants = {name: device.copy(getattr(tables, name)) for name in ("records", "stream_begin", "loads", "load_begin", "waits", "signals")}
        if prompts is not None:
            self.constants |= {"prompt_records": device.copy(prompts.records), "prompt_stream_begin": device.copy(prompts.stream_begin),
                               "places": device.copy(prompts.places), "waits": device.copy(prompts.waits), "signals": device.copy(prompts.signals)}

    def fill(self, params: np.ndarray, source: WeightSource, progress: Any = None, random_seed: int | None = None) -> None:
        """Bring the parameters and the matrices of `source`, or random matrices."""
        self.params = self.device.copy(params)
        if random_seed is None:
            self.loader.load(source, progress)
        else:
            self.loader.fill_random(random_seed)


def check_device(device: Device, graph: SMTaskGraph, plan: KernelPlan, shared: int, further_bytes: int = 0) -> None:
    """Raise `TargetError` with the numbers for a GPU that is too old, too small or too full; `further_bytes`: for messages between ranks, and
    for activations of another graph."""
    found = device.properties()
    what = f"device {device.index} ({found.name})"
    if found.capability != plan.capability:
        raise TargetError(f"{what} for target {graph.target}", expected="compute capability {}.{}".format(*plan.capability),
                          actual="{}.{}".format(*found.capability), remedy="use a target of that capability, or cpp")
    if found.multiprocessors < graph.num_workers:
        raise TargetError(f"{what} for target {graph.target}", expected=f"{graph.num_workers} multiprocessors", actual=str(found.multiprocessors),
                          remedy=f"lower the model with workers={found.multiprocessors}")
    if found.shared_memory_per_block < shared:
        raise TargetError(f"{what}: shared memory of a block", expected=f"{shared} bytes", actual=str(found.shared_memory_per_block))
    free, total = device.free_memory()
    needed = graph.weight_bytes + graph.arena_bytes + further_bytes
    if needed > free:
        raise TargetError(f"weights and activations of the model on {what}: {gib(needed)}", expected=f"at most {gib(free)}, what is free of {gib(total)}",
                          remedy="stop other programs on the device, or use a smaller model")


@dataclass(repr=False)
class CudaEngine(Engine):
    """Engine of a GPU target. Weights are brought to a device when the first instance on it is made (device 0: by `build`)."""

    builder: CudaProgramBuilder = None  # type: ignore[assignment]
    cubin: Cubin = None  # type: ignore[assignment]
    source: WeightSource = None  # type: ignore[assignment]
    random_seed: int | None = None
    prompt: PromptProgram | None = None

    def __post_init__(self) -> None:
        self.params = lay_out_params(self.graph, self.source)  # instructions hold their places
        if self.prompt is not None:
            self.params = self.prompt.join_params(self.params, self.source)
        self.tables = self.builder.cuda_tables()
        self.prompt_tables = None if self.prompt is None else self.prompt.prompt_tables(self.tables.waits, self.tables.signals)
        self.plan = launch_plan(self.graph, self.pipelining)
        self._loaded: dict[int, LoadedProgram] = {}

    def locate(self, task: int) -> tuple[SMTaskGraph, int]:
        count = len(self.graph.tasks)
        return (self.graph, task) if self.prompt is None or task < count else (self.prompt.graph, task - count)

    def prompt_tasks(self, tokens: int) -> int:
        if self.prompt is None:
            return 0
        graph = self.prompt.graph
        return (-(-tokens // graph.max_rows) + 1) * max(len(queue) for queue in graph.queues)

    def on_device(self, index: int, progress: Any = None) -> LoadedProgram:
        """The program on a device, brought there first where it is not."""
        if index not in self._loaded:
            program = LoadedProgram(Device(index), self.graph, self.builder, self.cubin, self.tables, self.plan, self.prompt, self.prompt_tables)
            program.fill(self.params, self.source, progress, self.random_seed)
            self._loaded[index] = program
        return self._loaded[index]

    def executor(self, batch: int, context: int, explicit: bool, device_ids: Sequence[int] | None, stall_limit_s: float) -> CudaExecutor:
        devices = [0] if device_ids is None else list(device_ids)
        if len(devices) != 1:
            raise TargetError("device_ids", expected="one device", actual=str(devices), remedy="more devices are not supported yet")
        program = self.on_device(devices[0])
        free, _ = program.device.free_memory()
        state = State(self.graph, batch, context, explicit, available=max(0, free - program.arena_bytes - (256 << 20)), on_host=False,
                      rows=program.prompt_rows)
        return CudaExecutor(self, program, state, stall_limit_s)


class CudaExecutor:
    """Runs the kernel on one instance's state: the state's arrays are the host's copies, sent before a run and fetched after it."""

    SENT = ("sequences", "step", "free_pages", "free_page_count", "cancel")
    FETCHED = ("sequences", "step")

    def __init__(self, engine: CudaEngine, program: LoadedProgram, state: State, stall_limit_s: float) -> None:
        self.engine, self.program, self.state, self.stall_limit_s = engine, program, state, stall_limit_s
        device = program.device
        arrays = {"sequences": state.sequences, "step": state.step, "segments": state.segments, **state.rows, "page_table": state.page_table,
                  "free_pages": state.free_pages, "free_page_count": state.free_page_count, "cancel": state.cancel,
                  "tokens": state.tokens, "token_ns": state.token_ns}
        self.arrays = arrays
        self.memory = {name: device.allocate(array.nbytes) for name, array in arrays.items()}
        for name in ("segments", *state.rows, "page_table", "tokens", "token_ns"):
            self.memory[name].fill(0)
        self.memory["stall"] = device.allocate(engine.graph.num_workers * layout.dtype("Stall").itemsize)  # one a block
        self.memory["arena"] = device.allocate(program.arena_bytes)
        self.memory["kv"] = device.allocate(state.num_pages * state.page_bytes)
        self.memory["kv"].fill(0)
        self.memory["arena"].fill(0)
        self.events = device.allocate(program.num_events * layout.COUNTER_STRIDE)
        self.prompt_step = device.allocate(layout.dtype("Step").itemsize)
        self.stop = device.allocate(8)
        self.messages = device.allocate(MESSAGE_BYTES)
        self.side_stream = device.stream()
        self.mirror: PinnedArray | None = None
        self.kernel_ms = 0.0
        self.stream, self.cooperative = 0, True  # where and how the kernel is launched
        self._outputs: dict[str, tuple[np.ndarray, Memory]] = {}
        self._begin, self._end = device.event(), device.event()

    # ---- one run
    def start(self, logits: np.ndarray | None, spans: np.ndarray | None, span_count: np.ndarray | None, watched: bool) -> None:
        """Send the state and make the arguments; `watched`: somebody polls for tokens while the program runs."""
        device, state, graph = self.program.device, self.state, self.engine.graph
        device.use()
        for name in self.SENT:
            self.memory[name].upload(self.arrays[name])
        for slot, sequence in enumerate(state.sequences):
            length = int(sequence["length"])
            self.memory["tokens"].upload(state.tokens[slot, :length], slot * state.max_context * 4)
        self.events.fill(0)
        self.prompt_step.fill(0)
        if graph.flagged_bytes:
            self.memory["arena"].fill(0xFF, graph.flagged_begin, 2 * graph.flagged_bytes)  # EMPTY of flagged.cuh
        else:
            self.memory["arena"].fill(0)  # messages tell by a step's number that they are new
        self.messages.fill(0)
        self.stop.fill(0)
        self.memory["stall"].fill(0)
        self._outputs = {}
        wanted = {"logits_out": logits, "spans": spans, "span_count": span_count if spans is not None else None}
        if state.logprobs is not None:
            wanted |= dict(zip(("chosen_logprob", "top_logprob", "top_token"), state.logprobs, strict=True))
        for name, array in wanted.items():
            if array is not None:
                self._outputs[name] = (array, device.allocate(array.nbytes))
        if watched and self.mirror is None:
            self.mirror = PinnedArray(device, (state.max_batch, state.max_context), np.int64)
        if self.mirror is not None:
            self.mirror.array[:] = 0
        self.argument = self._arguments(logits, spans, watched)

    def _arguments(self, logits: np.ndarray | None, spans: np.ndarray | None, watched: bool) -> np.ndarray:
        program, plan = self.program, self.program.plan
        addresses = {name: memory.address for name, memory in self.memory.items()}
        addresses |= {name: memory.address for name, (_, memory) in self._outputs.items()}
        constants = {name: memory.address for name, memory in program.constants.items()}
        addresses |= {name: constants[name] for name in ("stream_begin", "waits", "signals")}
        addresses |= {"weights": program.weights.address, "params": program.params.address}
        out = np.zeros(1, ARGUMENTS)
        out["launch"] = self.state.launch_at(addresses, 0 if logits is None else logits.shape[1], 0 if spans is None else spans.shape[1],
                                             SCRATCH_BYTES, self.stall_limit_s)
        values = {"records": constants["records"], "loads": constants["loads"], "load_begin": constants["load_begin"], "events": self.events.address,
                  "stop": self.stop.address, "messages": self.messages.address, "mirror": self.mirror.address if watched and self.mirror is not None else 0,
                  "planner": program.tables.planner, "stages": plan.stages, "flight_bytes": plan.flight_bytes,
                  "flight_idle_bytes": plan.flight_idle_bytes, "prefetch_bytes": plan.prefetch_bytes, "prefetch_ns": plan.prefetch_ns,
                  "attention_bytes": plan.attention_bytes, "pipelining": int(self.engine.pipelining)}
        for name, value in (values | self._prompt_arguments(constants)).items():
            out["kernel"][name] = value
        return out

    def _prompt_arguments(self, constants: dict[str, int]) -> dict[str, int]:
        tables, rows = self.program.prompts, self.program.prompt_rows
        if tables is None:
            return {}
        return {**{name: constants[name] for name in ("prompt_records", "prompt_stream_begin", "places")}, "prompt_step": self.prompt_step.address,
                "prompt_planner": tables.planner, "prompt_event": tables.event, "prompt_over": tables.over, "prompt_task": tables.task,
                "prompt_rows": rows, "prompt_room": rows, "prompt_least": hardware.load(self.program.graph.target).prompt_least}

    def run(self) -> int:
        """Run until no sequence has work left, and fetch what it made; returns one of `layout.RESULT`."""
        self.launch()
        self._watch()
        return self.collect()

    def launch(self) -> None:
        """Start the kernel."""
        device = self.program.device
        device.use()
        self._launched_ns = time.perf_counter_ns()
        device.record(self._begin, self.stream)
        device.launch(self.program.function, self.engine.graph.num_workers, THREADS, self.program.shared_bytes, self.argument, self.cooperative, self.stream)
        device.record(self._end, self.stream)

    def collect(self) -> int:
        """Fetch what the kernel made, once it has ended; returns one of `layout.RESULT`."""
        device, state = self.program.device, self.state
        device.use()
        device.synchronize()
        self.kernel_ms = device.elapsed_ms(self._begin, self._end)
        for name in self.FETCHED:
            array = self.arrays[name]
            array[:] = self.memory[name].download(array.dtype, array.size).reshape(array.shape)
        for slot, sequence in enumerate(state.sequences):
            begin, end = int(sequence["prompt_length"]), int(sequence["length"])
            if end > begin:
                place = slot * state.max_context + begin
                state.tokens[slot, begin:end] = self.memory["tokens"].download(np.int32, end - begin, place * 4)
                state.token_ns[slot, begin:end] = self.memory["token_ns"].download(np.int64, end - begin, place * 8)
        for array, memory in self._outputs.values():
            array[...] = memory.download(array.dtype, array.size).reshape(array.shape)
            memory.free()
        self._shift_times(self._launched_ns)
        result = int(self.stop.download(np.int32, 1)[0])
        if result == layout.RESULT["stalled"]:
            state.stall[0] = earliest(self.memory["stall"].download(layout.dtype("Stall"), self.engine.graph.num_workers))
        return result

    def _watch(self) -> None:
        """Return when the kernel has ended, or raise `StallError` if it was told to stop and does not: a task does not end."""
        device, deadline = self.program.device, time.monotonic() + self.stall_limit_s
        while not device.finished(self._end):
            if time.monotonic() < deadline:
                time.sleep(20e-6)
                continue
            deadline = time.monotonic() + self.stall_limit_s
            if device.download_beside(self.side_stream, self.stop, np.int32, 1)[0]:
                time.sleep(self.stall_limit_s)
                if not device.finished(self._end):
                    raise StallError(self._hang_text())

    def _hang_text(self) -> str:
        workers = self.engine.graph.num_workers
        stall = earliest(self.program.device.download_beside(self.side_stream, self.memory["stall"], layout.dtype("Stall"), workers))
        graph, task = self.engine.locate(int(stall["task"]))
        event = int(stall["event"]) - (0 if graph is self.engine.graph else len(self.engine.graph.events))
        names = sorted({graph.operator(t).name for t in graph.events[event].producers}) if 0 <= event < len(graph.events) else ["data of another task"]
        return (f"no progress for {self.stall_limit_s:g} s, and a task does not end: worker {stall['worker']} waits in step {stall['step']} at task "
                f"{stall['task']} ({graph.operator(task).name}) for event {event} ({', '.join(names[:4])}), expected "
                f"{stall['expected']}, seen {stall['seen']}; the device has to be reset by ending this process")

    def _shift_times(self, launched: int) -> None:
        """Token times are of the device's clock; the last one is taken to be the end of the kernel."""
        ends = [int(self.state.token_ns[slot, int(s["length"]) - 1]) for slot, s in enumerate(self.state.sequences) if s["length"] > s["prompt_length"]]
        if ends:
            offset = launched + int(self.kernel_ms * 1e6) - max(ends)
            for slot, s in enumerate(self.state.sequences):
                self.state.token_ns[slot, int(s["prompt_length"]) : int(s["length"])] += offset

    def poll(self, length: np.ndarray, finish: np.ndarray) -> None:
        """Lengths so far; copies the tokens that are new into the state."""
        state = self.state
        for slot in range(state.max_batch):
            known = max(int(length[slot]), int(state.sequences[slot]["prompt_length"]))
            end = int(state.sequences[slot]["max_length"])
            if self.mirror is not None:
                row = self.mirror.array[slot]
                while known < end and row[known] != 0:
                    state.tokens[slot, known] = int(row[known]) - 1
                    known += 1
            length[slot] = known

    def cancel(self) -> None:
        """Ask the running program to stop after its current step."""
        self.program.device.use()
        self.state.cancel[0] = 1
        self.program.device.upload_beside(self.side_stream, self.memory["cancel"], self.state.cancel)

    def now_ns(self) -> int:
        return time.perf_counter_ns()

    def stalls(self) -> Sequence[np.void]:
        return [self.state.stall[0]]


def earliest(stalls: np.ndarray) -> np.void:
    """Of what the blocks report (Stall, one a block, zeros where a block did not wait) the earliest wait: the others follow from it."""
    reported = stalls[stalls["step"] > 0]
    return reported[np.lexsort((reported["task"], reported["step"]))[0]] if len(reported) else stalls[0]


def build_cuda_engine(graph: SMTaskGraph, source: WeightSource, *, progress: BuildProgress | None = None, pipelining: bool = True,
                      random_seed: int | None = None, load: bool = True, prompts: bool = True) -> Engine:
    """Compile the program and bring the weights to device 0 (`load`); see `Compiler.build`. With `random_seed` matrices are random.

    `prompts`: read long prompts with a graph of their own, where the target has one.
    """
    report = progress or (lambda stage, done, total: None)
    target = hardware.load(graph.target)
    plan = target.kernel
    assert plan is not None
    if graph.ranks > 1:
        from mpk.runtime.cuda_group import build_cuda_group_engine

        return build_cuda_group_engine(graph, source, progress=progress, pipelining=pipelining, random_seed=random_seed, load=load)
    if load:
        check_device(Device(0), graph, plan, shared_bytes(plan))  # before a minute of compiling
    builder = CudaProgramBuilder(graph)
    prompt = PromptProgram(prompt_graph(graph, target), builder) if prompts and target.prompt_rows and graph.ranks == 1 else None
    report("compile the program", 0, 1)
    cubin = compile_cuda_program(builder, plan, prompt)
    report("compile the program", 1, 1)
    engine = CudaEngine(graph, None, None, pipelining, builder=builder, cubin=cubin, source=source, random_seed=random_seed,  # type: ignore[arg-type]
                        prompt=prompt)
    if load:
        engine.on_device(0, lambda done, total: report("bring the weights to the device", done, total))
    return engine


def prompt_graph(graph: SMTaskGraph, target: Target) -> SMTaskGraph:
    """The graph that reads prompts for the model of `graph`, from the cache where it is there."""
    tensors = registry.build_graph(graph.tensor_graph.config)
    target = target.with_workers(graph.num_workers)
    options = Options(max_rows=target.prompt_rows, max_batch=1)
    return graph_cache.lowered(tensors, target, options, lambda: pipeline.lower_prompts(tensors, target, target.prompt_rows), "prompts")
