"""The processes of the autotuner: one that measures and is replaced when it hangs or dies, and some that build."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial

import pytest
from landscape import Tool, doubled

from megadsl.runtime.contest_kinds import CRASHED, HUNG, Unfit
from megadsl.tune.processes import Builders, Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(partial(Tool, "tool"))
    yield made
    made.close()


def test_a_worker_keeps_its_tool(worker: Worker) -> None:
    assert worker.call("say", "a", timeout_s=60) == ("tool: a", 1)
    with pytest.raises(Unfit) as unfit:
        worker.call("unfit", timeout_s=60)
    assert (unfit.value.outcome, unfit.value.text) == ("wrong", "3 logits")
    assert worker.call("say", "b", timeout_s=60) == ("tool: b", 2) and worker.starts == 1


def test_a_worker_is_replaced_when_it_hangs_or_dies(worker: Worker) -> None:
    for method, outcome, text in (
        ("die", CRASHED, "died with 3"),
        ("fail", CRASHED, "ValueError: not mine to mend"),
        ("sleep", HUNG, "no answer for 1 s"),
    ):
        worker.call("say", "a", timeout_s=60)
        with pytest.raises(Unfit, match=text) as unfit:
            worker.call(method, timeout_s=1.0 if method == "sleep" else 60)
        assert unfit.value.outcome == outcome
        assert worker.call("say", "b", timeout_s=60) == ("tool: b", 1), "another process"
    assert worker.starts == 4


def test_a_worker_that_was_killed_while_idle(worker: Worker) -> None:
    worker.call("say", "a", timeout_s=60)
    os.kill(worker.pid or 0, signal.SIGKILL)
    time.sleep(0.2)
    with pytest.raises(Unfit, match="died with -9"):
        worker.call("say", "b", timeout_s=60)
    assert worker.call("say", "c", timeout_s=60) == ("tool: c", 1)


def test_a_worker_does_not_hear_ctrl_c(worker: Worker) -> None:
    worker.call("say", "a", timeout_s=60)
    os.kill(worker.pid or 0, signal.SIGINT)
    assert worker.call("say", "b", timeout_s=60) == ("tool: b", 2)


def test_a_tool_that_cannot_be_made() -> None:
    broken = Worker(partial(Tool, wrong="argument"))
    with pytest.raises(Unfit, match="TypeError") as unfit:
        broken.call("say", "a", timeout_s=60)
    assert unfit.value.outcome == CRASHED


def test_builders_build_ahead_and_each_once() -> None:
    builders: Builders[int, int] = Builders(doubled, 2, lost=len)
    try:
        builders.ahead([1, 2, 3, 4])
        assert [builders.get(n) for n in (4, 1, 9)] == [8, 2, 18]
        builders.ahead([5, 1])
        assert builders.get(5) == 10 and builders.get(4) == 8
    finally:
        builders.close()


def test_a_builder_that_does_not_answer() -> None:
    builders: Builders[float, str] = Builders(time.sleep, 1, lost=str, patience_s=0.5)
    try:
        assert builders.get(60.0) == "its process has not answered for 0.5 s"
    finally:
        builders.close()
