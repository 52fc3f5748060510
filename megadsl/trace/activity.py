"""From records to what happened: each execution of an op in a block, each wait of its loaders, each copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from megadsl.trace.clocks import Floats
from megadsl.trace.records import Block, Event, Records, Timeline

Interval = tuple[float, float]


@dataclass
class Execution:
    """One op's phase in one layer of one block, times in us. It follows ``previous`` (the end of the phase before), begins to wait at
    ``began``, and ``end`` is when its result was on its way; where another warp finishes, when that one had all products, and ``sent`` when
    its result was on its way. ``waits`` are for other blocks; ``tiles`` reach from the first tile's
    landing to the last one's use, batch by batch, with the stages taken from the ring so far."""

    role: str
    phase: str
    layer: int
    previous: float
    began: float
    end: float
    waits: list[Interval] = field(default_factory=list)
    tiles: list[tuple[float, float, int]] = field(default_factory=list)
    parts: float | None = None
    exposed: float = 0.0
    sent: float | None = None

    @property
    def result(self) -> float:
        """When its result was on its way."""
        return self.end if self.sent is None else self.sent

    @property
    def gap(self) -> float:
        """From the phase before to this one's first record."""
        return self.began - self.previous

    @property
    def wait(self) -> float:
        return sum(end - begin for begin, end in self.waits)

    @property
    def work(self) -> float:
        return self.result - self.began - self.wait

    @property
    def first_tile(self) -> float:
        """From the input's being there to the first tile's: what the ring made it wait."""
        return max(0.0, self.tiles[0][0] - self.waits[0][1]) if self.tiles and self.waits else 0.0


@dataclass(frozen=True)
class Stall:
    """A wait of a loader: for bytes in flight (WINDOW), a free stage (FULL) or an op (GATE)."""

    event: Event
    phase: str
    layer: int
    begin: float
    end: float


@dataclass(frozen=True)
class Loads:
    """What one loader of a block did. ``issues`` are its ISSUE records; ``phases`` names their ops."""

    role: str
    stages: int
    issues: Records
    phases: Sequence[str]
    stalls: tuple[Stall, ...]
    idle: tuple[Interval, ...]


@dataclass(frozen=True)
class Activity:
    """A block: its executions in order, its loaders, and when none of them has anything in flight; when its loaders issue their first
    copy (where they have none: when the block ends), and when its consumers have done their last work."""

    block: Block
    executions: tuple[Execution, ...]
    loads: tuple[Loads, ...]
    idle: tuple[Interval, ...]
    last_result: float

    @property
    def first_load(self) -> float:
        return min([float(loads.issues.times[0]) for loads in self.loads if len(loads.issues.times)], default=self.block.end)


def activities(timeline: Timeline, bytes_per_us: float) -> list[Activity]:
    """What every block did. ``bytes_per_us`` is the whole machine's bandwidth: a block's share of it says how long the bytes that
    are in flight still keep HBM busy for a loader that may issue no more."""
    names = {site: str(phase["name"]) for phase in timeline.layout["phases"] for site in phase["sites"]}
    share = bytes_per_us / len(timeline.blocks)
    found = []
    for block in timeline.blocks:
        loads = tuple(_loads(timeline.layout, block, role, names, share) for role in timeline.loaders())
        executions = tuple(_all_executions(timeline, block, names))
        idle = loads[0].idle if loads else ()
        for other in loads[1:]:
            idle = tuple(_common(idle, other.idle))
        for run in executions:
            run.exposed = sum(end - begin for begin, end in _common(run.waits, idle))
        own = block.roles[timeline.consumer()]
        done = own.times[np.isin(own.events, (Event.ENTER, Event.LEAVE), invert=True)]
        found.append(Activity(block, executions, loads, idle, float(done.max(initial=block.begin))))
    return found


def _all_executions(timeline: Timeline, block: Block, names: Mapping[int, str]) -> list[Execution]:
    """The consumers' executions and, where a warp of its own finishes, what it made of theirs, and its own: they follow nothing."""
    found = list(_executions(block, timeline.consumer(), names))
    if (finisher := timeline.finisher()) is None:
        return found
    begun = {(run.phase, run.layer): run for run in found}
    for run in _executions(block, finisher, names):
        if (run.phase, run.layer) in begun:
            other = begun[run.phase, run.layer]
            other.end, other.sent = min(other.end, run.end), run.end  # the one that met may take its time to say so
        else:
            run.previous = run.began
            found.append(run)
    return sorted(found, key=lambda run: run.began)


def _executions(block: Block, role: str, names: Mapping[int, str]) -> Iterator[Execution]:
    """Records of one phase and layer that follow each other are one execution."""
    records = block.roles[role]
    own = records.of(*(e for e in Event if e not in (Event.ENTER, Event.LEAVE)))
    keys = [(names[int(site)], int(layer)) for site, layer in zip(own.sites, own.layers, strict=True)]
    firsts = [i for i, key in enumerate(keys) if i == 0 or key != keys[i - 1]]
    end = block.begin
    for first, last in pairwise([*firsts, len(keys)]):
        after = float(own.times[last]) if last < len(keys) else block.end
        run = _execution(role, *keys[first], end, after, own, range(first, last))
        end = run.end
        yield run


def _execution(role: str, phase: str, layer: int, previous: float, after: float, own: Records, which: range) -> Execution:
    """A phase begins at its first record, unless that is its end: then where the phase before ended. Without an end it lasts until
    ``after``. A WAIT without a READY is of a block that publishes and need not wait."""
    begins_blind = own.events[which[0]] == Event.END
    run = Execution(role, phase, layer, previous, previous if begins_blind else float(own.times[which[0]]), after)
    asked = tile = run.began
    for i in which:
        time = float(own.times[i])
        match own.events[i]:
            case Event.WAIT:
                asked = time
            case Event.READY:
                run.waits.append((asked, time))
            case Event.TILE:
                tile = time
            case Event.TAKEN:
                run.tiles.append((tile, time, int(own.values[i])))
            case Event.PARTS:
                run.parts = time
            case Event.END:
                run.end = time
    return run


def _loads(layout: Mapping[str, Any], block: Block, role: str, names: Mapping[int, str], share: float) -> Loads:
    records = block.roles[role]
    issues = records.of(Event.ISSUE)
    waits = records.of(Event.WINDOW, Event.FULL, Event.GATE)
    stalls = tuple(
        Stall(Event(int(event)), names[int(site)], int(layer), float(time - value), float(time))
        for event, site, layer, time, value in zip(waits.events, waits.sites, waits.layers, waits.times, waits.values, strict=True)
    )
    stages = next(int(r["stages"]) for r in layout["roles"] if r["name"] == role)
    return Loads(role, stages, issues, [names[int(s)] for s in issues.sites], stalls, tuple(_idle(block, issues, stalls, share)))


def _idle(block: Block, issues: Records, stalls: Sequence[Stall], share: float) -> Iterator[Interval]:
    """When a loader has nothing in flight: before its first copy, while it may issue none, after its last one; each time but for as
    long as what is in flight needs to land."""
    times = issues.times
    if not len(times):
        yield block.begin, block.end
        return
    yield block.begin, float(times[0])
    landing = in_flight_bytes(issues) / share
    for stall in stalls:
        last = int(np.searchsorted(times, stall.begin, side="right")) - 1
        if stall.event is Event.WINDOW or last < 0:  # what comes before the first copy is idle already
            continue
        lands = float(times[last] + landing[last])
        if max(stall.begin, lands) < stall.end:
            yield max(stall.begin, lands), stall.end
    yield min(block.end, float(times[-1] + landing[-1])), block.end


def in_flight_bytes(issues: Records) -> Floats:
    """At each issue, the bytes of the copies that the loader has not seen land."""
    total = np.concatenate([np.zeros(1), np.cumsum(issues.bytes)])
    at = np.arange(1, len(issues.times) + 1)
    return np.asarray(total[at] - total[np.maximum(at - issues.in_flight, 0)], np.float64)


def occupancy(activity: Activity, loads: Loads, feeds: frozenset[str]) -> list[tuple[float, float]]:
    """(us, stages) of a loader's ring at each issue and each batch's end: issued, and not yet let go of. Inside a batch, which lets
    go of stages one after the other, it is interpolated. ``feeds`` are the phases that take from this ring."""
    batches = [tile for run in activity.executions if run.phase in feeds for tile in run.tiles]
    times, taken = [activity.block.begin], [0.0]
    for begin, end, stages in batches:
        times += [begin, end]
        taken += [taken[-1], float(stages)]
    issued = loads.issues.times
    at = np.unique(np.concatenate([issued, np.array(times)]))
    held = np.searchsorted(issued, at, side="right") - np.interp(at, times, taken)
    return [(float(t), float(h)) for t, h in zip(at, np.clip(held, 0, loads.stages), strict=True)]


def _common(a: Sequence[Interval], b: Sequence[Interval]) -> Iterator[Interval]:
    """Where both lists of intervals, each in order, are."""
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            yield begin, end
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
