"""`Compiler`: from a model to a verified SMTaskGraph (`lower_model`) and from there to an engine (`build`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpk import settings
from mpk.codegen import graph_cache
from mpk.codegen.layout import MAX_RANKS
from mpk.errors import GraphError, RequestError, TargetError
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.models import registry
from mpk.passes import pipeline
from mpk.passes.partition import Options
from mpk.runtime.arguments import require_bool, require_whole
from mpk.targets import hardware

if TYPE_CHECKING:
    from mpk.runtime.engine import Engine

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total) while something long goes on."""


class Compiler:
    """Lowers and builds models for one target.

    target_hardware: a name that `mpk targets` lists, or "auto" (the first GPU that is described, else the CPU threads).
    tensor_parallel_size: number of devices that share one model, 1 to 8; `lower_model` refuses a number that the model's sizes do not allow.
    enable_cross_op_pipelining: let weights be fetched ahead of the events that their task waits for.
    dtype: "bf16" or "f32", type of weights and key-value cache. max_rows: token rows of one step (prompts are read in chunks
    of that many). max_batch: sequences of one call. workers: SMs or threads used by each device (default: all of the target; on cpp, where
    devices are groups of threads, an equal part of the processors). use_tuned: take the choices that `mpk tune` found for this model,
    target and these options, where it did.

    Raises `TargetError` for an unknown target and for options the target does not have.
    """

    def __init__(self, target_hardware: str = "auto", tensor_parallel_size: int = 1, enable_cross_op_pipelining: bool = True,
                 dtype: str = "bf16", max_rows: int | None = None, max_batch: int = 16, workers: int | None = None, use_tuned: bool = True) -> None:
        if not isinstance(target_hardware, str):
            raise TargetError("target_hardware", expected="the name of a target, or 'auto'", actual=repr(target_hardware))
        for name, value, optional in (("max_batch", max_batch, False), ("max_rows", max_rows, True),
                                      ("tensor_parallel_size", tensor_parallel_size, False), ("workers", workers, True)):
            require_whole(name, value, optional=optional)
        for name, value in (("enable_cross_op_pipelining", enable_cross_op_pipelining), ("use_tuned", use_tuned)):
            require_bool(name, value)
        if dtype not in ("bf16", "f32"):
            raise TargetError(f"dtype '{dtype}'", expected="bf16 or f32")
        if not 1 <= max_batch <= 16:
            raise RequestError(f"max_batch {max_batch}", expected="1 to 16")
        target = hardware.load(hardware.choose(target_hardware))
        if max_rows is None:
            max_rows = target.max_rows
        if max_rows < max_batch:
            raise RequestError(f"max_rows {max_rows}", expected=f"at least max_batch ({max_batch})")
        if not 1 <= tensor_parallel_size <= MAX_RANKS:
            raise RequestError(f"tensor_parallel_size {tensor_parallel_size}", expected=f"1 to {MAX_RANKS}")
        if max_rows > target.max_rows:
            raise RequestError(f"max_rows {max_rows}", expected=f"at most {target.max_rows} on target {target.name}")
        if target.backend == "cuda" and dtype != "bf16":
            raise TargetError(f"dtype '{dtype}' on target {target.name}", expected="bf16", remedy="use the target cpp for f32")
        if workers is not None:
            if not 1 <= workers <= target.max_workers:
                raise TargetError(f"workers {workers}", expected=f"1 to {target.max_workers} on target {target.name}")
            target = target.with_workers(int(workers))
        elif target.backend == "cpp":  # the ranks are groups of threads of one machine
            target = target.with_workers(max(1, target.workers // int(tensor_parallel_size)))
        self.target = target
        self.enable_cross_op_pipelining, self.use_tuned = enable_cross_op_pipelining, use_tuned
        self.options = Options(max_rows=int(max_rows), max_batch=int(max_batch), dtype=dtype, tensor_parallel=int(tensor_parallel_size))

    def require_device(self) -> None:
        """Raise `TargetError` in one line where this machine lacks what the target runs on; lowering needs no device."""
        hardware.require_device(self.target)

    def lower_model(self, model: Any) -> SMTaskGraph:
        """Lower a model to a scheduled and verified graph for the target.

        model: a transformers model object, a folder with config.json and safetensors, a GGUF file, the name
        "smollm2-135m-instruct", or what `mpk.frontend.load` returned. Weights are not read yet. Raises `ModelError`.
        """
        from mpk import frontend
        from mpk.codegen import tuned

        loaded = model if isinstance(model, frontend.LoadedModel) else frontend.load(model)
        options = tuned.find(loaded.config, self.target, self.options) if self.use_tuned else self.options
        tensors = registry.build_graph(loaded.config)

        def lower() -> SMTaskGraph:
            return pipeline.lower(tensors, self.target, options)

        debugging = settings.dump_folder() is not None or settings.stop_after() is not None
        graph = lower() if debugging else graph_cache.lowered(tensors, self.target, options, lower)
        graph.model = loaded
        if options != self.options:
            graph.notes.append("tuned: choices that mpk tune found for this model and target")
        return graph

    def build(self, sm_graph: SMTaskGraph, model: Any = None, progress: Progress | None = None) -> Engine:
        """Generate, compile and cache the program, pack and cache the weights, and return the engine.

        model: where the weights come from if `sm_graph` was loaded from a file. Raises `TargetError` (no compiler or device,
        cache not writable), `ModelError` (missing or wrong weights), `GraphError` (a graph for another target, dtype
        or number of devices, or without weights).
        """
        from mpk import frontend
        from mpk.passes import verify
        from mpk.runtime.engine import build_engine

        self.require_device()
        if not isinstance(sm_graph, SMTaskGraph):
            raise GraphError("build", expected="a graph that lower_model or SMTaskGraph.load returned", actual=type(sm_graph).__name__)
        if sm_graph.target != self.target.name:
            raise GraphError(f"graph lowered for target {sm_graph.target}", expected=self.target.name)
        if sm_graph.dtype != self.options.dtype:
            raise GraphError(f"graph lowered for dtype {sm_graph.dtype}", expected=f"{self.options.dtype}, the compiler's dtype")
        if sm_graph.ranks != self.options.tensor_parallel:
            raise GraphError(f"graph lowered for {sm_graph.ranks} devices", expected=f"{self.options.tensor_parallel}, the compiler's tensor_parallel_size")
        source = model if model is not None else sm_graph.model
        if source is None:
            raise GraphError("graph without weights", remedy="pass the model: build(sm_graph, model=...)")
        loaded = source if isinstance(source, frontend.LoadedModel) else frontend.load(source)
        if loaded.config != sm_graph.tensor_graph.config:
            raise GraphError("graph and model differ", expected="the configuration that the graph was lowered from")
        verify.require_proof(sm_graph)
        return build_engine(sm_graph, loaded.source, progress=progress, pipelining=self.enable_cross_op_pipelining)
