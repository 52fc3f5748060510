"""The timeline as Chrome's JSON, which Perfetto opens: a process per block, a track per role, arrows from signals to waits, counters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from megadsl.trace.activity import Activity, Execution, Loads, in_flight_bytes, occupancy
from megadsl.trace.handoffs import Handoff, handoffs
from megadsl.trace.records import Event, Timeline

Json = dict[str, Any]

INSIDE_US = 1e-3  # an arrow's ends lie this far inside their slices, where the viewer looks for them
STALLS = {Event.WINDOW: "window", Event.FULL: "ring full", Event.GATE: "gate"}


def shown(activities: Sequence[Activity], count: int) -> list[Activity]:
    """``count`` blocks spread over all of them, and the one that works longest, for which the others wait."""
    spread = np.linspace(0, len(activities) - 1, min(count, len(activities))).round().astype(int)
    busiest = max(range(len(activities)), key=lambda i: sum(r.work for r in activities[i].executions))
    return [activities[i] for i in sorted({*spread.tolist(), busiest})]


def trace_events(timeline: Timeline, activities: Sequence[Activity], count: int) -> Json:
    """The trace, as an object to write as JSON: times in us, all blocks on one axis; only :func:`shown` blocks are in it."""
    some = shown(activities, count)
    events: list[Json] = []
    for activity in some:
        events += _names(timeline, activity)
        events += [event for run in activity.executions for event in _execution(timeline, activity, run)]
        for loads in activity.loads:
            events += _loads(timeline, activity, loads)
            events += _counters(timeline, activity, loads)
    events += _arrows(timeline, handoffs(timeline.layout, activities), some)
    return {"displayTimeUnit": "ns", "traceEvents": events}


def _track(timeline: Timeline, activity: Activity, role: str) -> Json:
    names = [r["name"] for r in timeline.layout["roles"]]
    return {"pid": activity.block.number, "tid": names.index(role)}


def _names(timeline: Timeline, activity: Activity) -> Iterator[Json]:
    block = activity.block
    yield {"ph": "M", "name": "process_name", "pid": block.number, "args": {"name": f"SM {block.sm}, block {block.number}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": block.number, "args": {"sort_index": block.number}}
    for role in timeline.layout["roles"]:
        yield {"ph": "M", "name": "thread_name", **_track(timeline, activity, role["name"]), "args": {"name": role["name"]}}


def _slice(track: Json, name: str, category: str, begin: float, end: float, args: Mapping[str, object]) -> Json:
    ts = _ns(begin)
    return {"ph": "X", "name": name, "cat": category, **track, "ts": ts, "dur": max(0.0, _ns(_ns(end) - ts)), "args": dict(args)}


def _ns(us: float) -> float:
    """Whole nanoseconds, as us: what the viewer keeps, so that slices which touch do not overlap by a rounding."""
    return round(us, 3)


def _execution(timeline: Timeline, activity: Activity, run: Execution) -> Iterator[Json]:
    track = _track(timeline, activity, run.role)
    parts = {"gap us": run.gap, "wait us": run.wait, "exposed us": run.exposed, "work us": run.work}
    figures = {"layer": run.layer, **{name: _ns(us) for name, us in parts.items()}}
    yield _slice(track, run.phase, "op", run.began, run.end, figures)
    inner = [("wait", begin, end) for begin, end in run.waits] + [("tiles", begin, end) for begin, end, _ in run.tiles]
    for name, begin, end in sorted(inner, key=lambda i: i[1:]):
        yield _slice(track, name, name, begin, min(end, run.end), {"layer": run.layer})
    if run.sent is not None:
        yield _slice(_track(timeline, activity, str(timeline.finisher())), run.phase, "op", run.end, run.sent, {"layer": run.layer})
    if run.parts is not None:
        yield {"ph": "i", "s": "t", "name": "parts", **track, "ts": _ns(run.parts), "args": {"layer": run.layer}}


def _loads(timeline: Timeline, activity: Activity, loads: Loads) -> Iterator[Json]:
    """A slice per op and layer, its waits inside it, and each copy as an instant."""
    track = _track(timeline, activity, loads.role)
    issues = loads.issues
    done: list[tuple[str, int, float, float, Json]] = [(s.phase, s.layer, s.begin, s.end, _stall(track, s.event, s)) for s in loads.stalls]
    for phase, layer, time, size in zip(loads.phases, issues.layers, issues.times, issues.bytes, strict=True):
        args = {"op": phase, "layer": int(layer), "bytes": int(size)}
        instant = {"ph": "i", "s": "t", "name": "load", "cat": "load", **track, "ts": _ns(float(time)), "args": args}
        done.append((phase, int(layer), float(time), float(time), instant))
    done.sort(key=lambda d: (d[3], d[2]))
    for (phase, layer), group in groupby(done, key=lambda d: d[:2]):
        items = list(group)
        begin, end = min(d[2] for d in items), max(d[3] for d in items)
        yield _slice(track, phase, "loads", begin, end, {"layer": layer, "bytes": sum(d[4]["args"].get("bytes", 0) for d in items)})
        yield from (d[4] for d in items)


def _stall(track: Json, event: Event, stall: Any) -> Json:
    return _slice(track, STALLS[event], "stall", stall.begin, stall.end, {"op": stall.phase, "layer": stall.layer})


def _counters(timeline: Timeline, activity: Activity, loads: Loads) -> Iterator[Json]:
    pid = activity.block.number
    feeds = feeding(timeline, loads.role)
    for time, stages in occupancy(activity, loads, feeds):
        yield {"ph": "C", "name": f"ring of {loads.role}, stages", "pid": pid, "ts": _ns(time), "args": {"stages": round(stages, 2)}}
    flight = [(float(t), float(b)) for t, b in zip(loads.issues.times, in_flight_bytes(loads.issues), strict=True)]
    for time, size in sorted([*flight, *((begin, 0.0) for begin, _ in loads.idle)]):
        yield {"ph": "C", "name": f"in flight of {loads.role}, bytes", "pid": pid, "ts": _ns(time), "args": {"bytes": size}}


def feeding(timeline: Timeline, role: str) -> frozenset[str]:
    """The phases whose tiles come through a loader's ring."""
    return frozenset(str(p["name"]) for p in timeline.layout["phases"] if p["loader"] == role)


def _arrows(timeline: Timeline, found: Iterable[Handoff], some: Sequence[Activity]) -> Iterator[Json]:
    """From the last publication before a wait ended to the wait's end, among the blocks shown; the wait's arrow names the block that
    was the last of all."""
    numbers = np.array([a.block.number for a in some])
    by_number = {a.block.number: a for a in some}
    count = 0
    for handoff in found:
        if handoff.activity.block.number not in by_number:
            continue
        ready = handoff.waiter.waits[0][1]
        sources = handoff.sources
        before = np.flatnonzero(np.isin(sources.blocks, numbers) & (sources.ends <= ready))
        if not len(before):
            continue
        at = int(before[-1])
        source, run = by_number[int(sources.blocks[at])], sources.executions[at]
        last = int(sources.blocks[np.searchsorted(sources.ends, ready, side="right") - 1])
        leaves = _inside(run.began if run.sent is None else run.end, run.result)
        sender = run.role if run.sent is None else str(timeline.finisher())
        arrives = max(leaves, _inside(*handoff.waiter.waits[0]))
        for activity, role, time, kind in ((source, sender, leaves, "s"), (handoff.activity, handoff.waiter.role, arrives, "f")):
            track = _track(timeline, activity, role)
            arrow = {"ph": kind, "id": count, "name": handoff.value, "cat": "handoff", **track, "ts": time}
            args = {"round": handoff.round, "last of all": f"block {last}"}
            yield {**arrow, **({"bp": "e"} if kind == "f" else {}), "args": args}
        count += 1


def _inside(begin: float, end: float) -> float:
    """Just before the end of a slice, unless it is too short for that."""
    return _ns(_ns(end) - INSIDE_US) if end - begin > 2 * INSIDE_US else _ns(end)
