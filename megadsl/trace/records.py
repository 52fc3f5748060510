"""The trace buffer of a launch as arrays, on one time axis. templates/include/megadsl/trace.h says what a record holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from megadsl.diagnostics import declare, error
from megadsl.trace.clocks import WORD, Floats, Ints, tick, unwrapped
from megadsl.trace.layout import RECORD_BYTES

TRACE_OFF = declare("MK460", "this kernel has left no timeline", "build it with the define MK_TRACE=1 and launch it before reading one")
TRACE_TORN = declare(
    "MK464", "the timeline is of several launches: epochs {epochs}", "read it when the launch has ended and before the next one begins"
)

Words = npt.NDArray[np.uint32]


class Event(IntEnum):
    """As mk::Event; WINDOW and FULL are read from a copy's record."""

    ENTER = 0
    LEAVE = 1
    ISSUE = 2
    GATE = 3
    RUN = 4
    OPEN = 5
    WAIT = 6
    READY = 7
    TILE = 8
    TAKEN = 9
    PARTS = 10
    END = 11
    WINDOW = 12
    FULL = 13


WAITS = (Event.WINDOW, Event.FULL, Event.GATE)
WAIT_UNIT, SHORT_WAIT = 16, 64  # ns, as in trace.h: a shorter wait is none
STAGES_WORD = 1 << 16  # of the count of stages only the low bits are recorded


@dataclass(frozen=True)
class Records:
    """What one role of one block left, in order of time; arrays of equal length. ``times`` in us since the launch began;
    ``values`` are stages taken or, of a loader's waits, microseconds; ``bytes`` and ``in_flight`` (stages) of issues."""

    events: Ints
    sites: Ints
    layers: Ints
    times: Floats
    values: Floats
    bytes: Ints
    in_flight: Ints

    def of(self, *events: Event) -> Records:
        """Those of some kinds."""
        keep = np.isin(self.events, events)
        return Records(*(getattr(self, name)[keep] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Block:
    """One block: the SM that it ran on, the records of each role by name, when its first role began and its last one ended (us)."""

    number: int
    sm: int
    roles: Mapping[str, Records]
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A launch. ``layout`` is the manifest's trace, ``lost`` the records that had no room, ``tick_ns`` the clock's resolution as seen."""

    layout: Mapping[str, Any]
    blocks: tuple[Block, ...]
    tick_ns: float
    lost: int
    epoch: int

    @property
    def step_us(self) -> float:
        """From the first block's begin to the last one's end."""
        return max(b.end for b in self.blocks) - min(b.begin for b in self.blocks)

    def loaders(self) -> list[str]:
        return [role["name"] for role in self.layout["roles"] if role["kind"] == "loader"]

    def consumer(self) -> str:
        return next(str(role["name"]) for role in self.layout["roles"] if role["kind"] == "consumer")

    def finisher(self) -> str | None:
        return next((str(role["name"]) for role in self.layout["roles"] if role["kind"] == "finisher"), None)


def read_timeline(manifest: Mapping[str, Any], raw: npt.NDArray[np.uint8]) -> Timeline:
    """The timeline of the last launch. ``raw`` is the trace buffer's bytes.

    MK460 when there is none, MK464 when the blocks speak of different launches.
    """
    layout = manifest["trace"]
    roles, room = len(layout["roles"]), layout["records"]
    if raw.size == 0 or not raw.any():
        raise error(TRACE_OFF)
    words = raw.view(np.uint32).reshape(manifest["blocks"], roles, 2 + room, RECORD_BYTES // 4)
    headers = words[:, :, 0, :].astype(np.int64)
    epochs = sorted({int(e) for e in headers[:, :, 2].flat})
    if len(epochs) > 1:
        raise error(TRACE_TORN, epochs=", ".join(map(str, epochs)))
    counts = np.minimum(headers[:, :, 0], room)
    feeds = {site: str(phase["loader"]) for phase in layout["phases"] for site in phase["sites"]}
    left = [[_left(words[b, r, 1:], int(counts[b, r])) for r in range(roles)] for b in range(len(words))]
    near = int(words[0, 0, 1, 0])
    times = [[unwrapped(marks[:, 0], near) for marks, _ in of] for of in left]
    begin = min(int(of[0]) for role in times for of in role)
    told = [[_told(*of, t, feeds) for of, t in zip(left[b], times[b], strict=True)] for b in range(len(words))]
    blocks = tuple(_block(layout, b, int(headers[b, 0, 1]), told[b], begin) for b in range(len(words)))
    lost = int((headers[:, :, 0] - counts).sum())
    return Timeline(layout, blocks, tick(np.concatenate([of for role in times for of in role])), lost, epochs[0])


def _left(slots: Words, count: int) -> tuple[Words, Words]:
    """The records in the first ``count`` slots, and of each the slot behind it, which is the second one of a RUN or OPEN."""
    at, i = [], 0
    events = slots[:, 1] & 15
    while i < count:
        at.append(i)
        i += 2 if events[i] in (Event.RUN, Event.OPEN) else 1
    return slots[at], slots[np.minimum(np.array(at, np.int64) + 1, len(slots) - 1)]


@dataclass
class _Told:
    """Rows of a role's Records, times and waits still in ns."""

    feeds: Mapping[int, str]
    rows: list[tuple[int, int, int, int, int, int, int]] = field(default_factory=list)
    taken: dict[str, int] = field(default_factory=dict)

    def issue(self, site: int, layer: int, high: int, at: int, size: int, waits: int) -> None:
        full, window = (waits >> 16) * WAIT_UNIT, (waits & 0xFFFF) * WAIT_UNIT
        for event, end, waited in ((Event.WINDOW, at - full, window), (Event.FULL, at, full)):
            if waited >= SHORT_WAIT:
                self.rows.append((event, site, layer, end, waited, 0, 0))
        self.rows.append((Event.ISSUE, site, layer, at, 0, size * 16, high))

    def run(self, event: int, site: int, layer: int, at: int, stages: int, moments: Sequence[int]) -> None:
        """``moments``: low words of WAIT to PARTS, 0 for what has not come; only those behind a WAIT mean something."""
        for kind, moment in zip((Event.WAIT, Event.READY, Event.TILE, Event.TAKEN, Event.PARTS), moments, strict=True):
            if moment and moments[0]:
                value = self._stages(site, stages) if kind is Event.TAKEN else 0
                self.rows.append((kind, site, layer, at - (at - moment) % WORD, value, 0, 0))
        if event == Event.RUN:
            self.rows.append((Event.END, site, layer, at, 0, 0, 0))

    def _stages(self, site: int, low: int) -> int:
        ring = self.feeds[site]
        before = self.taken.get(ring, 0)
        self.taken[ring] = before + (low - before) % STAGES_WORD
        return self.taken[ring]


def _told(records: Words, behind: Words, times: Ints, feeds: Mapping[int, str]) -> _Told:
    """What a role's records say, event by event."""
    told = _Told(feeds)
    for at, (_, y, z, w), moments in zip(times.tolist(), records.tolist(), behind.tolist(), strict=True):
        event, site, size, layer = y & 15, y >> 4 & 0xFFF, y >> 16, z & 0xFFFF
        if event == Event.ISSUE:
            told.issue(site, layer, z >> 16, at, size, w)
        elif event in (Event.RUN, Event.OPEN):
            told.run(event, site, layer, at, size, (w, *moments))
        else:
            told.rows.append((event, site, layer, at, w, 0, 0))
    return told


def _block(layout: Mapping[str, Any], number: int, sm: int, roles: list[_Told], begin: int) -> Block:
    found = {}
    for role, told in zip(layout["roles"], roles, strict=True):
        events, sites, layers, at, values, sizes, flights = (np.array(column, np.int64) for column in zip(*told.rows, strict=True))
        of = values.astype(np.float64)
        of[np.isin(events, WAITS)] /= 1e3
        found[role["name"]] = Records(events, sites, layers, (at - begin) / 1e3, of, sizes, flights)
    times = [r.times for r in found.values()]
    return Block(number, sm, found, min(float(t[0]) for t in times), max(float(t[-1]) for t in times))
