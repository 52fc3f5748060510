"""A build with MK_CHAOS: delays before signals and waits, chosen by a seed at run time, change schedules and never results."""

from __future__ import annotations

from megadsl.driver import Compiled
from tests.kernels import Bench, Result, Step, compiled, steps

DEFINES = {"MK_CHAOS": "1"}
SLOW_KINDS = 5  # mk::kSlowKinds: anybody, one block, the loaders, one warp, signals
SIZES = [(17, 2), (33, 1)]


def play(bench: Bench, some: list[Step], seed: int) -> tuple[list[Result], list[int]]:
    """The results of the steps under a seed, and a hash of each launch's schedule."""
    bench.program.reset()
    bench.program.control.set_chaos(seed)
    results, schedules = [], []
    for step in some:
        results.append(bench.run(step))
        assert bench.program.report is not None
        schedules.append(bench.program.report.fingerprint)
    return results, schedules


def kernel() -> Compiled:
    return compiled("llama-tiny", tokens=2, blocks=5)


def test_delays_change_the_schedule_and_no_result() -> None:
    made = kernel()
    some = steps(made, SIZES)
    quiet, delayed = Bench(made), Bench(made, defines=DEFINES)
    expected, schedules = play(quiet, some, 0)
    assert play(quiet, some, 3)[1] == schedules, "without MK_CHAOS a seed does nothing"
    results, without = play(delayed, some, 0)
    assert without == schedules and all(a.same(b) for a, b in zip(results, expected, strict=True)), "seed 0 delays nobody"
    seen = {tuple(schedules)}
    for seed in range(1, SLOW_KINDS + 2):
        results, found = play(delayed, some, seed)
        seen.add(tuple(found))
        assert all(a.same(b) for a, b in zip(results, expected, strict=True)), f"seed {seed}"
    assert len(seen) == SLOW_KINDS + 2, "each seed has a schedule of its own"
    assert play(delayed, some, 1)[1] == play(delayed, some, 1)[1], "a seed replays"


def test_delays_under_random_schedules() -> None:
    made = kernel()
    some = steps(made, SIZES)
    expected = Bench(made).play(some)
    delayed = Bench(made, defines=DEFINES)
    for seed in range(1, SLOW_KINDS + 1):
        delayed.program.seed = seed
        results, _ = play(delayed, some, seed)
        assert all(a.same(b) for a, b in zip(results, expected, strict=True)), f"seed {seed}"
