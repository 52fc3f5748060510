"""Kernels against each other on a GPU: timed, verified, and found to hang; and a short search as a whole."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megadsl.driver import compile_model
from megadsl.dsl.schedule_file import load
from megadsl.machine import DEFAULT_ARCH
from megadsl.runtime.contest import FEWEST, Contest
from megadsl.runtime.contest_kinds import HUNG, WRONG, Kernel, Unfit
from megadsl.tune.log import Log
from megadsl.tune.result import about, tuned, write_result
from megadsl.tune.search import Effort, Search, Settings
from megadsl.tune.stand import Stand
from megadsl.tune.subject import Subject

pytestmark = pytest.mark.gpu

MODEL, LENGTHS, ROWS = "smollm2-135m", (17, 300), 512


def test_what_is_measured_and_what_is_wrong() -> None:
    made = compile_model(MODEL, max_kv=ROWS)
    base = Kernel("base", made.manifest, made.source)
    contest = Contest("cuda", made.graph, base, LENGTHS)
    same = Kernel("same", made.manifest, made.source)
    ours, theirs = contest.compare(base, same, FEWEST, seed=0)
    assert [len(row) for row in (*ours, *theirs)] == [FEWEST] * 4 and 0 < min(map(min, ours)) < 10
    contest.verify(base, same, same=True)
    turned = Kernel("turned", {**made.manifest, "rope": {**made.manifest["rope"], "theta": 100.0}}, made.source)
    with pytest.raises(Unfit, match="fidelity gate FAILED") as unfit:
        contest.verify(base, turned, same=False)
    assert unfit.value.outcome == WRONG
    fewer = Kernel("hangs", {**made.manifest, "blocks": made.manifest["blocks"] - 1}, made.source)
    with pytest.raises(Unfit) as unfit:
        contest.compare(base, fewer, 1, seed=0)
    assert unfit.value.outcome == HUNG
    contest.verify(base, same, same=True)


def test_a_short_search(tmp_path: Path) -> None:
    subject = Subject.of(MODEL, None, 1, ROWS, None, DEFAULT_ARCH, "cuda", "model")
    stand = Stand(subject, LENGTHS, processes=4)
    try:
        known = {**about(subject, LENGTHS), **stand.describe()}
        assert {"gpu", "sms", "driver", "sm_mhz", "memory_mhz", "nvcc", "megadsl"} <= known.keys()
        settings = Settings(Effort(8, 32, 0, False), budget_s=90)
        result = Search(stand, Log(tmp_path / "log", known), settings, time.monotonic).run()
    finally:
        stand.close()
    write_result(tmp_path / "best.schedule", tuned(subject, LENGTHS, result, known))
    assert result.trials > 0 and load(tmp_path / "best.schedule").head.machine == known["gpu"]
