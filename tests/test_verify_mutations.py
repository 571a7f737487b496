"""Damaged graphs: whatever goes wrong when they run must be refused, and what is not damaged accepted."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from mpk.compiler import Compiler
from mpk.passes.verify import CHECKS, find_fault
from tests.support.graphs import KINDS, Shape, before, in_conflict, random_graph, small_graph
from tests.support.interleave import harm_by_holding_back, harm_by_interleaving
from tests.support.models import tiny_model
from tests.support.mutations import MUTATIONS, copy_graph, mutants, without_producer

DECLARED = tuple(c for c in CHECKS if c != "kinds")  # take the regions of the graph as they are
GRAPHS, MUTANTS = 220, 28
# refusals of these are all about order and data; others refuse a damaged form whether or not it does harm
ABOUT_ORDER = ("wait", "neighbours", "move task", "swap entries", "region", "double wait")


def test_running_shows_the_harm_of_each_hazard() -> None:
    """The oracle itself: one known harm each, found by both ways of running."""
    def harm(change: str) -> tuple[str, str]:
        graph = small_graph()
        match change:
            case "none":
                pass
            case "race":
                graph.tasks[3].waits = ()
            case "deadlock":
                graph.events[2].threshold = 3
            case "overlap of steps":
                graph.tasks[0].waits = ()
            case "shared bytes":
                graph.arena["d"] = graph.arena["a"]
                graph.tasks[8].waits = (3,)
                graph.tasks[8].reads = (graph.tasks[4].reads[0],)
        return str(harm_by_interleaving(graph)), str(harm_by_holding_back(graph))

    assert harm("none") == ("None", "None")
    assert all("may run at the same time" in h for h in harm("race"))
    assert all("deadlock" in h for h in harm("deadlock"))
    assert all("may start before the step before is over" in h or "may run before" in h for h in harm("overlap of steps"))
    assert all("same time" in h or "version" in h for h in harm("shared bytes"))


def test_every_harmful_mutation_is_refused(record_property: pytest.RecordProperty) -> None:
    """Exhaustive interleaving decides what is harmful; holding back tasks must agree with it."""
    tried, harmful, refused, needless = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for seed in range(GRAPHS):
        graph = random_graph(seed)
        assert harm_by_interleaving(graph) is None, f"seed {seed}"
        for name, mutant in mutants(graph, random.Random(seed), MUTANTS):
            harm, fault = harm_by_interleaving(mutant), find_fault(mutant, KINDS, DECLARED)
            assert (harm is None) == (harm_by_holding_back(mutant) is None), f"seed {seed}, {name}: {harm}"
            assert harm is None or fault is not None, f"seed {seed}, {name}: accepted, but {harm}"
            tried[name] += 1
            harmful[name] += harm is not None
            refused[name] += fault is not None
            needless[name] += fault is not None and harm is None
    assert tried.total() == GRAPHS * MUTANTS >= 5000
    assert set(MUTATIONS) <= set(tried)
    assert harmful.total() > 3000
    ordered = [n for n in MUTATIONS if any(word in n for word in ABOUT_ORDER)]
    precision = 1 - sum(needless[n] for n in ordered) / sum(refused[n] for n in ordered)
    assert precision > 0.9
    for name, counts in (("mutations", tried), ("harmful", harmful), ("refused", refused), ("refused without harm", needless)):
        record_property(name, counts.total())
    record_property("precision about order", round(precision, 3))
    print(f"{tried.total()} mutations, {harmful.total()} harmful, {refused.total()} refused, of these {needless.total()} without harm; "
          f"precision about order and data {precision:.3f}")


@pytest.mark.parametrize("first", [0, 40, 80, 410])
def test_each_producer_left_out_in_turn(first: int) -> None:
    """Few buffers, written in parts and read whole again and again: the proof must agree with a look at every pair of tasks."""
    dense = Shape(operators=(8, 12), workers=(3, 4), tiles=(1, 1), buffers=2, reuse_name=0.3, cache=0.2, partial=1.0, whole=0.95)
    tried = unordered = 0
    for seed in range(first, first + 40):
        graph = random_graph(seed, dense)
        graph.arena = {}
        for event in graph.events:
            for producer in event.producers:
                mutant = without_producer(graph, event.id, producer)
                earlier = before(mutant)
                pairs = {(a.id, b.id) for b in mutant.tasks for a in mutant.tasks[: b.id] if in_conflict(a, b) and a.id not in earlier[b.id]}
                fault = find_fault(mutant, KINDS, ("accesses",))
                assert (fault is not None) == bool(pairs), f"seed {seed}, event {event.id} without task {producer}"
                assert fault is None or fault.tasks in pairs, f"seed {seed}, event {event.id} without task {producer}: {fault.message}"
                tried, unordered = tried + 1, unordered + bool(pairs)
    assert tried > 800 and 0.1 < unordered / tried < 0.9


@pytest.mark.parametrize("seed", range(1000, 1012))
def test_larger_graphs(seed: int) -> None:
    """Five workers and some thirty tasks, too many to go through all interleavings."""
    graph = random_graph(seed, Shape(operators=(8, 12), workers=(4, 5), tiles=(2, 4)))
    assert harm_by_holding_back(graph) is None
    assert find_fault(graph, KINDS) is None
    for name, mutant in mutants(graph, random.Random(seed), 12):
        harm = harm_by_holding_back(mutant)
        assert harm is None or find_fault(mutant, KINDS, DECLARED) is not None, f"{name}: accepted, but {harm}"


def test_any_region_other_than_declared_by_the_kind_is_refused() -> None:
    for seed in range(60):
        graph = random_graph(seed)
        for name in ("enlarge region", "shrink region", "shift region", "drop region"):
            mutant = copy_graph(graph)
            if MUTATIONS[name](random.Random(seed), mutant):
                fault = find_fault(mutant, KINDS)
                assert fault is not None and fault.kind == "region", f"seed {seed}, {name}"


@pytest.mark.parametrize(("name", "workers"), [("llama", 2), ("qwen3", 3), ("mistral-window", 5)])
def test_lowered_models(name: str, workers: int) -> None:
    """Graphs of tiny models as the compiler makes them, whole and damaged, with the task kinds' own regions."""
    graph = Compiler("cpp", dtype="f32", max_rows=2, max_batch=2, workers=workers).lower_model(tiny_model(name, num_hidden_layers=1))
    assert find_fault(graph) is None
    assert harm_by_holding_back(graph) is None
    harmful = 0
    for mutation, mutant in mutants(graph, random.Random(workers), 60):
        harm = harm_by_holding_back(mutant)
        harmful += harm is not None
        assert harm is None or find_fault(mutant) is not None, f"{mutation}: accepted, but {harm}"
    assert harmful > 20
