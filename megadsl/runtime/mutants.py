"""The mutation score of an emulated kernel: every way to spoil its synchronisation, and what notices it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from megadsl.build.host import DETECT
from megadsl.check import check_plan
from megadsl.check.edits import with_rings
from megadsl.check.model import Device
from megadsl.check.ring import TILES_AT_ONCE
from megadsl.diagnostics import MegadslError
from megadsl.emit import emit
from megadsl.emulate.abi import Point, PointRecord, Policy
from megadsl.emulate.equivalent import Facts, argument_for
from megadsl.emulate.explore import policy_of
from megadsl.emulate.mutants import Mutant, mutants, places
from megadsl.emulate.pool import spread
from megadsl.ir.plan import Plan
from megadsl.lower.operands import vectors
from megadsl.resources import include
from megadsl.runtime.control import MegakernelHang
from megadsl.runtime.explore import Outcome, Subject

RECORDED_SEEDS = (0, 1, 4)  # all alike, a slow loader, a frozen block: waits that pass at once in one schedule do not in another
ARGUED_LAUNCHES = 2  # an empty cache, and one of several chunks
PATIENCE = 6  # a mutant's launch counts as hung after so many times the steps of the longest recorded one

DETECTOR, DEADLOCK, RESULT = "detector", "deadlock", "result"


@dataclass(frozen=True)
class Verdict:
    """``killed_by`` is detector, deadlock, result, or "" for a survivor; then ``argument`` says why it is equivalent, "" when
    nobody has said so. ``seed`` is the schedule that killed it; ``evidence`` the first lines of what was seen."""

    name: str
    killed_by: str
    seed: int | None
    evidence: str
    argument: str
    changes: int

    @property
    def survived(self) -> bool:
        return not self.killed_by and not self.argument

    @property
    def possible(self) -> bool:
        """Whether the mistake can be made at all: half of one arrival is one."""
        return self.changes > 0


@dataclass(frozen=True)
class MutableSubject:
    """A subject whose calls are given a mutant. Calling it builds what a process needs once."""

    subject: Subject
    seeds: tuple[int, ...]

    def __call__(self) -> Judge:
        return Judge(self)


class Judge:
    """Runs mutants of one subject."""

    def __init__(self, made: MutableSubject) -> None:
        self.subject, self.seeds = made.subject, made.seeds
        self.arena = self.subject.weights()
        self.program = self.subject.program(self.arena, {DETECT: "1"})
        self.changes = 0  # mistakes made by the mutant that is being judged

    @cached_property
    def expected(self) -> list[Outcome]:
        """What the launches leave behind without a mutant; who only records points does not need it."""
        return [outcome for outcome, _ in self.subject.launches(self.subject.program(self.arena, {}))]

    def points(self) -> tuple[list[PointRecord], int]:
        """The points that the kernel passes as it is, under each policy, and the most steps of a launch."""
        self.program.record_points = True
        found: dict[int, PointRecord] = {}
        steps = 0
        for seed in RECORDED_SEEDS:
            self.program.seed, self.program.policy = seed, policy_of(seed)
            for _, report in self.subject.launches(self.program):
                found |= {point.key: point for point in report.points}
                steps = max(steps, report.steps)
        self.program.record_points = False
        return list(found.values()), steps

    def judge(self, mutant: Mutant, argument: str = "") -> Verdict:
        """Run the mutant under each seed until something notices it. Where ``argument`` says why nothing should, two launches under
        the first seed put that to the test."""
        self.program.mutant = mutant
        self.changes = 0
        try:
            for seed in self.seeds[:1] if argument else self.seeds:
                killed_by, evidence = self._run(seed, ARGUED_LAUNCHES if argument else None)
                if killed_by:
                    return Verdict(str(mutant), killed_by, seed, evidence, "", max(self.changes, 1))
                if self.changes == 0 and mutant.place.kind is Point.INIT:
                    break  # every schedule initialises alike; other points may be passed in the next one
        finally:
            self.program.mutant = None
        return Verdict(str(mutant), "", None, "", argument, self.changes)

    def _run(self, seed: int, launches: int | None) -> tuple[str, str]:
        program = self.program
        program.seed, program.policy = seed, policy_of(seed)
        try:
            for step, (outcome, report) in enumerate(islice(self.subject.launches(program), launches)):
                self.changes += report.changes
                if report.races:
                    return DETECTOR, str(report.races[0])
                if difference := outcome.difference(self.expected[step]):
                    return RESULT, f"launch {step}: {difference}"
        except MegakernelHang as hang:
            if program.report is not None and program.report.races:
                return DETECTOR, str(program.report.races[0])
            return DEADLOCK, str(hang.waits[0]) if hang.waits else "step limit"
        except MegadslError as fault:
            return DETECTOR, str(fault).splitlines()[0]
        return "", ""


def small_rings(plan: Plan) -> Plan:
    """The plan with as few stages a ring as let an op take its vectors and its first tiles without any being filled anew.

    Where a ring holds all that an op streams, nobody waits for a stage that the op lets go of, and mistakes there go unnoticed. Where
    it holds less than an op takes at once, warps wait for each other at its stages, and mistakes of barriers go unnoticed.
    """
    device = Device(plan)
    at_once = (device.held(op.name) + len(vectors(op)) for op in device.ops[0])
    made = with_rings(plan, max(TILES_AT_ONCE + 1, *at_once))
    return plan if check_plan(made).findings else made


def score(
    manifest: Mapping[str, Any],
    plan: Plan,
    seeds: Sequence[int],
    processes: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Verdict, ...]:
    """What becomes of every mutant of the plan's kernel, with small rings, under ``seeds``.

    ``manifest`` is the compiler's, for a few blocks. ``progress`` is told how many of how many are judged. Raises MK362 without
    addr2line.
    """
    plan = small_rings(plan)
    order = sorted(seeds, key=lambda seed: policy_of(seed) is not Policy.LATE_COPIES)  # shows most, in half the steps of a slow loader
    made = MutableSubject(Subject(dict(manifest), emit(plan)), tuple(order))
    judge = made()
    records, steps = judge.points()
    assert judge.program.emulator is not None
    found = places(records, judge.program.emulator.path, made.subject.source, include())
    facts = Facts(plan, found, include())
    todo = [(mutant, argument_for(mutant, facts)) for mutant in mutants(found, steps * PATIENCE)]
    factory = made if processes > 1 else lambda: judge  # one process need not make another
    report = None if progress is None else lambda done: progress(done, len(todo))
    verdicts = spread(factory, _judge, todo, processes, report)
    return tuple(verdict for verdict in verdicts if verdict.possible)


def _judge(judge: Judge, item: tuple[Mutant, str]) -> Verdict:
    return judge.judge(*item)
