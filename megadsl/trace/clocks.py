"""The time of a record: the low word of globaltimer, one clock in ns for all SMs.

An SM's own cycle counter is finer, but no common time comes of it: its rate changes under load (docs/tracing.md).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

WORD = 1 << 32


def unwrapped(low_words: npt.NDArray[np.uint32], near: int) -> Ints:
    """Times (ns) without their wraps at 2^32, which records in order of time allow: none is 2^32 ns after the one before. The first is
    as near to ``near`` as it can be, so that all roles and blocks agree."""
    words = low_words.astype(np.int64)
    steps = (words[1:] - words[:-1]) % WORD
    first = near + ((int(words[0]) - near + WORD // 2) % WORD - WORD // 2)
    return first + np.concatenate([np.zeros(1, np.int64), np.cumsum(steps)])


def tick(times: Ints) -> float:
    """By how much the clock goes on when it does (ns): the greatest step that all of ``times`` (ns, in any order) lie on."""
    return float(np.gcd.reduce(np.diff(np.unique(times)), initial=0))
