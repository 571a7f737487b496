"""Search the choices of the passes with the simulator: `search` lowers, verifies and simulates candidates and ranks those that passed.

One choice is varied at a time, from the default, and the best value of each is kept (coordinate descent, repeated until nothing improves).
The search runs on the model's first layers, since all layers are alike; what it finds is then lowered, verified and simulated whole. A
candidate that the verifier refuses is dropped, whatever the simulator says about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpk.errors import GraphError, TargetError
from mpk.graph.sm_task_graph import SMTaskGraph
from mpk.models import registry
from mpk.models.config import DecoderConfig, first_layers
from mpk.passes import pipeline, verify
from mpk.passes.partition import Options
from mpk.passes.schedule import PLACEMENTS
from mpk.passes.split_attention import choose_splits
from mpk.simulate.machine import machine
from mpk.simulate.simulator import simulate
from mpk.targets.hardware import Target

SEARCHED_LAYERS = 4
ROUNDS = 2
PREDICTION_ERROR = 0.04  # of held-out shapes in the mean (docs/simulation.md)
WORTH = 0.002  # a gain below this is not worth a choice that differs from the default
FLIGHT_KB = ((32, 16), (48, 32), (64, 32), (64, 48), (96, 48), (96, 64), (128, 64))
SPLIT_OPERATORS = ("qkv", "o", "gate_up", "down", "combine", "logits", "embed")

Lower = Callable[[DecoderConfig, Target, Options], SMTaskGraph]


@dataclass(frozen=True)
class Candidate:
    """Options, what sets them apart from the default, and the simulated microseconds of a step (None: refused, for `refusal`)."""

    options: Options
    changes: tuple[str, ...] = ()
    latency_us: float | None = None
    refusal: str = ""


@dataclass(frozen=True)
class Setting:
    """What is tuned for: the step, and whether weights are fetched ahead."""

    batch: int = 1
    context: int = 512
    pipelining: bool = True


def lower(config: DecoderConfig, target: Target, options: Options) -> SMTaskGraph:
    """What `Compiler.lower_model` does with other options."""
    return pipeline.lower(registry.build_graph(config), target, options)


def evaluate(candidate: Candidate, config: DecoderConfig, target: Target, setting: Setting, lower_with: Lower = lower) -> Candidate:
    """The candidate with its simulated time, or with why it was refused. The proof is done here, whoever lowered the graph."""
    try:
        graph = lower_with(config, target, candidate.options)
        fault = verify.find_fault(graph)
        if fault is not None:
            return replace(candidate, refusal=fault.message)
    except (GraphError, TargetError) as error:
        return replace(candidate, refusal=str(error))
    try:
        found = simulate(graph, target=machine(target), batch=setting.batch, context=setting.context, pipelining=setting.pipelining)
    except GraphError as error:  # a TargetError here (no compiler, no cache) is no fault of the candidate
        return replace(candidate, refusal=str(error))
    return replace(candidate, latency_us=found.latency_us)


def choices(config: DecoderConfig, target: Target, base: Options) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """For each choice, its values: (what it is called, changed fields of `Options`)."""
    usual = choose_splits(config.num_kv_heads, target.workers)
    most = max(1, 2 * target.workers // config.num_kv_heads)
    splits = {s for s in (usual // 4, usual // 2, usual * 3 // 4, usual - 1, usual + 1, usual * 2) if 1 <= s <= most} - {usual}
    yield [(f"{s} splits of the context", {"attention_splits": s}) for s in sorted(splits)]
    if target.kernel is not None:
        own = (target.kernel.flight_bytes, target.kernel.flight_idle_bytes)
        yield [(f"{a}/{b} KB in flight", {"flight": (a * 1024, b * 1024)}) for a, b in FLIGHT_KB if (a * 1024, b * 1024) != own]
    yield [(f"placement {p}", {"placement": p}) for p in PLACEMENTS if p != base.placement]
    yield [("larger shares stay", {"rotate": False})]
    if target.half_tiles and base.half_tiles:
        yield [("whole tiles only", {"half_tiles": False})]
    yield [(f"{s} signals a task", {"signals": s}) for s in (1, 2, 4, 8) if s != target.max_signals_per_task]
    for name in SPLIT_OPERATORS:
        yield [(f"{name} in {count} tasks", {"tasks": (*(t for t in base.tasks if t[0] != name), (name, count))})
               for count in sorted({target.workers // 4, target.workers // 2, target.workers * 3 // 4}) if count]


def search(config: DecoderConfig, target: Target, start: Options, setting: Setting, *, lower_with: Lower = lower,
           say: Callable[[Candidate], None] = lambda c: None, rounds: int = ROUNDS) -> list[Candidate]:
    """Candidates for the whole model, best first, the default among them; only those that the verifier lets pass.

    Raises `GraphError` if not even the default passes, `TargetError` where the simulator cannot run. `say` is called with every candidate of the search.
    """
    small = first_layers(config, SEARCHED_LAYERS)
    best = evaluate(Candidate(start), small, target, setting, lower_with)
    if best.latency_us is None:
        raise GraphError("the default schedule", actual=best.refusal)
    kept = [best]
    for _ in range(rounds):
        before = best
        for values in choices(config, target, best.options):
            for name, change in values:
                found = evaluate(Candidate(replace(best.options, **change), _changes(best.changes, name)), small, target, setting, lower_with)
                say(found)
                if found.latency_us is not None and best.latency_us is not None and found.latency_us < best.latency_us * (1 - WORTH):
                    best = found
                    kept.append(found)
        if best is before:
            break
    whole = [evaluate(replace(c, latency_us=None), config, target, setting, lower_with) for c in finalists(kept)]
    passed = [c for c in whole if c.latency_us is not None]
    return sorted(passed, key=lambda c: c.latency_us or 0.0)


def choose(ranked: Sequence[Candidate], measured: Mapping[int, float]) -> int:
    """Place of the winner: the fastest measured (`measured`: microseconds by place); without measurements the fastest simulated, if its gain
    over the default is beyond the error of predictions, else the default."""
    if measured:
        return min(measured, key=lambda i: measured[i])
    default = next(i for i, c in enumerate(ranked) if not c.changes)
    best, usual = ranked[0].latency_us or 0.0, ranked[default].latency_us or 0.0
    return 0 if best < usual * (1 - PREDICTION_ERROR) else default


def finalists(kept: Sequence[Candidate], most: int = 3) -> list[Candidate]:
    """The default and the best few of the search."""
    return [kept[0], *[c for c in kept[1:]][-most:]]


def _changes(before: tuple[str, ...], name: str) -> tuple[str, ...]:
    """A choice of the same sort takes the place of the one before."""
    sort = _sort(name)
    return (*(c for c in before if _sort(c) != sort), name)


def _sort(name: str) -> str:
    return " ".join(word for word in name.split() if not word[0].isdigit()).removesuffix(" spread").removesuffix(" earliest").removesuffix(" fixed")
