"""`--tp` on the command line: reports, saved graphs, traces, and refusals in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpk.commands import communication
from mpk.commands.peers import peer_system
from mpk.errors import RequestError
from mpk.simulate.measured import measured
from tests.test_cli import mpk
from tests.test_shard import config
from tests.test_tensor_parallel import build


def test_inspect_saves_a_graph_of_several_ranks_and_verify_accepts_it(tmp_path: Path) -> None:
    saved = tmp_path / "graph"
    report = json.loads(mpk("inspect", "smollm2-135m-instruct", "--target", "cpp", "--tp", "3", "--workers", "2", "--save", str(saved), "--json").stdout)
    assert report["ranks"] == 3 and report["operators_per_kind"]["all_reduce"] == 61 and report["peer_bytes"] > 0
    done = mpk("verify", str(saved))
    assert done.returncode == 0 and done.stdout.rstrip().endswith("2 workers, 3 ranks")


@pytest.mark.parametrize(("arguments", "text"), [
    (("inspect", "--target", "cpp", "--tp", "2"), "mpk: tensor_parallel_size 2: 9 query heads cannot be shared by 2 devices; sizes that work: 1, 3"),
    (("generate", "--target", "cpp", "--tp", "9"), "mpk: tensor_parallel_size 9, expected 1 to 8"),
])
def test_numbers_of_devices_that_do_not_work_are_refused(arguments: tuple[str, ...], text: str) -> None:
    done = mpk(*arguments)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.strip() == text


def test_peers_on_one_gpu_are_not_compared_with_several() -> None:
    pytest.importorskip("torch")
    with pytest.raises(RequestError, match="--against torch-eager with --tp 2, expected --tp 1; nccl-graph shares a model among GPUs"):
        peer_system("torch-eager", config(), "bf16", 4, 2)
    with pytest.raises(RequestError, match="--against nccl-graph with --tp 2, expected 2 CUDA devices that torch sees"):
        peer_system("nccl-graph", config(), "bf16", 4, 2)


def test_what_messages_cost_is_told_from_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPK_CACHE", str(tmp_path))
    engine = build(config(hidden=64, layers=1), 2)
    instance = engine.create_instance(max_batch=1, trace_spans=1000)
    instance.generate([[1, 2, 3]], max_new_tokens=5, stop_tokens=[])
    report = communication.report(measured(engine.graph, instance.spans(), 1, 4, devices=2))
    assert report["messages"] == 4 and report["all_reduce_exposed_us"] > 0 and 0 <= report["hidden_share"] < 1
    assert report["exposed_us_per_step"] > 0
