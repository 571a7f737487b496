"""Systems that are measured beside ours: one that does not answer is given up."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from mpk.commands.peers import nccl_graph
from mpk.errors import RequestError

ANSWERS, HANGS, ENDS = "input(); print('[1.5, 2.5]', flush=True); input()", "import time; time.sleep(60)", "input()"


def ranks(*programs: str) -> nccl_graph._Ranks:
    """Processes that run these programs in place of the real ranks."""
    made = nccl_graph._Ranks.__new__(nccl_graph._Ranks)
    made.processes = [subprocess.Popen([sys.executable, "-c", p], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for p in programs]
    made._end = lambda: nccl_graph._end(made.processes)  # type: ignore[assignment]
    return made


def test_the_answer_of_the_first_rank_counts() -> None:
    group = ranks(ANSWERS, ANSWERS.replace("1.5", "9"))
    assert group.ask({"batch": 1, "context": 64}) == [1.5, 2.5]
    group._end()


@pytest.mark.parametrize("second", [HANGS, ENDS], ids=["hangs", "ends"])
def test_a_rank_that_does_not_answer_is_given_up_with_all_others(second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_graph, "LIMIT_S", 2)
    group, begin = ranks(ANSWERS, second), time.monotonic()
    with pytest.raises(RequestError, match="nccl-graph: a process of the peer ended, expected an answer of every rank within 2 s"):
        group.ask({"batch": 1, "context": 64})
    assert time.monotonic() - begin < 30
    for process in group.processes:
        process.wait(10)  # raises where one lives on
