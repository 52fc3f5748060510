"""Counts the emulated kernels that a test session builds with g++: each costs some ten seconds of a core, and CI has two.

In the summary stands how many distinct ones the session used, whether they came from the cache or not; more than MOST fail it.
Tests of one kernel under several conditions should share its build: what is data of a launch (blocks, rows, inputs, seeds) makes
none, but defaults follow from shapes and the number of blocks; tests/schedules.py has ``settled`` for tests that are not about those.
Kernels of one file are one build (``one_build`` in tests/kernels.py): half of what a build takes is the headers and the emulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megadsl.build import host
from megadsl.entries import cache_root

MOST = 180  # a build is some ten seconds of a core: these are two thirds of what the tests take
_KEY = "host_builds"


class HostBuilds:
    """A plugin of a session, of each of its workers, and of the process that gathers theirs."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.used: set[str] = set()
        self.before: set[str] = set()

    def libraries(self) -> set[str]:
        return {str(path) for path in cache_root().glob("*.so")}

    def pytest_sessionstart(self) -> None:
        """From here on libraries are counted; those that processes of tests build, by what appears in the cache."""
        self.before, cached = self.libraries(), host.cached

        def counted(parts: Sequence[str | bytes], suffix: str, build: Callable[[Path], None]) -> Path:
            path = cached(parts, suffix, build)
            self.used.add(str(path))
            return path

        host.cached = counted

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self.used |= set(getattr(node, "workeroutput", {}).get(_KEY, ()))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_KEY] = sorted(self.used)
            return
        self.used |= self.libraries() - self.before
        if self.limit is not None and len(self.used) > self.limit and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.used:
            said = f"emulated kernels: {len(self.used)} builds"
            over = self.limit is not None and len(self.used) > self.limit
            terminalreporter.write_line(f"{said}, more than {self.limit}: see tests/host_builds.py" if over else said, red=over)
