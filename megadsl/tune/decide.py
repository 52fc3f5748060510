"""When a candidate is taken for faster: a bound on its gain from paired measurements, which holds for any noise that is alike in both.

In each pair base and candidate are timed one right after the other, in an order that a seeded coin chooses. A pair's gain is the
logarithm of the quotient of their times. If both were equally fast, a pair's gain and its negative would be equally likely, whatever
the noise is like: that is all that Wilcoxon's signed-rank distribution needs. Its bound says: with probability ``1 - level`` the true
median gain is at least so much.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement

LEVEL = 1e-4  # of one decision: a search makes a few hundred
SLOW_LEVEL = 1e-3  # of the bound on the other side: a candidate that is surely slower
LEAST_GAIN = 1e-3  # less is what the place of a kernel's code and data is worth, which the next build changes


@dataclass(frozen=True)
class Gain:
    """Of a candidate over its base, as fractions of the base's time. ``median`` is Hodges and Lehmann's estimate, ``least`` its lower bound
    at ``level`` from ``pairs`` pairs, ``most`` the upper one at SLOW_LEVEL; infinite where so few pairs prove nothing."""

    median: float
    least: float
    most: float
    level: float
    pairs: int

    @property
    def proved(self) -> bool:
        """Whether the candidate is faster, by an amount that matters."""
        return self.least > 0 and self.median >= LEAST_GAIN

    @property
    def disproved(self) -> bool:
        """Whether the candidate is slower."""
        return self.most < 0

    def __str__(self) -> str:
        least = "nothing is proved" if math.isinf(self.least) else f"at least {self.least:+.2%} with {1 - self.level:.2%} confidence"
        return f"{self.median:+.2%} ({least}, {self.pairs} pairs)"


def gain(logs: Sequence[float], level: float = LEVEL) -> Gain:
    """Of at least one pair's log(base / candidate)."""
    walsh = sorted((a + b) / 2 for a, b in combinations_with_replacement(logs, 2))
    below, above = bound_index(len(logs), level), bound_index(len(logs), SLOW_LEVEL)
    least = -math.expm1(-walsh[below - 1]) if below else -math.inf
    most = -math.expm1(-walsh[-above]) if above else math.inf
    return Gain(-math.expm1(-statistics.median(walsh)), least, most, level, len(logs))


@cache
def bound_index(pairs: int, level: float) -> int:
    """The largest k with P(W < k) <= level, W the signed-rank sum of ``pairs`` fair coins: the k-th smallest of the pairwise means is the
    bound. 0: none is."""
    ways = [1]  # to reach each sum with the ranks so far
    for rank in range(1, pairs + 1):
        grown = [0] * (len(ways) + rank)
        for total, count in enumerate(ways):
            grown[total] += count
            grown[total + rank] += count
        ways = grown
    allowed, reached = level * 2**pairs, 0.0
    for k, count in enumerate(ways):
        reached += count
        if reached > allowed:
            return k
    return len(ways)
