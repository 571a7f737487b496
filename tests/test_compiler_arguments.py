"""Arguments of `Compiler` and `build` of a wrong type are refused in one line; how many workers share a model leaves its weights alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpk.codegen.weights import load_weights, weights_key
from mpk.compiler import Compiler
from mpk.errors import GraphError, RequestError, TargetError
from mpk.frontend import load
from tests.support.models import tiny_model


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"workers": 1.5}, RequestError, "workers, expected a whole number or None, got 1.5"),
    ({"workers": "2"}, RequestError, "workers, expected a whole number or None, got '2'"),
    ({"workers": True}, RequestError, "workers, expected a whole number or None, got True"),
    ({"max_rows": 8.0}, RequestError, "max_rows, expected a whole number or None, got 8.0"),
    ({"max_rows": [8]}, RequestError, "max_rows, expected a whole number or None, got [8]"),
    ({"max_batch": "4"}, RequestError, "max_batch, expected a whole number, got '4'"),
    ({"max_batch": None}, RequestError, "max_batch, expected a whole number, got None"),
    ({"enable_cross_op_pipelining": "no"}, RequestError, "enable_cross_op_pipelining, expected True or False, got 'no'"),
    ({"use_tuned": 0}, RequestError, "use_tuned, expected True or False, got 0"),
    ({"target_hardware": None}, TargetError, "target_hardware, expected the name of a target, or 'auto', got None"),
    ({"target_hardware": 3}, TargetError, "target_hardware, expected the name of a target, or 'auto', got 3"),
])
def test_arguments_of_a_wrong_type_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        Compiler(**{"target_hardware": "cpp", **arguments})


def test_numpy_numbers_are_whole_numbers() -> None:
    arguments: dict[str, Any] = {"max_batch": np.int64(2), "max_rows": np.int32(8), "workers": np.int64(2)}
    compiler = Compiler("cpp", **arguments)
    kept = (compiler.options.max_batch, compiler.options.max_rows, compiler.target.workers)
    assert kept == (2, 8, 2) and {type(value) for value in kept} == {int}  # so that a graph can be saved


@pytest.mark.parametrize("graph", ["x", None, 3])
def test_build_refuses_what_is_no_graph(graph: Any) -> None:
    with pytest.raises(GraphError, match=rf"^build, expected a graph that lower_model or SMTaskGraph.load returned, got {type(graph).__name__}$"):
        Compiler("cpp").build(graph)


def test_a_graph_is_built_by_a_compiler_of_its_dtype() -> None:
    graph = Compiler("cpp", workers=2).lower_model(load("SmolLM2-135M", shapes=True))
    with pytest.raises(GraphError, match=r"^graph lowered for dtype bf16, expected f32, the compiler's dtype$"):
        Compiler("cpp", dtype="f32", workers=2).build(graph)


def test_packed_weights_are_shared_by_all_numbers_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("MPK_CACHE", str(tmp_path))
    model = load(tiny_model("qwen2"))
    graphs = [Compiler("cpp", dtype="f32", max_rows=8, max_batch=2, workers=n).lower_model(model) for n in (1, 2, 5, 8)]
    kinds = [{op.kind for op in graph.tensor_graph.operators} for graph in graphs]
    assert "attention_combine" not in kinds[0] and "attention_combine" in kinds[-1]  # the graphs do differ
    assert len({weights_key(graph, model.source) for graph in graphs}) == 1
    packed = [load_weights(graph, model.source) for graph in graphs]
    assert len({p.path for p in packed}) == 1 and len(list((tmp_path / "weights").glob("*.bin"))) == 1
    assert all(graph.param_offsets == graphs[0].param_offsets for graph in graphs)
    other = Compiler("cpp", dtype="bf16", max_rows=8, max_batch=2, workers=1).lower_model(model)
    assert weights_key(other, model.source) != weights_key(graphs[0], model.source)
