"""The autotuner's search over a made-up landscape: what it finds, what it never takes, and what it keeps when it is stopped."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from landscape import NOISE, Landscape, scene

from megadsl.diagnostics import MegadslError
from megadsl.dsl.knobs import KNOBS
from megadsl.tune import space
from megadsl.tune.bench import FASTER, SLOWER, Failed
from megadsl.tune.decide import LEAST_GAIN, LEVEL, bound_index, gain
from megadsl.tune.knobs import FIXED, TURNS, near
from megadsl.tune.log import Log
from megadsl.tune.search import EFFORTS, Effort, Result, Search, Settings
from megadsl.tune.space import Point, moves

QUICK = EFFORTS["quick"]
BETTER = {
    "ring weights: meeting_window = 32 KiB": 0.97,
    "batch = 4": 0.99,
    "op o_proj: residual = block": 0.985,
    "op attention: split_kv = 8": 0.96,
    "op down_proj: registers = 2": 0.99,
}
WORSE = {"blocks = 132": 1.05, "role consumer: warps = 7": 1.04, "op qkv_proj: hint = evict_last": 1.02, "batch = 5": 1.01}
ABOUT = {"model": "made up", "seed": 0}


def search(bench: Landscape, log: Log | None = None, budget: float = 1e9, effort: Effort = QUICK, seed: int = 0) -> Result:
    ticks = count()
    settings = Settings(effort, budget, seed, round_size=8)
    return Search(bench, log or Log(None, ABOUT), settings, lambda: float(next(ticks))).run()


def test_it_finds_what_is_better_and_nothing_else() -> None:
    bench = Landscape(BETTER | WORSE)
    found = search(bench)
    assert str(found.best.point).split("; ") == sorted(BETTER, key=str(found.best.point).index), found.steps
    assert found.total is not None and found.total.proved and found.total.least > 0.08
    assert bench.asked, "candidates are built ahead"
    assert found.outcomes[FASTER] >= len(BETTER) and found.outcomes[SLOWER] > 50


@pytest.mark.parametrize("noise_seed", [1, 2])
def test_the_winner_does_not_depend_on_the_noise(noise_seed: int) -> None:
    quiet, noisy = (search(Landscape(BETTER | WORSE, noise_seed=seed)) for seed in (0, noise_seed))
    assert noisy.best.point == quiet.best.point


def test_one_percent_is_found_under_noise_and_drift() -> None:
    found = search(Landscape({"op gate_up_proj: l2 = 64 KiB": 0.99}, noise=NOISE, drift=2e-4))
    assert str(found.best.point) == "op gate_up_proj: l2 = 64 KiB"
    (step,) = found.steps
    assert step.gain.median == pytest.approx(0.01, abs=0.003) and 0 < step.gain.least < 0.01 and "99.99% confidence" in str(step.gain)


def test_nothing_is_taken_of_200_that_are_equal() -> None:
    chance = random.Random(5)
    for _ in range(200):
        logs = [chance.gauss(0, NOISE) - chance.gauss(0, NOISE) for _ in range(QUICK.confirm)]
        assert not gain(logs).proved


def test_the_bound_holds_as_often_as_it_says() -> None:
    """At a level that can be counted, for noise of another shape than the normal one: the bound is above the truth that often."""
    chance, level, trials = random.Random(1), 0.05, 600
    above = 0
    for _ in range(trials):
        logs = [0.01 + chance.choice((-1, 1)) * chance.expovariate(1 / NOISE) for _ in range(20)]
        above += gain(logs, level).least > 1 - 2.718281828**-0.01
    assert 0.02 < above / trials < 0.08


def test_what_loading_is_worth_is_no_gain() -> None:
    """Where one kernel differs from itself by half a percent, as much of a candidate says nothing."""
    factors = {"batch = 4": 0.997, "op o_proj: residual = block": 0.98}
    careful, trusting = (search(Landscape(factors, noise=1e-3, loading=loading)) for loading in (0.005, 0.0))
    assert careful.floor == pytest.approx(0.005, abs=1e-3) and str(careful.best.point) == "op o_proj: residual = block"
    assert trusting.floor == pytest.approx(LEAST_GAIN, abs=5e-4) and "batch = 4" in str(trusting.best.point)


def test_the_signed_rank_distribution() -> None:
    """Against all 2^n signs."""
    for pairs in (3, 8):
        sums = [sum(rank for rank in range(1, pairs + 1) if signs >> rank - 1 & 1) for signs in range(2**pairs)]
        for level in (0.5, 0.1, 0.05, 0.01, LEVEL):
            k = bound_index(pairs, level)
            assert sum(s < k for s in sums) <= level * 2**pairs < sum(s < k + 1 for s in sums)
    assert bound_index(8, LEVEL) == 0, "eight pairs prove nothing at that level"
    assert bound_index(QUICK.confirm, LEVEL) > 0


def test_a_gain_that_does_not_matter_is_none() -> None:
    small = gain([LEAST_GAIN / 2] * 40)
    assert small.least > 0 and not small.proved


def test_what_fails_is_logged_and_not_taken(tmp_path: Path) -> None:
    """Each of these would be faster than all else."""
    outcomes = {
        "batch = 2": Failed("refused", "not possible", "MK166"),
        "batch = 5": Failed("nvcc failed", "no", "MK302"),
        "batch = 1": Failed("hung", "no answer for 1 s"),
        "role consumer: warps = 10": Failed("crashed", "the measuring process died with 3"),
        "op attention: split_kv = 12": Failed("wrong", "4 logits"),
    }
    log = tmp_path / "log.jsonl"
    found = search(Landscape(BETTER | dict.fromkeys(outcomes, 0.5), failing=outcomes), Log(log, ABOUT))
    assert set(str(found.best.point).split("; ")) == set(BETTER)
    rows = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    for text, failed in outcomes.items():
        row = next(row for row in rows if text in row["point"].split("; ") and row["outcome"] == failed.outcome)
        assert (row["outcome"], row["text"], row.get("code", "")) == (failed.outcome, failed.text, failed.code)
        assert found.outcomes[failed.outcome] > 0
    taken = next(row for row in rows if row["outcome"] == FASTER)
    assert taken["gain"]["least"] > 0 and len(taken["ms"][0]) == 3 and taken["base_ms"][0][1] > taken["ms"][0][1]


def test_a_search_goes_on_from_its_log(tmp_path: Path) -> None:
    """Also where the log ends in the middle of a line; what is known is not measured again, and the outcome is the same."""
    whole = search(Landscape(BETTER | WORSE), Log(tmp_path / "whole", ABOUT))
    cut = tmp_path / "cut"
    text = (tmp_path / "whole").read_text()
    half = text[: len(text) // 2]
    cut.write_text(half)
    bench = Landscape(BETTER | WORSE, noise_seed=9)
    log = Log(cut, ABOUT)
    assert log.entries == half.count("\n") - 1
    again = search(bench, log)
    assert again.best.point == whole.best.point
    kept = {json.loads(line)["point"] for line in half.splitlines()[1:-1]}
    fresh = {json.loads(line)["point"] for line in cut.read_text().splitlines()[log.entries :]}
    assert kept and fresh and len(set(bench.measured)) < whole.trials
    finished = search(Landscape(BETTER | WORSE), Log(cut, ABOUT))
    assert finished.best.point == whole.best.point


def test_a_log_of_another_search_is_refused(tmp_path: Path) -> None:
    Log(tmp_path / "log", ABOUT)
    with pytest.raises(MegadslError) as other:
        Log(tmp_path / "log", {**ABOUT, "seed": 3})
    assert other.value.code == "MK493" and "seed was 0 and is 3" in str(other.value)
    (tmp_path / "log").write_text('{"model": "made up", "seed": 0}\n{"what": 1}\n')
    with pytest.raises(MegadslError) as broken:
        Log(tmp_path / "log", ABOUT)
    assert broken.value.code == "MK494" and "line 2" in str(broken.value)


def test_ctrl_c_keeps_the_best(tmp_path: Path) -> None:
    stop = {"op qkv_proj: smem = none": KeyboardInterrupt()}
    found = search(Landscape(BETTER, failing=stop), Log(tmp_path / "log", ABOUT))
    assert found.interrupted and found.steps and found.total is None
    assert len((tmp_path / "log").read_text().splitlines()) == 1 + found.trials


def test_the_budget_ends_it() -> None:
    """What is proved by then is taken, though its round is not over."""
    first = str(next(iter(sorted(moves(scene()), key=lambda m: (-m.gain_us, str(m))))))
    found = search(Landscape({first.split("; ")[0]: 0.9}), budget=10)
    assert 2 <= found.trials < 8 and not found.interrupted
    assert [step.text for step in found.steps] == [first] and found.total is not None and found.total.proved


def test_a_start_that_cannot_be_measured() -> None:
    class Broken(Landscape):
        def built(self, point: Point) -> Failed:
            return Failed("refused", "too many stages", "MK140")

    with pytest.raises(MegadslError) as failed:
        search(Broken({}))
    assert failed.value.code == "MK495" and "too many stages" in str(failed.value)


def test_moves_that_only_help_together_are_found_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart gets over a ridge that no single move crosses."""
    monkeypatch.setattr(space, "TURNS", [turn for turn in TURNS if turn.knob.name in ("residual", "batch", "meeting_window")])

    class Ridge(Landscape):
        def ms(self, point: Point) -> float:
            texts = set(self._texts(point))
            both = {"op o_proj: residual = block", "batch = 4"}
            return 0.5 if both <= texts else 0.6 * (1.001 if both & texts else 1.0)

    found = search(Ridge({}), effort=Effort(8, 20, 20, False))
    assert found.total is not None and found.total.least > 0.1


def test_every_knob_is_turned_or_its_reason_stands() -> None:
    """And whatever the model's schedule has is left by every move."""
    turned = {(turn.knob.of, turn.knob.name) for turn in TURNS}
    assert turned | set(FIXED) == {(knob.of, knob.name) for knob in KNOBS} and not turned & set(FIXED)
    tried = list(moves(scene()))
    assert len({str(move) for move in tried}) == len(tried) > 100
    tried += moves(replace(scene(), schedule=replace(scene().schedule, scope="layer", start="attention")))
    assert {d.field for move in tried for d in move.decisions} >= {t.knob.field for t in TURNS}


def test_the_likeliest_moves_come_first() -> None:
    """From a ring of two stages and flags, by the model alone."""
    poor = Landscape({}).built(Point(tuple(d for m in moves(scene()) if str(m) in POOR for d in m.decisions)))
    assert not isinstance(poor, Failed)
    best = sorted(moves(poor.scene), key=lambda m: -m.gain_us)
    assert best[0].knob == "sync" and all("sentinel" in part for part in str(best[0]).split("; "))
    assert all(m.gain_us < 0 for m in moves(scene()) if "flag" in str(m))


POOR = {f"op {op}: sync = flag(slots = 2)" for op in ("qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj")}


def test_near() -> None:
    assert near((1, 2, 4, 8), 2) == [1, 4, 8] and near((1, 2, 4, 8), 3, 1) == [2, 4] and near((1, 2), 8) == [2, 1]
