"""Who waited for whom: the publication that each wait of the timeline lasted for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megadsl.trace.activity import Activity, Execution
from megadsl.trace.clocks import Floats, Ints


@dataclass(frozen=True)
class Handoff:
    """One wait and what it waited for: round ``round`` of ``value``, counted from the launch's first. ``sources`` are the executions
    that published it and their blocks, the last one last; a ``whole`` wait needs all of them."""

    value: str
    round: int
    whole: bool
    waiter: Execution
    activity: Activity
    sources: Sources

    @property
    def latency(self) -> float:
        """From the last publication that can have ended the wait to the wait's end, in us. A gather of a part may have ended before
        others published."""
        ready = self.waiter.waits[0][1]
        ends = self.sources.ends
        if self.whole:
            return float(ready - ends[-1])
        before = np.searchsorted(ends, ready, side="right")
        return float(ready - ends[before - 1]) if before else float("nan")


@dataclass(frozen=True)
class Sources:
    """Those that published one round of a value, in order of time (us)."""

    ends: Floats
    blocks: Ints
    executions: tuple[Execution, ...]

    def of(self, blocks: Sequence[int]) -> Sources:
        """Some blocks' of them."""
        keep = np.flatnonzero(np.isin(self.blocks, blocks))
        return Sources(self.ends[keep], self.blocks[keep], tuple(self.executions[i] for i in keep))


def handoffs(layout: Mapping[str, Any], activities: Sequence[Activity]) -> Iterator[Handoff]:
    """Every wait of every block with its publications; a wait that the timeline has lost the signals of has none and is left out."""
    published = _published(layout, activities)
    waits: dict[str, list[Mapping[str, Any]]] = {}
    for wait in layout["waits"]:
        waits.setdefault(wait["phase"], []).append(wait)
    for activity in activities:
        for run in activity.executions:
            for wait in waits.get(run.phase, ()):
                key = (wait["value"], wait["round"] + wait["slope"] * run.layer)
                sources = published.get(key)
                if sources is not None and (polled := wait["polled"]):
                    sources = sources.of(polled[activity.block.number % len(polled)])
                if run.waits and sources is not None and len(sources.ends):
                    yield Handoff(*key, wait["whole"], run, activity, sources)


def _published(layout: Mapping[str, Any], activities: Sequence[Activity]) -> dict[tuple[str, int], Sources]:
    signals = {signal["phase"]: signal for signal in layout["signals"]}
    found: dict[tuple[str, int], list[tuple[float, int, Execution]]] = {}
    for activity in activities:
        for run in activity.executions:
            if (signal := signals.get(run.phase)) is not None:
                key = (str(signal["value"]), signal["round"] + signal["slope"] * run.layer)
                found.setdefault(key, []).append((run.result, activity.block.number, run))
    result = {}
    for key, ends in found.items():
        ends.sort(key=lambda e: e[:2])
        times, blocks, runs = zip(*ends, strict=True)
        result[key] = Sources(np.array(times), np.array(blocks), tuple(runs))
    return result
