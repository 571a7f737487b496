"""The order of the passes, from a model's TensorGraph to a verified SMTaskGraph. It stands here alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mpk import settings
from mpk.errors import RequestError
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.graph.tensor_graph import TensorGraph
from mpk.passes import (
    dependencies,
    event_fusion,
    fuse,
    gather_embedding,
    memory,
    partition,
    schedule,
    split_attention,
    split_sampling,
    verify,
)
from mpk.passes.partition import Options
from mpk.targets.hardware import Target


def tensor_passes(target: Target, options: Options) -> list[tuple[str, Callable[[TensorGraph], TensorGraph]]]:
    """Passes from TensorGraph to TensorGraph, in order."""
    passes = [
        ("fuse", lambda g: fuse.run(g, options.max_batch, target.append_in, target.swiglu_columns, target.flagged)),
        ("split_attention", lambda g: split_attention.run(g, target.workers)),
    ]
    if target.flagged:
        passes.append(("gather_embedding", gather_embedding.run))
    if target.backend == "cuda":
        passes.append(("split_sampling", lambda g: split_sampling.run(g, target.workers)))
    return passes


def task_passes(target: Target) -> list[tuple[str, Callable[[SMTaskGraph], SMTaskGraph]]]:
    """Passes from SMTaskGraph to SMTaskGraph, in order."""
    return [
        ("dependencies", dependencies.run),
        ("schedule", lambda g: schedule.run(g, target)),
        ("event_fusion", lambda g: event_fusion.run(g, target)),
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
    for name, task_pass in task_passes(target) if last != "partition" else ():
        tasks = task_pass(tasks)
        dump.write(name, tasks)
        if name == last:
            break
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
