"""One time for all SMs, from their own clocks and the one that they share.

A record carries the low word of its SM's cycle counter, which is fine but starts anywhere. Each role also leaves pairs of that
counter and of globaltimer, which all SMs share but which ticks coarsely: when it begins, at each layer, and when it ends. A straight
line through a block's pairs turns its cycles into time. The timer's ticks fall anywhere among the pairs, so that many pairs place
the line more finely than one tick; how far they lie from it is reported.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

WORD = 1 << 32


@dataclass(frozen=True)
class Line:
    """A block's clock: ns since the launch's first pair = ``begin_ns`` + ``ns_per_cycle`` * (cycles - ``cycles``)."""

    cycles: float
    begin_ns: float
    ns_per_cycle: float
    residual_ns: float  # the greatest distance of a pair from the line

    def us(self, cycles: Ints) -> Floats:
        return np.asarray((self.begin_ns + self.ns_per_cycle * (cycles - self.cycles)) / 1e3, np.float64)


@dataclass(frozen=True)
class Alignment:
    """How well the clocks agree. ``tick_ns``: the shared timer's resolution as seen; ``residual_ns``: the greatest distance of any
    pair from its block's line; ``rate_spread``: by how much the blocks' rates differ, relative."""

    tick_ns: float
    residual_ns: float
    rate_spread: float
    pairs_per_block: int


def unwrapped(low_words: npt.NDArray[np.uint32], near: int | None = None) -> Ints:
    """Cycles without their wraps at 2^32, which records in order of time allow: none is 2^31 cycles after the one before. The first
    is as near to ``near`` as it can be, so that two roles of one SM agree."""
    words = low_words.astype(np.int64)
    steps = (words[1:] - words[:-1]) % WORD
    first = int(words[0])
    if near is not None:
        first = near + ((first - near + WORD // 2) % WORD - WORD // 2)
    return first + np.concatenate([np.zeros(1, np.int64), np.cumsum(steps)])


def fit(cycles: Ints, times_ns: Ints, origin_ns: int) -> Line:
    """The straight line of least squares through one block's pairs."""
    t = (times_ns - origin_ns).astype(np.float64)
    middle = float(cycles.mean())
    c = cycles - middle
    variance = float((c * c).sum())
    rate = float((c * (t - t.mean())).sum()) / variance if variance else 1.0
    begin = float(t.mean())
    return Line(middle, begin, rate, float(np.abs(t - begin - rate * c).max()))


def judge(lines: list[Line], times_ns: list[Ints]) -> Alignment:
    """What the lines of all blocks say of the clocks."""
    distinct = np.unique(np.concatenate(times_ns))
    tick = float(np.gcd.reduce(np.diff(distinct))) if len(distinct) > 1 else 0.0
    rates = np.array([line.ns_per_cycle for line in lines])
    spread = float((rates.max() - rates.min()) / rates.mean())
    return Alignment(tick, max(line.residual_ns for line in lines), spread, min(len(t) for t in times_ns))
