"""Which bit patterns an exchange carries, per element type, and what Sentinel does about the one that it cannot.

Sentinel's empty value is all ones. A type may travel so if its all-ones pattern is a NaN that is some other pattern too: the
writer then sends that one in its place, the pattern with a clear sign bit, and carries every other pattern bit for bit
(wires.h: Sentinel::safe, safe_f32). A type whose all-ones pattern is a number, or that has no NaN, would lose a value.
Tagged and Flag have no empty value.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Nans(Enum):
    """Which patterns of a floating-point format are NaN."""

    IEEE = "ieee"  # an exponent of all ones with any mantissa but 0
    LAST = "last"  # exponent and mantissa of all ones, alone
    NONE = "none"


@dataclass(frozen=True)
class Payload:
    """An element type as bits: one of sign if ``signed``, then ``exponent`` and ``mantissa``."""

    exponent: int
    mantissa: int
    nans: Nans
    signed: bool = True

    @property
    def bits(self) -> int:
        return self.signed + self.exponent + self.mantissa

    @property
    def empty(self) -> int:
        """The pattern that Sentinel keeps for "not yet"."""
        return (1 << self.bits) - 1

    def is_nan(self, pattern: int) -> bool:
        magnitude = pattern & ((1 << (self.exponent + self.mantissa)) - 1)
        if self.nans is Nans.IEEE:
            return magnitude > ((1 << self.exponent) - 1) << self.mantissa
        return self.nans is Nans.LAST and magnitude == (1 << (self.exponent + self.mantissa)) - 1

    @property
    def canonical(self) -> int | None:
        """What a writer sends in place of ``empty``: the same NaN without its sign. None: Sentinel cannot carry the type."""
        return self.empty >> 1 if self.signed and self.is_nan(self.empty) else None

    def sent(self, pattern: int) -> int:
        """What arrives by Sentinel for a pattern that was written. Only for types with a ``canonical`` pattern."""
        assert self.canonical is not None
        return self.canonical if pattern == self.empty else pattern


PAYLOADS = {
    "bf16": Payload(8, 7, Nans.IEEE),
    "f16": Payload(5, 10, Nans.IEEE),
    "f32": Payload(8, 23, Nans.IEEE),
    "e4m3": Payload(4, 3, Nans.LAST),
    "e5m2": Payload(5, 2, Nans.IEEE),
    "e2m1": Payload(2, 1, Nans.NONE),
}


def carried_by_sentinel(dtype: str) -> bool:
    """Whether no writer of ``dtype`` can produce Sentinel's empty value. False for integers and types without a rule here."""
    payload = PAYLOADS.get(dtype)
    return payload is not None and payload.canonical is not None
