"""Coordinate descent over the knobs of a schedule, in rounds, with restarts, until the time is up.

A round tries the likeliest moves from one base, each by itself, so that their kernels are built side by side while others are measured. The
moves that won are then taken together if that is faster than the best of them, else one by one. Where no move wins any more, the
search starts again from a few random moves away and keeps what it finds if it beats the best.
"""

from __future__ import annotations

import random
import statistics
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megadsl.diagnostics import declare, error
from megadsl.dsl.overrides import Decision
from megadsl.tune.bench import FASTER, SAME, SLOWER, SPILLED, Bench, Built, Failed, Times
from megadsl.tune.decide import LEAST_GAIN, LEVEL, Gain, gain
from megadsl.tune.log import Log, Trial, percentiles
from megadsl.tune.space import Move, Point, moves, text_of

START_FAILED = declare("MK495", "the schedule to start from cannot be measured: {outcome}: {text}", "mend that schedule first")

WORSE = 0.01  # what lost by more is not tried again where the effort is small, nor taken for a restart
AGAIN = 0.1  # of its priority is left to what has lost before: what was never tried comes first
TRUST = 5.0  # microseconds of predictions after which what was seen of a knob counts as much as the model
DESCENT = 0.8  # of the budget, at most, goes to the first descent
TWINS = 3
AWAY = 3  # moves of a restart


@dataclass(frozen=True)
class Effort:
    """Pairs that look whether a candidate may be faster, pairs that prove it (fresh ones: the bound is not bent by the choice), restarts,
    and whether what has lost is tried again from every new base."""

    screen: int
    confirm: int
    restarts: int
    again: bool


EFFORTS = {"quick": Effort(8, 32, 1, False), "full": Effort(12, 80, 1000, True)}


@dataclass(frozen=True)
class Settings:
    """``round_size``: candidates that are built ahead; ``budget_s``: seconds after which nothing more is begun."""

    effort: Effort
    budget_s: float
    seed: int = 0
    round_size: int = 8
    level: float = LEVEL


@dataclass(frozen=True)
class Step:
    """Decisions that were taken together, and what they gained over what was there before."""

    decisions: tuple[Decision, ...]
    gain: Gain

    @property
    def text(self) -> str:
        return text_of(self.decisions)


@dataclass(frozen=True)
class Result:
    """``total`` is measured from ``start`` to ``best`` directly; None where there was no time, or nothing was gained. Gains below ``floor``
    were not taken: one kernel, loaded twice, differs by so much."""

    start: Built
    best: Built
    steps: tuple[Step, ...]
    total: Gain | None
    times: Times | None
    floor: float
    trials: int
    outcomes: Mapping[str, int]
    interrupted: bool

    @property
    def medians(self) -> list[tuple[float, float]]:
        """Milliseconds of a step from ``start`` and with ``best``, for each number of cached rows."""
        pairs = zip(self.times.base, self.times.candidate, strict=True) if self.times is not None else ()
        return [(statistics.median(base), statistics.median(best)) for base, best in pairs]


@dataclass
class State:
    """Where a search stands, for who watches it."""

    best: Built
    steps: list[Step] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    last: Trial | None = None
    left_s: float = 0.0

    @property
    def trials(self) -> int:
        return self.outcomes.total()

    @property
    def ms_text(self) -> str:
        """The median times of the best, by the last measurement against it."""
        return ", ".join(f"{ms:.4f}" for _, ms, _ in self.last.base_ms) + " ms" if self.last and self.last.base_ms else "?"


class _TimeIsUp(Exception):
    pass


class Search:
    """One search from ``Point()``. ``report`` is told after each candidate; ``clock`` gives seconds."""

    def __init__(
        self, bench: Bench, log: Log, settings: Settings, clock: Callable[[], float], report: Callable[[State], None] = lambda state: None
    ) -> None:
        self._bench, self._log, self._settings, self._clock, self._report = bench, log, settings, clock, report
        self._seen: dict[str, float | None] = {}  # move -> its last gain, none where it failed
        self._kernels: set[tuple[Point, str]] = set()  # that were measured against a base
        self._told: dict[str, list[float]] = {}  # knob -> microseconds that were predicted and seen

    def run(self) -> Result:
        """Search until the budget is used up, nothing is left to try, or Ctrl-C. Raises MK495 where there is nothing to start from."""
        began = self._clock()
        self._deadline = began + self._settings.budget_s
        self._until = began + DESCENT * self._settings.budget_s  # the rest is for leaving out what is idle
        start = self._bench.built(Point())
        if isinstance(start, Built):
            self._build_ahead(start, self._agenda(start)[: self._settings.round_size])  # while the measuring process makes ready
        unfit = start if isinstance(start, Failed) else self._calibrate(start)
        if unfit is not None:
            raise error(START_FAILED, outcome=unfit.outcome, text=unfit.text)
        assert isinstance(start, Built), "else it is unfit"
        self._state = State(start)
        interrupted, total, times = False, None, None
        try:
            self._all()
        except _TimeIsUp:
            pass
        except KeyboardInterrupt:
            interrupted = True
        best = self._state.best
        if best.point != start.point and not interrupted:
            found = self._bench.compare(start, best, self._settings.effort.confirm, self._settings.seed)
            if isinstance(found, Times):
                total, times = gain(found.logs, self._settings.level), found
        outcomes = dict(self._state.outcomes)
        return Result(start, best, tuple(self._state.steps), total, times, self._floor, self._state.trials, outcomes, interrupted)

    def _calibrate(self, start: Built) -> Failed | None:
        """How long a step takes, and what the same kernel differs by when it is loaded again: a gain has to be larger than that."""
        self._floor = LEAST_GAIN
        for number in range(TWINS):
            seed = self._settings.seed + number
            found = self._bench.compare(start, self._bench.twin(start, number), self._settings.effort.confirm, seed)
            if isinstance(found, Failed):
                return found
            self._step_us = 1e3 * statistics.fmean(map(statistics.median, found.base))
            self._floor = max(self._floor, abs(gain(found.logs, self._settings.level).median))
        return None

    def _all(self) -> None:
        try:
            self._descend(self._state.best, kept=True)
        except _TimeIsUp:
            self._until = self._deadline
            self._prune()
            return
        self._until = self._deadline
        self._prune()
        for number in range(self._settings.effort.restarts):
            away = self._away(random.Random(f"{self._settings.seed} {number}"))
            if away is None:
                return
            if self._better(self._descend(away, kept=False)):
                self._prune()

    def _prune(self) -> None:
        """Leave out the decisions that the best does as well without: what came along with others, and what others have made idle."""
        best = self._state.best
        without = [(d, Point(tuple(o for o in best.point.decisions if o != d))) for d in best.point.decisions]
        self._bench.build([p for _, p in without if self._log.find(str(best.point), str(p)) is None])
        idle = [d for d, point in without if self._as_good(best, point)]
        kept = tuple(d for d in best.point.decisions if d not in idle)
        if len(idle) > 1 and not self._drop(best, kept):
            for d in idle:
                self._drop(self._state.best, tuple(o for o in self._state.best.point.decisions if o != d))
        elif len(idle) == 1:
            self._drop(best, kept)

    def _as_good(self, best: Built, point: Point) -> bool:
        trial = self._trial(best, point, look=False)
        return trial.outcome == SAME or (trial.outcome in (SLOWER, FASTER) and trial.gain is not None and not trial.gain.disproved)

    def _drop(self, best: Built, kept: tuple[Decision, ...]) -> bool:
        """Go on with ``kept`` decisions alone if that is as good; whether it is."""
        found = self._bench.built(Point(kept))
        if not self._as_good(best, Point(kept)) or isinstance(found, Failed) or self._bench.verify(best, found) is not None:
            return False
        self._state.best = found
        steps = [replace(step, decisions=tuple(d for d in step.decisions if d in kept)) for step in self._state.steps]
        self._state.steps = [step for step in steps if step.decisions]
        return True

    def _better(self, found: Built) -> bool:
        """Whether what a restart has found is the best by now."""
        best = self._state.best
        if found.point == best.point:
            return False
        trial = self._trial(best, found.point)
        if trial.outcome == FASTER and trial.gain is not None:
            was = set(best.point.decisions)
            self._state.steps.append(Step(tuple(d for d in found.point.decisions if d not in was), trial.gain))
            self._state.best = found
        return self._state.best is found

    def _away(self, chance: random.Random) -> Built | None:
        """A few moves away from the best: of those that lost little. None where there are none."""
        best = self._state.best
        little = [m for m in moves(best.scene) if (self._seen.get(str(m)) or -1.0) > -WORSE]
        for _ in range(len(little)):
            chosen = chance.sample(little, min(AWAY, len(little)))
            found = self._bench.built(best.point.but(d for move in chosen for d in move.decisions))
            if isinstance(found, Built) and found.key != best.key:
                return found
        return None

    def _descend(self, base: Built, *, kept: bool) -> Built:
        """Follow the moves that win until none does; with ``kept``, each step is one of the result."""
        agenda = self._agenda(base)
        while agenda:
            tried, agenda = agenda[: self._settings.round_size], agenda[self._settings.round_size :]
            points = [base.point.but(move.decisions) for move in tried]
            won: list[tuple[Trial, Move]] = []
            try:
                for at, (move, point) in enumerate(zip(tried, points, strict=True)):
                    # where nothing has won yet, the next round will likely be from the same base
                    self._build_ahead(base, [*tried[at:], *(agenda[: self._settings.round_size] if not won else ())])
                    trial = self._trial(base, point)
                    self._learn(move, trial)
                    if trial.outcome == FASTER:
                        won.append((trial, move))
            except (_TimeIsUp, KeyboardInterrupt):  # what is proved is not lost
                if won:
                    trial, move = max(won, key=_gained)
                    self._taken(base, trial, move.decisions, kept=kept)
                raise
            if won:
                base = self._take(base, won, kept=kept)
                agenda = self._agenda(base)
        return base

    def _build_ahead(self, base: Built, next_moves: Sequence[Move]) -> None:
        points = [base.point.but(move.decisions) for move in next_moves]
        self._bench.build([p for p in points if self._log.find(str(base.point), str(p)) is None])

    def _agenda(self, base: Built) -> list[Move]:
        """What to try from ``base``, the likeliest first."""
        found = [m for m in moves(base.scene) if self._settings.effort.again or not self._hopeless(m)]
        return sorted(found, key=lambda m: (-self._priority(m), str(m)))

    def _hopeless(self, move: Move) -> bool:
        seen = self._seen.get(str(move), 0.0)
        return seen is None or seen < -WORSE

    def _priority(self, move: Move) -> float:
        """The model's effect, by how right it was about this knob; less for what was tried before."""
        told, seen = self._told.get(move.knob, (0.0, 0.0))
        again = AGAIN if str(move) in self._seen else 1.0
        return move.gain_us * (TRUST + seen) / (TRUST + told) * again if move.gain_us > 0 else move.gain_us

    def _learn(self, move: Move, trial: Trial) -> None:
        sound = trial.gain is not None and trial.outcome in (FASTER, SLOWER)
        found = trial.gain.median if sound and trial.gain is not None else None
        self._seen[str(move)] = 0.0 if trial.outcome == SAME else found
        if found is not None:
            totals = self._told.setdefault(move.knob, [0.0, 0.0])
            totals[0] += max(0.0, move.gain_us)
            totals[1] += max(0.0, found) * self._step_us

    def _take(self, base: Built, won: list[tuple[Trial, Move]], *, kept: bool) -> Built:
        """The winners together, or as many of them as help each other."""
        won.sort(key=_gained, reverse=True)
        (first, move), *others = won
        current = self._taken(base, first, move.decisions, kept=kept)
        decided = _subjects(move)
        rest: list[Move] = []
        for _, other in others:
            keys = _subjects(other)
            if not keys & decided:
                rest.append(other)
                decided |= keys
        if not rest:
            return current
        together = tuple(d for other in rest for d in other.decisions)
        singles = [other.decisions for other in rest] if len(rest) > 1 else []
        self._bench.build([current.point.but(decisions) for decisions in (together, *singles)])
        trial = self._trial(current, current.point.but(together))
        if trial.outcome == FASTER:
            return self._taken(current, trial, together, kept=kept)
        for decisions in singles:
            trial = self._trial(current, current.point.but(decisions))
            if trial.outcome == FASTER:
                current = self._taken(current, trial, decisions, kept=kept)
        return current

    def _taken(self, base: Built, trial: Trial, decisions: Sequence[Decision], *, kept: bool) -> Built:
        built = self._bench.built(base.point.but(decisions))
        assert isinstance(built, Built) and trial.gain is not None, "it has been measured"
        if kept:
            self._state.steps.append(Step(tuple(decisions), trial.gain))
            self._state.best = built
        return built

    def _trial(self, base: Built, point: Point, *, look: bool = True) -> Trial:
        """What comes of ``point`` against ``base``: from the log, or measured now; without ``look``, by as many pairs as prove a gain."""
        found = self._log.find(str(base.point), str(point))
        if found is None or (not look and found.gain is not None and found.gain.pairs < self._settings.effort.confirm):
            began = self._clock()
            if began > self._until:
                raise _TimeIsUp
            found = replace(self._measured(base, point, look=look), seconds=self._clock() - began)
            self._log.add(found)
        if found.kernel:
            self._kernels.add((base.point, found.kernel))
        self._state.outcomes[found.outcome] += 1
        self._state.last, self._state.left_s = found, max(0.0, self._deadline - self._clock())
        self._report(self._state)
        return found

    def _measured(self, base: Built, point: Point, *, look: bool) -> Trial:
        built = self._bench.built(point)
        if isinstance(built, Failed):
            return Trial(str(base.point), str(point), built.outcome, built.text, built.code)
        trial = Trial(str(base.point), str(point), SAME, kernel=built.key, registers=built.registers, spill_bytes=built.spill_bytes)
        if built.key == base.key or (look and (base.point, built.key) in self._kernels):
            return trial
        if built.spill_bytes > base.spill_bytes:
            return replace(trial, outcome=SPILLED)
        effort, found = self._settings.effort, None
        for pairs in (effort.screen, effort.confirm) if look else (effort.confirm,):
            seed = zlib.crc32(f"{self._settings.seed} {base.point} {point} {pairs}".encode())
            times = self._bench.compare(base, built, pairs, seed)
            if isinstance(times, Failed):
                return replace(trial, outcome=times.outcome, text=times.text, code=times.code)
            found = gain(times.logs, self._settings.level)
            trial = replace(trial, outcome=SLOWER, gain=found, ms=percentiles(times.candidate), base_ms=percentiles(times.base))
            if found.median <= 0:
                return trial
        if found is None or not found.proved or found.median < self._floor:
            return trial
        wrong = self._bench.verify(base, built)
        if wrong is not None:
            return replace(trial, outcome=wrong.outcome, text=wrong.text, code=wrong.code)
        return replace(trial, outcome=FASTER)


def _subjects(move: Move) -> set[tuple[object, ...]]:
    """What a move decides; two that decide the same cannot be taken together."""
    return {(d.record, d.field, d.subject) for d in move.decisions}


def _gained(won: tuple[Trial, Move]) -> float:
    return won[0].gain.median if won[0].gain is not None else 0.0
