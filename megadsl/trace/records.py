"""The trace buffer of a launch as arrays, on one time axis. templates/include/megadsl/trace.h says what a record holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from megadsl.diagnostics import declare, error
from megadsl.trace.clocks import Alignment, Clock, Floats, Ints, fit, judge, unwrapped
from megadsl.trace.layout import RECORD_BYTES

TRACE_OFF = declare("MK460", "this kernel has left no timeline", "build it with the define MK_TRACE=1 and launch it before reading one")
TRACE_TORN = declare(
    "MK464", "the timeline is of several launches: epochs {epochs}", "read it when the launch has ended and before the next one begins"
)

Words = npt.NDArray[np.uint32]


class Event(IntEnum):
    """As mk::Event."""

    CLOCK = 0
    ISSUE = 1
    WINDOW = 2
    FULL = 3
    GATE = 4
    WAIT = 5
    READY = 6
    TILE = 7
    TAKEN = 8
    PARTS = 9
    END = 10


@dataclass(frozen=True)
class Records:
    """What one role of one block left, in order of time; arrays of equal length. ``times`` in us since the launch began;
    ``values`` are tiles, stages taken or, of a loader's waits, microseconds; ``bytes`` and ``in_flight`` (stages) of issues."""

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
    """A launch. ``layout`` is the manifest's trace, ``lost`` the records that had no room, ``alignment`` how well clocks agree."""

    layout: Mapping[str, Any]
    blocks: tuple[Block, ...]
    alignment: Alignment
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


def read_timeline(manifest: Mapping[str, Any], raw: npt.NDArray[np.uint8]) -> Timeline:
    """The timeline of the last launch. ``raw`` is the trace buffer's bytes.

    MK460 when there is none, MK464 when the blocks speak of different launches.
    """
    layout = manifest["trace"]
    roles, room = len(layout["roles"]), layout["records"]
    if raw.size == 0 or not raw.any():
        raise error(TRACE_OFF)
    words = raw.view(np.uint32).reshape(manifest["blocks"], roles, 1 + room, RECORD_BYTES // 4)
    headers = words[:, :, 0, :].astype(np.int64)
    epochs = sorted({int(e) for e in headers[:, :, 2].flat})
    if len(epochs) > 1:
        raise error(TRACE_TORN, epochs=", ".join(map(str, epochs)))
    counts = np.minimum(headers[:, :, 0], room)
    taken = [[words[b, r, 1 : 1 + counts[b, r]] for r in range(roles)] for b in range(len(words))]
    cycles = [_cycles(of) for of in taken]
    pairs = [_pairs(of, c) for of, c in zip(taken, cycles, strict=True)]
    origin = min(int(times.min()) for _, times in pairs)
    clocks = [fit(c, t, origin) for c, t in pairs]
    begin = min(float(clock.us(role[:1])[0]) for clock, c in zip(clocks, cycles, strict=True) for role in c)
    blocks = tuple(_block(layout, b, int(headers[b, 0, 1]), taken[b], cycles[b], clocks[b], begin) for b in range(len(words)))
    lost = int((headers[:, :, 0] - counts).sum())
    return Timeline(layout, blocks, judge(clocks, [t for _, t in pairs]), lost, epochs[0])


def _cycles(roles: list[Words]) -> list[Ints]:
    """The clocks of a block's roles, on one axis."""
    found: list[Ints] = []
    for records in roles:
        found.append(unwrapped(records[:, 0], int(found[0][0]) if found else None))
    return found


def _pairs(roles: list[Words], cycles: list[Ints]) -> tuple[Ints, Ints]:
    """(cycles, ns of globaltimer) of a block's CLOCK records."""
    at, times = [], []
    for records, c in zip(roles, cycles, strict=True):
        clock = (records[:, 1] & 15) == Event.CLOCK
        at.append(c[clock])
        times.append(records[clock, 2].astype(np.int64) | records[clock, 3].astype(np.int64) << 32)
    return np.concatenate(at), np.concatenate(times)


def _block(layout: Mapping[str, Any], number: int, sm: int, roles: list[Words], cycles: list[Ints], clock: Clock, begin: float) -> Block:
    found = {}
    for role, words, c in zip(layout["roles"], roles, cycles, strict=True):
        y, z = words[:, 1].astype(np.int64), words[:, 2].astype(np.int64)
        events = y & 15
        values = words[:, 3].astype(np.float64)
        values[np.isin(events, (Event.WINDOW, Event.FULL, Event.GATE))] *= clock.ns_per_cycle / 1e3
        found[role["name"]] = Records(events, y >> 4 & 0xFFF, z & 0xFFFF, clock.us(c) - begin, values, (y >> 16) * 16, z >> 16)
    times = [r.times for r in found.values()]
    return Block(number, sm, found, min(float(t[0]) for t in times), max(float(t[-1]) for t in times))
