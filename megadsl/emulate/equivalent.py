"""Mutants of a kernel that nothing can notice, because they are no mistake; and why."""

from __future__ import annotations

from dataclasses import dataclass

from megadsl.emulate.abi import Change, Point
from megadsl.emulate.mutants import Mutant


@dataclass(frozen=True)
class Equivalent:
    """The change at points of this kind that ``function`` of the headers leads to."""

    kind: Point
    change: Change
    function: str
    argument: str


EQUIVALENT = (
    Equivalent(
        Point.PHASE,
        Change.DROP,
        "Loader::retire",
        "the window orders nothing: it bounds how much is in flight. A stage is filled again behind its own empty phase, and consumers wait"
        " for its full one",
    ),
    Equivalent(
        Point.PHASE,
        Change.DROP,
        "Loader::drain",
        "only a launch that was given up needs it: otherwise the consumers have waited for every copy, and shared memory outlives them",
    ),
    Equivalent(Point.SHARED, Change.DROP, "Block::meeting", "the word only chooses between two windows, which order nothing"),
    Equivalent(
        Point.LOAD,
        Change.NARROW,
        "may_run",
        "within a launch only one that gives up writes the word; earlier launches are ordered before by their stream",
    ),
    Equivalent(Point.LOAD, Change.NARROW, "finish_step", "only a launch that gives up writes the word, and its results do not count"),
)


def argument_for(mutant: Mutant) -> str:
    """Why ``mutant`` is no mistake, "" when nobody has said so."""
    place = mutant.place
    found = (e for e in EQUIVALENT if e.kind is place.kind and e.change is mutant.change and place.within(e.function))
    return next((e.argument for e in found), "")
