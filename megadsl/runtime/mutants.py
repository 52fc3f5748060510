"""The mutation score of an emulated kernel: every way to spoil its synchronisation, and what notices it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from megadsl.build.host import DETECT
from megadsl.check.checker import check_plan
from megadsl.check.edits import with_rings
from megadsl.check.model import Device
from megadsl.check.ring import TILES_AT_ONCE
from megadsl.diagnostics import MegadslError
from megadsl.emit import emit
from megadsl.emulate import LaunchReport
from megadsl.emulate.abi import Point, PointRecord, Policy
from megadsl.emulate.equivalent import Facts, argument_for
from megadsl.emulate.explore import policy_of
from megadsl.emulate.mutants import Mutant, Place, mutants, places
from megadsl.emulate.pool import spread
from megadsl.ir.plan import Plan
from megadsl.lower.operands import vectors
from megadsl.resources import include
from megadsl.runtime.control import MegakernelHang
from megadsl.runtime.explore import Outcome, Subject

RECORDED_SEEDS = (0, 1, 4)  # all alike, a slow loader, a frozen block: waits that pass at once in one schedule do not in another
PATIENCE = 6  # a mutant's launch counts as hung after so many times the steps of the longest recorded one

ELSEWHERE_PATIENCE = 2  # there are more blocks elsewhere
KEPT_BUFFERS = ("control", "kv", "exchange", "logits")  # what a launch finds of those before it

DETECTOR, DEADLOCK, RESULT = "detector", "deadlock", "result"


@dataclass(frozen=True)
class Verdict:
    """``killed_by`` is detector, deadlock, result, or "" for a survivor; then ``argument`` says why it is equivalent, "" when
    nobody has said so. ``seed`` and ``blocks`` are the schedule and the grid that killed it; ``evidence`` the first lines of what
    was seen."""

    name: str
    killed_by: str
    seed: int | None
    blocks: int | None
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


class Setting:
    """One build of a kernel, for one grid, and its launches."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.arena = subject.weights()
        self.program = subject.program(self.arena, {DETECT: "1"})
        self.changes = 0  # mistakes made in the latest run

    @cached_property
    def reference(self) -> list[tuple[dict[str, torch.Tensor], Outcome]]:
        """What each launch finds and what it leaves behind without a mutant. One can so begin with any of them."""
        plain = self.subject.program(self.arena, {})
        self.subject.begin(plain)
        found = []
        for inputs in self.subject.inputs():
            before = {name: plain.buffers[name].clone() for name in KEPT_BUFFERS}
            found.append((before, self.subject.launch(plain, inputs)[0]))
        return found

    def points(self, seeds: Sequence[int], first: int = 0) -> tuple[tuple[Place, ...], int]:
        """The points that the launches from ``first`` on pass as they are, and the most steps of a launch."""
        program = self.program
        program.record_points = True
        found: dict[int, PointRecord] = {}
        steps = 0
        for seed in seeds:
            program.seed, program.policy = seed, policy_of(seed)
            for _, report in self._launches(range(first, len(self.reference))):
                found |= {point.key: point for point in report.points}
                steps = max(steps, report.steps)
        program.record_points = False
        assert program.emulator is not None
        return places(found.values(), program.emulator.path, self.subject.source, include()), steps

    def run(self, mutant: Mutant, seed: int, launches: range) -> tuple[str, str]:
        """What notices the mutant in some launches that follow each other, "" for nothing; and how."""
        program = self.program
        program.mutant, program.seed, program.policy = mutant, seed, policy_of(seed)
        self.changes = 0
        try:
            for index, (outcome, report) in zip(launches, self._launches(launches), strict=True):
                self.changes += report.changes
                if report.races:
                    return DETECTOR, str(report.races[0])
                if difference := outcome.difference(self.reference[index][1]):
                    return RESULT, f"launch {index}: {difference}"
        except MegakernelHang as hang:
            if program.report is not None and program.report.races:
                return DETECTOR, str(program.report.races[0])
            return DEADLOCK, str(hang.waits[0]) if hang.waits else "step limit"
        except MegadslError as fault:
            return DETECTOR, str(fault).splitlines()[0]
        finally:
            program.mutant = None
        return "", ""

    def _launches(self, launches: range) -> Iterator[tuple[Outcome, LaunchReport]]:
        for name, before in self.reference[launches.start][0].items():
            self.program.buffers[name].copy_(before)
        for inputs in self.subject.inputs()[launches.start : launches.stop]:
            yield self.subject.launch(self.program, inputs)


@dataclass(frozen=True)
class MutableSubject:
    """A subject whose calls are given a mutant. Calling it builds what a process needs once. ``elsewhere``: the same kernel for another
    grid and with other rings, where what nobody notices is tried as well."""

    subject: Subject
    seeds: tuple[int, ...]
    elsewhere: Subject | None = None

    def __call__(self) -> Judge:
        return Judge(self)


class Judge:
    """Runs mutants of one subject."""

    def __init__(self, made: MutableSubject) -> None:
        self.seeds = made.seeds
        self.home = Setting(made.subject)
        self._elsewhere = made.elsewhere

    @cached_property
    def elsewhere(self) -> Setting | None:
        return None if self._elsewhere is None else Setting(self._elsewhere)

    @cached_property
    def _twins(self) -> dict[tuple[object, ...], list[Place]]:
        assert self.elsewhere is not None
        found: dict[tuple[object, ...], list[Place]] = defaultdict(list)
        for place in self.elsewhere.points((0, 4), len(self.elsewhere.reference) - 1)[0]:
            found[_signature(place)].append(place)
        return found

    def judge(self, mutant: Mutant, argument: str = "", *, everywhere: bool = True) -> Verdict:
        """Run the mutant until something notices it. Where ``argument`` says why nothing should, the last launch puts that to the test, and
        so does the one elsewhere unless the argument holds ``everywhere``."""
        changes = 0
        for setting, tried, seed, launches in self._attempts(mutant, bool(argument), everywhere):
            killed_by, evidence = setting.run(tried, seed, launches)
            changes += setting.changes
            if killed_by:
                blocks = int(setting.subject.manifest["blocks"])
                return Verdict(str(mutant), killed_by, seed, blocks, evidence, "", max(changes, 1))
            if changes == 0 and mutant.place.kind is Point.INIT:
                break  # every schedule initialises alike; other points may be passed in the next one
        return Verdict(str(mutant), "", None, None, "", argument, changes)

    def _attempts(self, mutant: Mutant, argued: bool, everywhere: bool) -> Iterator[tuple[Setting, Mutant, int, range]]:
        """The last launch alone, which passes nearly all that others do, then all of them, the last one elsewhere, all under other
        seeds."""
        count, (seed, *seeds) = len(self.home.reference), self.seeds
        last, every = range(count - 1, count), range(count)
        yield self.home, mutant, seed, last
        if not argued:
            yield self.home, mutant, seed, every
        if self.elsewhere is not None and not (argued and everywhere):
            for twin in self._twins.get(_signature(mutant.place), []):
                yield self.elsewhere, Mutant(twin, mutant.change, mutant.step_limit * ELSEWHERE_PATIENCE), seed, last
        if not argued:
            for other in seeds:
                yield self.home, mutant, other, every


def _signature(place: Place) -> tuple[object, ...]:
    """What a point has in common in all builds of a kernel: the lines of the headers that lead to it."""
    lines = tuple((frame.file, frame.line) for frame in place.frames if frame.file != "kernel.cu")
    return place.kind, place.role, place.op, lines


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
    elsewhere: tuple[Mapping[str, Any], Plan] | None = None,
) -> tuple[Verdict, ...]:
    """What becomes of every mutant of the plan's kernel, with small rings, under ``seeds``.

    ``manifest`` is the compiler's, for a few blocks; ``elsewhere`` manifest and plan for another grid, whose rings stay as they are: what
    nobody notices is tried there, too, and so is what an argument explains that does not hold for that grid. ``progress`` is told how
    many of how many are judged. Raises MK362 without addr2line.
    """
    plan = small_rings(plan)
    order = sorted(seeds, key=lambda seed: policy_of(seed) is not Policy.LATE_COPIES)  # shows most, in half the steps of a slow loader
    other = None if elsewhere is None else Subject(dict(elsewhere[0]), emit(elsewhere[1]))
    made = MutableSubject(Subject(dict(manifest), emit(plan)), tuple(order), other)
    judge = made()
    found, steps = judge.home.points(RECORDED_SEEDS)
    facts = Facts(plan, found, include())
    others = facts if elsewhere is None else replace(facts, plan=elsewhere[1])
    todo = []
    for mutant in mutants(found, steps * PATIENCE):
        argument = argument_for(mutant, facts)
        todo.append((mutant, argument, not argument or argument_for(mutant, others) == argument))
    factory = made if processes > 1 else lambda: judge  # one process need not make another
    report = None if progress is None else lambda done: progress(done, len(todo))
    verdicts = spread(factory, _judge, todo, processes, report)
    return tuple(verdict for verdict in verdicts if verdict.possible)


def _judge(judge: Judge, item: tuple[Mutant, str, bool]) -> Verdict:
    mutant, argument, everywhere = item
    return judge.judge(mutant, argument, everywhere=everywhere)
