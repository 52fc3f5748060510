"""One time for all SMs, from their own clocks and the one that they share.

A record carries the low word of its SM's cycle counter, which is fine but starts anywhere. Each role also leaves pairs of that
counter and of globaltimer, which all SMs share but which ticks coarsely: when it begins, at each layer, and when it ends. Between a
block's pairs cycles pass evenly; over a whole step they do not (on an H200 pairs lay up to 1.7 us off one straight line). How far
a pair lies from the line between its neighbours is reported.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

WORD = 1 << 32


@dataclass(frozen=True)
class Clock:
    """A block's clock: at ``cycles`` it was ``times_ns`` after the launch's first pair; straight between, at the mean rate outside."""

    cycles: Ints
    times_ns: Floats
    ns_per_cycle: float  # mean
    residual_ns: float  # the greatest distance of a pair from the line between its neighbours

    def us(self, cycles: Ints) -> Floats:
        inside = np.interp(cycles, self.cycles, self.times_ns)
        before, behind = np.minimum(cycles - self.cycles[0], 0), np.maximum(cycles - self.cycles[-1], 0)
        return np.asarray((inside + (before + behind) * self.ns_per_cycle) / 1e3, np.float64)


@dataclass(frozen=True)
class Alignment:
    """How well the clocks agree. ``tick_ns``: the shared timer's resolution as seen; ``residual_ns``: the greatest distance of any
    pair from the line between its neighbours; ``rate_spread``: by how much the blocks' rates differ, relative."""

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


def fit(cycles: Ints, times_ns: Ints, origin_ns: int) -> Clock:
    """The clock through one block's pairs, in any order. Its rate may change: an SM's does while it runs."""
    known, first = np.unique(cycles, return_index=True)
    times = (times_ns[first] - origin_ns).astype(np.float64)
    if len(known) < 2:
        return Clock(known, times, 1.0, 0.0)
    rate = float((times[-1] - times[0]) / (known[-1] - known[0]))
    weight = (known[1:-1] - known[:-2]) / (known[2:] - known[:-2])
    apart = np.abs(times[1:-1] - times[:-2] - weight * (times[2:] - times[:-2]))
    return Clock(known, times, rate, float(apart.max(initial=0.0)))


def judge(clocks: list[Clock], times_ns: list[Ints]) -> Alignment:
    """What the pairs of all blocks say of the clocks."""
    distinct = np.unique(np.concatenate(times_ns))
    tick = float(np.gcd.reduce(np.diff(distinct))) if len(distinct) > 1 else 0.0
    rates = np.array([clock.ns_per_cycle for clock in clocks])
    spread = float((rates.max() - rates.min()) / rates.mean())
    return Alignment(tick, max(clock.residual_ns for clock in clocks), spread, min(len(t) for t in times_ns))
