"""The count of emulated kernels that a session builds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.host_builds import HostBuilds


def session(**config: Any) -> Any:
    return SimpleNamespace(config=SimpleNamespace(**config), exitstatus=pytest.ExitCode.OK)


@pytest.mark.parametrize(("limit", "exitstatus"), [(1, pytest.ExitCode.TESTS_FAILED), (2, pytest.ExitCode.OK), (None, pytest.ExitCode.OK)])
def test_more_than_the_limit_fail_a_session(limit: int | None, exitstatus: pytest.ExitCode) -> None:
    counting, finished = HostBuilds(limit), session()
    counting.before = counting.libraries()
    for worker in (["a.so", "b.so"], ["b.so"], []):
        counting.pytest_testnodedown(SimpleNamespace(workeroutput={"host_builds": worker}))
    counting.pytest_testnodedown(SimpleNamespace())  # a worker that died
    counting.pytest_sessionfinish(finished)
    assert finished.exitstatus == exitstatus and counting.used == {"a.so", "b.so"}


def test_a_worker_hands_over_what_it_used() -> None:
    counting, finished = HostBuilds(0), session(workeroutput={})
    counting.used = {"b.so", "a.so"}
    counting.pytest_sessionfinish(finished)
    assert finished.config.workeroutput == {"host_builds": ["a.so", "b.so"]} and finished.exitstatus == pytest.ExitCode.OK
