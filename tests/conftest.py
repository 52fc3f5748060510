"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megadsl.build.gpus import gpus
from tests import shown
from tests.host_builds import MOST, HostBuilds

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-shown", type=Path, metavar="FILE", help="write every diagnostic that the tests make; see tests/shown.py")
    parser.addoption(
        "--all-knobs", action="store_true", help="turn each knob of a schedule alone, in a build of its own; see tests/test_knobs.py"
    )




def pytest_configure(config: pytest.Config) -> None:
    # Workers share the cores, and models here are tiny: torch's threads, which it makes when it is imported, would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config.pluginmanager.register(HostBuilds(None if config.getoption("--all-knobs") else MOST), "host-builds")


@pytest.fixture(autouse=True)
def shown_as_recorded(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that provokes a diagnostic shows what the diagnostic's page says that it shows."""
    test, file = request.node.nodeid, request.config.getoption("--record-shown")
    if file is None and all(recorded.test != test for recorded in shown.shown().values()):
        yield
        return
    with shown.recording() as made:
        yield
    if file is None:
        shown.check(test, made)
    else:
        shown.record(file, test, made)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``gpu`` where there is no Hopper GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not any(gpu.arch == "sm_90" for gpu in gpus()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no sm_90 GPU"))


@pytest.fixture
def repository() -> Path:
    """The root folder of the checkout."""
    return REPOSITORY


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for this test alone."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MEGADSL_CACHE_DIR", str(folder))
    return folder
