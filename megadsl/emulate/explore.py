"""Many schedules of one program: seeds, adversarial policies, several processes; every finding can be replayed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megadsl.emulate.abi import Policy
from megadsl.emulate.emulator import LaunchReport
from megadsl.emulate.pool import spread
from megadsl.emulate.races import Race

Run = Callable[[int, Policy], Iterable[LaunchReport]]
"""Launches something under a seed and a policy; its reports. What it raises (a fault, a hang, a wrong result) is a finding."""


@dataclass(frozen=True)
class Finding:
    """What one schedule showed: ``kind`` is "race", "hang" or the name of the exception; ``text`` says it in full.

    Running the same program under ``seed`` and ``policy`` shows it again.
    """

    seed: int
    policy: Policy
    kind: str
    text: str
    races: tuple[Race, ...] = ()


@dataclass(frozen=True)
class Exploration:
    """All findings, by seed. ``stale`` counts relaxed loads that were given an older value, over all schedules."""

    seeds: tuple[int, ...]
    findings: tuple[Finding, ...]
    launches: int
    stale: int
    seconds: float


def policy_of(seed: int) -> Policy:
    """The policy that goes with a seed: they take turns, and seed 0, the round robin, is EVEN."""
    return Policy(seed % len(Policy))


def explore(
    program_factory: Callable[[], Run], seeds: Sequence[int], processes: int = 1, progress: Callable[[int], None] | None = None
) -> Exploration:
    """Run what ``program_factory`` makes under each seed with :func:`policy_of` it.

    The factory is called once a process; with more than one it must be a function that pickle finds by name. ``progress`` is
    told how many seeds are done. Raises what the factory raises.
    """
    start = time.monotonic()
    outcomes = sorted(spread(program_factory, _explore_seed, seeds, processes, progress), key=lambda outcome: outcome.seed)
    return Exploration(
        seeds=tuple(seeds),
        findings=tuple(finding for outcome in outcomes for finding in outcome.findings),
        launches=sum(outcome.launches for outcome in outcomes),
        stale=sum(outcome.stale for outcome in outcomes),
        seconds=time.monotonic() - start,
    )


@dataclass(frozen=True)
class _Outcome:
    seed: int
    findings: tuple[Finding, ...]
    launches: int
    stale: int


def _explore_seed(run: Run, seed: int) -> _Outcome:
    policy = policy_of(seed)
    findings: list[Finding] = []
    launches = stale = 0
    try:
        for report in run(seed, policy):
            launches += 1
            stale += report.stale
            findings += _findings(report, seed, policy)
    except Exception as problem:
        findings.append(Finding(seed, policy, type(problem).__name__, str(problem)))
    return _Outcome(seed, tuple(findings), launches, stale)


def _findings(report: LaunchReport, seed: int, policy: Policy) -> list[Finding]:
    found = []
    if report.races:
        found.append(Finding(seed, policy, "race", "\n".join(map(str, report.races)), report.races))
    if report.hung:
        found.append(Finding(seed, policy, "hang", "\n".join(map(str, report.hangs))))
    return found
