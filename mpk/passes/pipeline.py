"""The order of the passes, from a model's TensorGraph to a verified SMTaskGraph. It stands here alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mpk import settings
from mpk.errors import RequestError
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.graph.tensor_graph import TensorGraph
from mpk.passes import (
    cut_tiles,
    dependencies,
    event_fusion,
    fuse,
    gather_embedding,
    memory,
    partition,
    prompt,
    schedule,
    shard,
    split_attention,
    split_sampling,
    verify,
)
from mpk.passes.partition import Options
from mpk.targets.hardware import Target

DEFAULTS = Options()


def tensor_passes(target: Target, options: Options) -> list[tuple[str, Callable[[TensorGraph], TensorGraph]]]:
    """Passes from TensorGraph to TensorGraph, in order."""
    passes = [
        ("fuse", lambda g: fuse.run(g, options.max_batch, target.append_in, target.swiglu_columns, target.flagged)),
        ("shard", lambda g: shard.run(g, options.tensor_parallel, target.two_shot_bytes.value)),
        ("split_attention", lambda g: split_attention.run(g, target.workers, options.attention_splits)),
    ]
    if target.flagged:
        passes.append(("gather_embedding", gather_embedding.run))
    if target.backend == "cuda":
        passes.append(("split_sampling", lambda g: split_sampling.run(g, target.workers)))
    if target.half_tiles and options.half_tiles:
        passes.append(("cut_tiles", lambda g: cut_tiles.run(g, target, options)))
    return passes


def task_passes(target: Target, options: Options = DEFAULTS) -> list[tuple[str, Callable[[SMTaskGraph], SMTaskGraph]]]:
    """Passes from SMTaskGraph to SMTaskGraph, in order."""
    return [
        ("dependencies", dependencies.run),
        ("schedule", lambda g: schedule.run(g, target, options.placement)),
        ("event_fusion", lambda g: event_fusion.run(g, replace(target, max_signals_per_task=options.signals or target.max_signals_per_task))),
        ("memory", memory.run),
        ("verify", verify.run),
    ]


def lower(graph: TensorGraph, target: Target, options: Options) -> SMTaskGraph:
    """Run every pass; with MPK_DUMP set, write the text of the graph before the first and after each pass.

    MPK_STOP_AFTER names the pass after which to stop: `partition` or a pass behind it. Raises `RequestError` for another name and
    for a folder MPK_DUMP that cannot be written.
    """
    last = _stop_after(target, options)
    dump = _Dumper(settings.dump_folder())
    dump.write("model", graph.to_text())
    for name, tensor_pass in tensor_passes(target, options):
        graph = tensor_pass(graph)
        dump.write(name, graph.to_text())
    tasks = partition.run(graph, target, options)
    dump.write("partition", tasks)
    for name, task_pass in task_passes(target, options) if last != "partition" else ():
        tasks = task_pass(tasks)
        dump.write(name, tasks)
        if name == last:
            break
    return tasks


def lower_prompts(graph: TensorGraph, target: Target, rows: int) -> SMTaskGraph:
    """The graph that reads prompts in steps of up to `rows` rows, for a target that has one; verified like the other."""
    fused = fuse.run(graph, 1, target.append_in, target.swiglu_columns)
    tasks = partition.run(prompt.run(fused, target.workers), target, Options(max_rows=rows, max_batch=1))
    for _, task_pass in task_passes(target):
        tasks = task_pass(tasks)
    return tasks


def _stop_after(target: Target, options: Options) -> str | None:
    """The pass that MPK_STOP_AFTER names, one of those that leave tasks."""
    name = settings.stop_after()
    possible = ["partition", *(n for n, _ in task_passes(target))]
    if name is None or name in possible:
        return name
    expected = f"one of {', '.join(possible)}"
    if name in [n for n, _ in tensor_passes(target, options)]:
        raise RequestError(f"MPK_STOP_AFTER {name}", expected=expected, actual="a pass before there are tasks",
                           remedy="MPK_DUMP=<folder> writes what such a pass leaves")
    raise RequestError(f"MPK_STOP_AFTER {name}", expected=expected)


class _Dumper:
    """Writes `<number>_<pass>.txt` files; does nothing without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.number = folder, 0
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _unwritable(folder, error) from error

    def write(self, name: str, content: str | SMTaskGraph) -> None:
        if self.folder is None:
            return
        text = content if isinstance(content, str) else content.to_text()
        try:
            (self.folder / f"{self.number:02d}_{name}.txt").write_text(text, encoding="utf-8")
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        self.number += 1


def _unwritable(folder: Path, error: OSError) -> RequestError:
    return RequestError(f"MPK_DUMP {folder} cannot be written ({error.strerror})", remedy="name a folder that can be written")
