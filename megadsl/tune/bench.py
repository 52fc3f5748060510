"""Where candidates are built and measured, as the search sees it: a GPU, the emulator, or a landscape that a test makes up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megadsl.tune.effects import Scene
from megadsl.tune.space import Point

NOT_BUILT, SPILLED = "nvcc failed", "spilled"
SAME, SLOWER, FASTER = "same kernel", "not faster", "faster"


@dataclass(frozen=True)
class Built:
    """A candidate that can be measured. ``key`` is equal for equal kernels; ``rounding`` for those with equal bits."""

    point: Point
    key: str
    rounding: str
    scene: Scene
    kernel: Any  # what the bench makes of it
    registers: int = 0
    spill_bytes: int = 0


@dataclass(frozen=True)
class Failed:
    """Why there is nothing to measure, or no trust in it. ``outcome``: NOT_BUILT, or as in
    runtime/contest_kinds.py; a diagnostic's code where it has one, the message."""

    outcome: str
    text: str
    code: str = ""


@dataclass(frozen=True)
class Times:
    """Milliseconds of base and candidate: for each number of cached rows, one per pair."""

    base: tuple[tuple[float, ...], ...]
    candidate: tuple[tuple[float, ...], ...]

    @property
    def logs(self) -> list[float]:
        """Per pair: log(base / candidate), the mean over the numbers of cached rows."""
        each = [[math.log(b / c) for b, c in zip(*row, strict=True)] for row in zip(self.base, self.candidate, strict=True)]
        return [sum(pair) / len(pair) for pair in zip(*each, strict=True)]


class Bench(Protocol):
    """Builds and measures. Nothing of it raises for what a candidate does; KeyboardInterrupt passes through."""

    def build(self, points: Sequence[Point]) -> None:
        """Begin to build these, side by side, in this order; those that wait from before are forgotten."""

    def built(self, point: Point) -> Built | Failed:
        """The candidate, built now unless it has been."""

    def compare(self, base: Built, candidate: Built, pairs: int, seed: int) -> Times | Failed:
        """Time both in ``pairs`` pairs, in an order by ``seed``."""

    def twin(self, built: Built, number: int) -> Built:
        """The same kernel, loaded once more: what it differs by is what loading is worth."""

    def verify(self, base: Built, candidate: Built) -> Failed | None:
        """Whether the candidate computes what the base does: the same bits where their ``rounding`` is equal, else as well as torch."""

    def describe(self) -> Mapping[str, object]:
        """The machine and the versions that times depend on."""
