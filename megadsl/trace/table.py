"""The timeline as numbers: per op, per layer, and how far the clock can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from megadsl.trace.activity import Activity, Execution
from megadsl.trace.handoffs import handoffs
from megadsl.trace.records import Timeline


@dataclass(frozen=True)
class Spread:
    """Median and deciles over blocks, in us; a block's own value is its mean over layers."""

    median: float
    p10: float
    p90: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(*(float(q) for q in np.quantile(values, (0.5, 0.1, 0.9))))


@dataclass(frozen=True)
class OpRow:
    """One phase of one op; ``times`` per step. gap: since the phase before; wait: for other blocks; exposed: that part of it in which
    nothing of the block's was in flight; first_tile: from then to the first tile; work: all but the wait. ``share`` of the step."""

    phase: str
    span: str
    times: int
    blocks: int
    share: float
    gap: Spread
    wait: Spread
    exposed: Spread
    first_tile: Spread
    work: Spread


@dataclass(frozen=True)
class LayerRow:
    """What was loaded from the median block's first record of a layer to that of the next: ``busy`` is its bytes over what the
    machine's bandwidth could have carried. ``layer`` is None for what comes before and behind the layers."""

    layer: int | None
    begin_us: float
    us: float
    bytes: int
    busy: float


@dataclass(frozen=True)
class Summary:
    """``first_load``: from the first block's begin to a block's first copy; ``exit``: from a block's last result to its end.
    ``handoff_us``: from the last publication to the end of a wait that needs it, least and median; one below a tick of the clock
    (``tick_ns``) before 0 would mean that SMs disagree. ``exposed_us``: of a block's step, the median over blocks."""

    step_us: float
    exposed_us: float
    hidden_us: float
    first_load: Spread
    exit: Spread
    ops: tuple[OpRow, ...]
    layers: tuple[LayerRow, ...]
    handoff_us: tuple[float, float]
    lost: int
    tick_ns: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


_PARTS = ("gap", "wait", "exposed", "first_tile", "work")


def summarise(timeline: Timeline, activities: Sequence[Activity], bytes_per_us: float) -> Summary:
    """All tables of one launch."""
    latencies = [h.latency for h in handoffs(timeline.layout, activities) if h.whole]
    per_block = [(sum(r.exposed for r in a.executions), sum(r.wait for r in a.executions)) for a in activities]
    exposed = float(np.median([e for e, _ in per_block]))
    return Summary(
        step_us=timeline.step_us,
        exposed_us=exposed,
        hidden_us=float(np.median([w - e for e, w in per_block])),
        first_load=Spread.of([a.first_load for a in activities]),
        exit=Spread.of([a.block.end - a.last_result for a in activities]),
        ops=tuple(_op_rows(timeline, activities)),
        layers=tuple(_layer_rows(timeline, activities, bytes_per_us)),
        handoff_us=(min(latencies), float(np.median(latencies))) if latencies else (0.0, 0.0),
        lost=timeline.lost,
        tick_ns=timeline.tick_ns,
    )


def _op_rows(timeline: Timeline, activities: Sequence[Activity]) -> list[OpRow]:
    total = sum(r.end - r.previous for a in activities for r in a.executions)
    found = []
    for phase in timeline.layout["phases"]:
        runs = [mine for a in activities if (mine := [r for r in a.executions if r.phase == phase["name"]])]
        if not runs:
            continue
        spreads = [Spread.of([float(np.mean([getattr(r, part) for r in mine])) for mine in runs]) for part in _PARTS]
        spent = sum(r.end - r.previous for mine in runs for r in mine)
        found.append(OpRow(phase["name"], phase["span"], max(map(len, runs)), len(runs), spent / (total or 1.0), *spreads))
    return found


def _layer_rows(timeline: Timeline, activities: Sequence[Activity], bytes_per_us: float) -> list[LayerRow]:
    looped = {p["name"] for p in timeline.layout["phases"] if p["looped"]}
    begins: dict[int, list[float]] = {}
    behind: list[float] = []
    for activity in activities:
        inside = [r for r in activity.executions if r.phase in looped]
        for layer, run in _first_of_layers(inside).items():
            begins.setdefault(layer, []).append(run.began)
        if inside:
            behind.append(inside[-1].end)
    edges = [
        0.0,
        *(float(np.median(begins[layer])) for layer in sorted(begins)),
        *([float(np.median(behind))] if behind else []),
        timeline.step_us,
    ]
    names: list[int | None] = [None, *sorted(begins), *([None] if behind else [])]
    times = np.concatenate([load.issues.times for a in activities for load in a.loads])
    sizes = np.concatenate([load.issues.bytes for a in activities for load in a.loads])
    carried, _ = np.histogram(times, bins=np.maximum.accumulate(edges), weights=sizes)
    rows = zip(names, pairwise(edges), carried, strict=True)
    return [LayerRow(n, b, e - b, int(c), float(c) / ((e - b) * bytes_per_us) if e > b else 0.0) for n, (b, e), c in rows]


def _first_of_layers(executions: Sequence[Execution]) -> dict[int, Execution]:
    found: dict[int, Execution] = {}
    for run in executions:
        found.setdefault(run.layer, run)
    return found


def render(summary: Summary) -> str:
    """The tables as plain text."""
    wide = max([len(row.phase) for row in summary.ops] + [5])
    lines = [
        f"{'op':<{wide}}  {'times':>5} {'blocks':>6}  {'gap us (p10-p90)':>22}  {'wait us (p10-p90)':>22}  {'exposed us (p10-p90)':>22}"
        f"  {'first tile us (p10-p90)':>23}  {'work us (p10-p90)':>22}  {'share':>6}  spec"
    ]
    for row in summary.ops:
        spreads = [_spread(getattr(row, part)) for part in _PARTS]
        lines.append(
            f"{row.phase:<{wide}}  {row.times:>5} {row.blocks:>6}  {spreads[0]:>22}  {spreads[1]:>22}  {spreads[2]:>22}"
            f"  {spreads[3]:>23}  {spreads[4]:>22}  {row.share:>6.1%}  {row.span}".rstrip()
        )
    lines += ["", f"step {summary.step_us:.2f} us; a block waits {summary.exposed_us:.2f} us exposed and {summary.hidden_us:.2f} us hidden"]
    lines += [f"begin of the launch to a block's first load: {_spread(summary.first_load)} us"]
    lines += [f"a block's last result to its end: {_spread(summary.exit)} us"]
    lines += ["", f"{'layer':>6}  {'us':>9}  {'MB loaded':>10}  {'HBM busy':>8}"]
    for at, layer in enumerate(summary.layers):
        name = str(layer.layer) if layer.layer is not None else "before" if at == 0 else "behind"
        lines.append(f"{name:>6}  {layer.us:>9.2f}  {layer.bytes / 1e6:>10.3f}  {layer.busy:>8.1%}")
    lines += [
        "",
        f"clock: one for all SMs, which goes on by {summary.tick_ns:.0f} ns at a time",
        f"hand-offs: {summary.handoff_us[0]:.3f} us at least, {summary.handoff_us[1]:.3f} us in the median, from the last publication",
        f"records lost: {summary.lost}",
    ]
    return "\n".join(lines)


def _spread(s: Spread) -> str:
    return f"{s.median:.2f} ({s.p10:.2f}-{s.p90:.2f})"
