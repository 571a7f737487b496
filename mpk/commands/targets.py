"""`mpk targets`: the machines that mpk knows, with the figures it believes about them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mpk.commands.common import print_json
from mpk.targets import hardware


def _describe(target: hardware.Target) -> dict[str, Any]:
    figures = {
        "bandwidth_gb_s": target.bandwidth, "worker_bandwidth_gb_s": target.worker_bandwidth, "capacity_gb": target.capacity_gb,
        "worker_gflop_s": target.worker_rate, "event_us": target.event_latency, "task_us": target.task_latency,
    }
    return {
        "name": target.name, "backend": target.backend, "description": target.description, "workers": target.workers,
        "runs": hardware.runs_here(target), "simulation_only": target.simulation_only,
        "figures": {k: {"value": f.value, "source": f.source, "date": f.date} for k, f in figures.items()},
    }


def command(json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False) -> None:
    """List the targets and where their figures come from."""
    described = [_describe(hardware.load(name)) for name in hardware.names()]
    if json:
        print_json(described)
        return
    for d in described:
        state = "runs here" if d["runs"] else "described only: graphs can be lowered, inspected, verified and simulated"
        if d["simulation_only"]:
            state = "no program is generated for it: graphs can be lowered, inspected, verified and simulated"
        print(f"{d['name']}: {d['description']}, {d['workers']} workers ({state})")
        for key, f in d["figures"].items():
            print(f"  {key:24} {f['value']:>10g}  {f['source']} ({f['date']})")
