"""Deliberate mistakes in a kernel's synchronisation, to see whether anything notices them.

Nobody lists the places: a launch of the race detector's build records every point where the kernel synchronises, with the calls
that led to it, and each kind of point can be spoilt in its own ways. Copies of a point that loops and inlining made are one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megadsl.emulate.abi import Change, Point, PointRecord
from megadsl.emulate.frames import Frame, frames_at, spec_of

CHANGES: dict[Point, tuple[Change, ...]] = {
    Point.WAIT: (Change.DROP,),
    Point.PHASE: (Change.DROP, Change.FLIP),
    Point.ARRIVE: (Change.DROP, Change.TWICE),
    Point.EXPECT: (Change.DROP, Change.HALVE, Change.MORE, Change.RELAX),
    Point.INIT: (Change.HALVE, Change.MORE),
    Point.BLOCK_BARRIER: (Change.DROP,),
    Point.WARP_BARRIER: (Change.DROP,),
    Point.FENCE: (Change.DROP,),
    Point.LOAD: (Change.NARROW,),
    Point.STORE: (Change.DROP, Change.NARROW),
    Point.ACQUIRE: (Change.RELAX, Change.NARROW),
    Point.RELEASE: (Change.DROP, Change.RELAX, Change.NARROW),
    Point.SHARED: (Change.DROP,),
    Point.POLL: (Change.DROP,),
    Point.FREE: (Change.DROP,),
    Point.EMPTY: (Change.DROP,),
    Point.ZERO_TRIP: (Change.DROP,),
    Point.SEND: (Change.DROP,),
    Point.CLUSTER: (Change.DROP,),
}

_WORDS: dict[tuple[Point, Change], str] = {
    (Point.WAIT, Change.DROP): "wait dropped",
    (Point.PHASE, Change.DROP): "wait for a phase dropped",
    (Point.PHASE, Change.FLIP): "parity flipped",
    (Point.ARRIVE, Change.DROP): "arrival dropped",
    (Point.ARRIVE, Change.TWICE): "arrival repeated",
    (Point.EXPECT, Change.DROP): "expect_tx dropped, its arrival too",
    (Point.EXPECT, Change.HALVE): "half the bytes expected",
    (Point.EXPECT, Change.MORE): "16 bytes more expected",
    (Point.EXPECT, Change.RELAX): "arrival that expects no bytes",
    (Point.INIT, Change.HALVE): "half the arrivals",
    (Point.INIT, Change.MORE): "one arrival more",
    (Point.BLOCK_BARRIER, Change.DROP): "block barrier dropped",
    (Point.WARP_BARRIER, Change.DROP): "warp barrier dropped",
    (Point.FENCE, Change.DROP): "fence dropped",
    (Point.LOAD, Change.NARROW): "relaxed load at block scope",
    (Point.STORE, Change.DROP): "relaxed store dropped",
    (Point.STORE, Change.NARROW): "relaxed store at block scope",
    (Point.ACQUIRE, Change.RELAX): "acquire made relaxed",
    (Point.ACQUIRE, Change.NARROW): "acquire at block scope",
    (Point.RELEASE, Change.DROP): "release dropped",
    (Point.RELEASE, Change.RELAX): "release made relaxed",
    (Point.RELEASE, Change.NARROW): "release at block scope",
    (Point.SHARED, Change.DROP): "store to a word of the block dropped",
    (Point.POLL, Change.DROP): "one vector fewer polled",
    (Point.FREE, Change.DROP): "slot let go of one step early",
    (Point.EMPTY, Change.DROP): "empty value sent as it is",
    (Point.ZERO_TRIP, Change.DROP): "path without work skipped",
    (Point.SEND, Change.DROP): "store to another block of the cluster dropped",
    (Point.CLUSTER, Change.DROP): "barrier of the cluster dropped",
}


@dataclass(frozen=True)
class Place:
    """A point of the emitted kernel. ``frames`` go from it outwards; ``text`` is its line of the header; ``keys`` are the
    records that it stands for; role, op and span are what kernel.cu says of it, "" where it says nothing."""

    kind: Point
    role: str
    op: str
    span: str
    frames: tuple[Frame, ...]
    text: str
    keys: tuple[int, ...]

    @property
    def where(self) -> str:
        """The lines of the headers that lead to it, innermost first."""
        calls = [f"{frame.function} {frame.file}:{frame.line}" for frame in self.frames if frame.file != "kernel.cu"]
        return " < ".join(calls) or f"kernel.cu:{self.frames[0].line}"

    def within(self, function: str) -> bool:
        """Whether a function of the headers, ``Class::name`` or ``name``, leads to it."""
        return any(frame.function.removeprefix("mk::") == function for frame in self.frames)


@dataclass(frozen=True)
class Mutant:
    """One change at one place. ``step_limit``: a launch of more steps counts as hung."""

    place: Place
    change: Change
    step_limit: int = 0

    @property
    def what(self) -> str:
        return _WORDS[self.place.kind, self.change]

    def __str__(self) -> str:
        at = f"{self.place.op or 'start of the kernel'}" + (f" ({self.place.role})" if self.place.role else "")
        return f"{self.what}: {self.place.where}, in {at}"


def places(records: Iterable[PointRecord], library: Path, text: str, headers: Path) -> tuple[Place, ...]:
    """The points that launches of ``library`` have recorded, in the order of kernel.cu.

    ``text`` is the kernel.cu that the library was made from, ``headers`` the folder of the headers it includes. Raises MK362
    without addr2line.
    """
    distinct = {record.key: record for record in records}
    frames = frames_at(library, sorted({pc for record in distinct.values() for pc in record.stack if pc}))
    source = text.splitlines()
    groups: dict[tuple[Point, tuple[Frame, ...]], list[int]] = defaultdict(list)
    for key, record in distinct.items():
        stack = tuple(frame for pc in record.stack if pc for frame in frames[pc])
        groups[Point(record.kind), stack].append(key)
    lines = {path.name: path.read_text().splitlines() for path in (headers / "megadsl").glob("*.h")} | {"kernel.cu": source}

    def line_of(stack: tuple[Frame, ...]) -> int:
        return next((frame.line for frame in stack if frame.file == "kernel.cu"), 0)

    def place(kind: Point, stack: tuple[Frame, ...], keys: Sequence[int]) -> Place:
        role, op, span = spec_of(source, line_of(stack))
        inner = stack[0]
        return Place(kind, role, op, span, stack, lines[inner.file][inner.line - 1].strip(), tuple(sorted(keys)))

    ordered = sorted(groups.items(), key=lambda group: (line_of(group[0][1]), group[0][1][0].file, group[0][1][0].line, group[0][0]))
    return tuple(place(kind, stack, keys) for (kind, stack), keys in ordered)


def mutants(of: Iterable[Place], step_limit: int) -> tuple[Mutant, ...]:
    """Every change at every place. A wait for an mbarrier is dropped once: where it polls. Words in shared memory are accessed at the
    scope of the block as they are."""
    return tuple(
        Mutant(place, change, step_limit)
        for place in of
        if not (place.kind is Point.WAIT and (place.within("wait_barrier") or place.within("Loader::wait_barrier")))
        for change in CHANGES[place.kind]
        if not (change is Change.NARROW and "_shared_" in place.text)
    )
