"""A made-up bench for the search: how long a step takes is a formula of its decisions, with noise by a seed; nothing is built."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from megadsl.diagnostics import Collector
from megadsl.driver import compile_model
from megadsl.dsl.apply import apply
from megadsl.dsl.overrides import Overrides
from megadsl.machine import DEFAULT_ARCH, machine
from megadsl.runtime.contest_kinds import Unfit
from megadsl.tune.bench import Built, Failed, Times
from megadsl.tune.effects import Scene
from megadsl.tune.space import Point, text_of

NOISE = 0.004
STEP_MS = 0.6


@cache
def scene() -> Scene:
    found = compile_model("llama-3.2-1b", check=False, schedule="model")
    return Scene(found.graph, found.schedule, machine(DEFAULT_ARCH))


@dataclass
class Landscape:
    """A Bench. ``factors``: what a decision, as a statement of a schedule file, multiplies the time by. ``failing``: what comes of a
    decision instead; an exception is raised when the candidate is measured."""

    factors: Mapping[str, float]
    failing: Mapping[str, Failed | BaseException] = field(default_factory=dict)
    noise_seed: int = 0
    noise: float = NOISE
    drift: float = 0.0
    measured: list[str] = field(default_factory=list)
    asked: int = 0
    loading: float = 0.0  # what a twin takes more
    twins: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.noise_seed)
        self._slow = 1.0

    def build(self, points: Sequence[Point]) -> None:
        self.asked += len(points)

    def built(self, point: Point) -> Built | Failed:
        for text in self._texts(point):
            failed = self.failing.get(text)
            if isinstance(failed, Failed) and failed.outcome in ("refused", "nvcc failed"):
                return failed
        base, found = scene(), Collector()
        schedule = apply(base.schedule, base.graph, Overrides(DEFAULT_ARCH, point.records), found)
        return Built(point, str(schedule), "", replace(base, schedule=schedule), None)

    def compare(self, base: Built, candidate: Built, pairs: int, seed: int) -> Times | Failed:
        self.measured.append(str(candidate.point))
        for text in self._texts(candidate.point):
            failed = self.failing.get(text)
            if isinstance(failed, BaseException):
                raise failed
            if isinstance(failed, Failed) and failed.outcome != "wrong":
                return failed
        rows: tuple[list[float], list[float]] = ([], [])
        takes = [self.ms(built.point) * (1 + self.loading * (built.kernel == "twin")) for built in (base, candidate)]
        for _ in range(pairs):
            self._slow *= 1 + self.drift
            for row, ms in zip(rows, takes, strict=True):
                row.append(ms * self._slow * math.exp(self._chance.gauss(0, self.noise)))
        return Times((tuple(rows[0]),), (tuple(rows[1]),))

    def twin(self, built: Built, number: int) -> Built:
        self.twins.append(number)
        return replace(built, kernel="twin") if self.loading else built

    def verify(self, base: Built, candidate: Built) -> Failed | None:
        for text in self._texts(candidate.point):
            failed = self.failing.get(text)
            if isinstance(failed, Failed) and failed.outcome == "wrong":
                return failed
        return None

    def describe(self) -> dict[str, object]:
        return {"gpu": "a formula"}

    def ms(self, point: Point) -> float:
        """Without noise."""
        return STEP_MS * math.prod(self.factors.get(text, 1.0) for text in self._texts(point))

    @staticmethod
    def _texts(point: Point) -> list[str]:
        return [text_of((d,)) for d in point.decisions]


@dataclass
class Tool:
    """What a Worker holds in tests: it answers, raises, dies or sleeps, as it is told."""

    name: str
    calls: int = 0

    def say(self, text: str) -> tuple[str, int]:
        self.calls += 1
        return f"{self.name}: {text}", self.calls

    def unfit(self) -> None:
        raise Unfit("wrong", "3 logits", "")

    def fail(self) -> None:
        raise ValueError("not mine to mend")

    def die(self) -> None:
        import os

        os._exit(3)

    def sleep(self) -> None:
        import time

        time.sleep(600)


def doubled(number: int) -> int:
    """What Builders build in tests."""
    return 2 * number


Clock = Callable[[], float]
