"""`mpk verify`: prove that a saved graph cannot go wrong, or name the first fault."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpk.commands.common import print_json


def command(
    graph: Annotated[Path, typer.Argument(help="File written by `SMTaskGraph.save` or `mpk inspect --save`.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check every ordering, event, queue and memory promise of a saved graph. Exit code 1 if it is refused."""
    from mpk.graph.sm_task_graph import SMTaskGraph
    from mpk.passes.verify import find_fault

    loaded = SMTaskGraph.load(str(graph))
    fault = find_fault(loaded)
    if json:
        report: dict[str, object] = {"graph": str(graph), "valid": fault is None, "tasks": len(loaded.tasks), "events": len(loaded.events),
                                     "ranks": loaded.ranks}
        if fault is not None:
            report |= {"kind": fault.kind, "message": fault.message, "fault_tasks": list(fault.tasks), "fault_events": list(fault.events),
                       "fault_regions": [list(r) for r in fault.regions]}
        print_json(report)
    elif fault is None:
        print(f"{graph}: valid, {len(loaded.tasks)} tasks, {len(loaded.events)} events, {loaded.num_workers} workers"
              + (f", {loaded.ranks} ranks" if loaded.ranks > 1 else ""))
    else:
        print(f"{graph}: refused: {fault.message}")
    if fault is not None:
        raise typer.Exit(1)
