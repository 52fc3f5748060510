"""Kernels against each other in the emulator: what is measured, and what is found wrong with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megadsl.diagnostics import MegadslError
from megadsl.driver import Compiled
from megadsl.runtime.contest import LOADED, Contest
from megadsl.runtime.contest_kinds import HUNG, REFUSED, WRONG, Kernel, Unfit
from tests.kernels import compiled
from tests.schedules import scaled_before

LENGTHS = (17, 20)
FACTOR = 1.5  # the worst of 32 tokens of a tiny model is luck


def kernel(made: Compiled, key: str, **changes: Any) -> Kernel:
    return Kernel(key, {**made.manifest, **changes}, made.source)


def made(**options: Any) -> Compiled:
    return compiled("llama-tiny", tokens=2, blocks=2, max_kv=96, **options)


@pytest.fixture(scope="module")
def base() -> Kernel:
    return kernel(made(), "base")


@pytest.fixture(scope="module")
def contest(base: Kernel) -> Contest:
    return Contest("cpu", made().graph, base, LENGTHS, FACTOR)


def test_pairs_are_timed_for_all_lengths(contest: Contest, base: Kernel) -> None:
    other = replace(base, key="other")
    ours, theirs = contest.compare(base, other, 3, seed=1)
    assert [len(row) for row in (*ours, *theirs)] == [3] * 4 and min(min(row) for row in (*ours, *theirs)) > 0


def test_one_arena_for_a_layout_and_few_kernels_at_a_time(contest: Contest, base: Kernel) -> None:
    for name in ("a", "b", "c", "d"):
        contest.compare(base, replace(base, key=name), 1, seed=0)
    runners = list(contest._runners.values())
    assert len(runners) == LOADED and len(contest._arenas) == 1
    for buffer in ("weights", "kv"):
        assert len({runner.program.buffers[buffer].data_ptr() for runner in runners}) == 1


def test_the_same_bits_and_others(contest: Contest, base: Kernel) -> None:
    """A scale in front of the products rounds otherwise: the gate judges it; where the bits have to be the same it is wrong."""
    windowed = kernel(made(configure=lambda s: s.ring("weights", window=16384)), "windowed")
    contest.verify(base, windowed, same=True)
    scaled = kernel(made(configure=scaled_before), "scaled")
    contest.verify(base, scaled, same=False)
    with pytest.raises(Unfit, match="bits differ that may not") as unfit:
        contest.verify(base, scaled, same=True)
    assert unfit.value.outcome == WRONG
    contest.verify(base, windowed, same=True)  # the cached rows are what they were


def test_a_wrong_result_fails_the_gate(contest: Contest, base: Kernel) -> None:
    rope = {**base.manifest["rope"], "theta": 100.0}
    with pytest.raises(Unfit, match="fidelity gate FAILED") as unfit:
        contest.verify(base, kernel(made(), "turned", rope=rope), same=False)
    assert unfit.value.outcome == WRONG


def test_a_batch() -> None:
    """Each sequence has cached rows of its own, which the references have too; another angle in one place is found."""
    options: dict[str, Any] = {"tokens": 4, "sequences": 2, "blocks": 3, "max_kv": 96}
    first, scaled = compiled("llama-tiny", **options), compiled("llama-tiny", **options, configure=scaled_before)
    contest = Contest("cpu", first.graph, kernel(first, "first"), LENGTHS, FACTOR)
    (one, _), (other, _) = (rows[0] for rows in contest._rows)
    assert len(contest._rows) == 2 and not one.equal(other)
    ours, theirs = contest.compare(kernel(first, "first"), kernel(scaled, "scaled"), 2, seed=1)
    assert [len(row) for row in (*ours, *theirs)] == [2] * 4
    contest.verify(kernel(first, "first"), kernel(scaled, "scaled"), same=False)
    turned = kernel(first, "turned", rope={**first.manifest["rope"], "theta": 100.0})
    with pytest.raises(Unfit, match="fidelity gate FAILED"):
        contest.verify(kernel(first, "first"), turned, same=False)
    with pytest.raises(MegadslError, match="3 tokens of 2 sequences"):
        Contest("cpu", replace(first.graph, tokens=3), kernel(first, "first"), LENGTHS)


def test_a_kernel_that_hangs_and_one_that_is_refused(contest: Contest, base: Kernel) -> None:
    with pytest.raises(Unfit, match="the megakernel hung") as unfit:
        contest.compare(base, kernel(made(), "hangs", blocks=1), 1, seed=0)
    assert unfit.value.outcome == HUNG
    with pytest.raises(Unfit) as refused:
        contest.compare(base, replace(base, key="broken", source="no C++"), 1, seed=0)
    assert (refused.value.outcome, refused.value.code) == (REFUSED, "MK312")
    contest.compare(base, replace(base, key="after"), 1, seed=0)
