"""Generated kernels under the race detector: no race, no hang, and the same bits under every seed and policy."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import pytest

import megadsl as mk
from megadsl.build.host import DETECT
from megadsl.driver import compile_model
from megadsl.dsl.registry import load
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.resources import include
from tests.kernels import MAX_KV, Bench, Step, compiled, explored, judge, steps
from tests.schedules import VALUES
from tests.wires import watched

SEEDS = range(5)  # each policy once
SIZES = {1: [(0, 1), (17, 1)], 4: [(0, 4), (30, 3)]}


@pytest.mark.parametrize("tokens", [1, 4])
def test_no_schedule_of_a_tiny_model_shows_a_race(tokens: int) -> None:
    made = watched()["Tagged" if tokens == 1 else "mixed", tokens]
    some = steps(made, SIZES[tokens])
    bench = Bench(made, defines={DETECT: "1"})
    first = bench.play(some)
    judge(made, bench.weights, some, first)

    result = explored(bench, some, first, SEEDS)
    assert result.findings == ()
    assert result.launches == len(SEEDS) * len(some) and result.stale > 0


def change_header(monkeypatch: pytest.MonkeyPatch, folder: Path, header: str, old: str, new: str) -> None:
    """From here on kernels are built with ``old`` replaced once, at its last place in a header."""
    changed = folder / "include"
    shutil.copytree(include(), changed)
    path = changed / "megadsl" / header
    before, found, after = path.read_text().rpartition(old)
    assert found, f"{header} has no {old!r}"
    path.write_text(before + new + after)
    monkeypatch.setattr("megadsl.runtime.program.include", lambda: changed)


def test_a_lost_barrier_is_reported_in_the_words_of_the_spec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    change_header(monkeypatch, tmp_path, "embed.h", "block.sync();", "")
    kernel, config = load("llama-tiny")
    bench = Bench(compile_model(kernel, config=config, tokens=1, blocks=3, max_kv=MAX_KV), defines={DETECT: "1"})
    with suppress(AssertionError):  # what it computes is wrong as well
        bench.run(Step((5,), 17, 0))
    assert bench.program.report is not None
    for race in bench.program.report.races:
        assert {(side.role, side.op) for side in (race.now, race.before)} == {("consumer", "embed_tokens")}
        assert {side.frames[0].file for side in (race.now, race.before)} <= {"block.h", "exchange.h"}
        assert race.space == "shared" and race.diagnostic().span.file == "llama.py"
    assert bench.program.report.races


def test_a_weakened_release_gives_wrong_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    change_header(monkeypatch, tmp_path, "exchange.h", "st_release(", "st_relaxed<u32>(")

    def flags(s: ScheduleBlock) -> None:
        for op in VALUES:
            s[op].sync(mk.Flag(2))

    made = compiled("llama-tiny", tokens=1, blocks=3, configure=flags)
    bench = Bench(made, defines={DETECT: "1"})
    expected = bench.run(Step((5,), 17, 0))  # seed 0 always reads the newest values

    def same(seed: int) -> bool:
        bench.program.seed = seed
        bench.program.reset()
        try:
            return bench.run(Step((5,), 17, 0)).same(expected)
        except AssertionError:  # the logits are not even finite
            return False

    assert not all(same(seed) for seed in range(1, 4))
