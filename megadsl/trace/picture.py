"""One layer of one block as an SVG: a row per op with its gap, wait and work, and each load of it marked where it was issued."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from megadsl.diagnostics import declare, error
from megadsl.trace.activity import Activity, Execution
from megadsl.trace.records import Timeline

NO_LAYER = declare("MK463", "there is no layer {layer} to draw", "choose one of the {layers} layers, counted from 0")

WIDTH, LEFT, RIGHT, ROW, TOP = 1200, 150, 20, 34, 64
BAR = 16
COLOURS = {"wait": "#f2c14e", "exposed": "#d1495b", "work": "#2e86ab", "gap": "#c9ccd1", "load": "#3a7d44"}
MEANINGS = {
    "gap": "since the op before",
    "wait": "for other blocks, loads under way",
    "exposed": "for other blocks, nothing under way",
    "work": "on tiles, to the publication",
    "load": "a copy is issued",
}
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)


class _Axis:
    """Microseconds to pixels."""

    def __init__(self, begin: float, end: float) -> None:
        self.begin, self.end = begin, max(end, begin + 1e-3)

    def x(self, time: float) -> float:
        return LEFT + (time - self.begin) / (self.end - self.begin) * (WIDTH - LEFT - RIGHT)

    def ticks(self) -> list[float]:
        step = next((t for t in TICKS if (self.end - self.begin) / t <= 12), TICKS[-1])
        return [float(t) for t in np.arange(np.ceil(self.begin / step), np.floor(self.end / step) + 1) * step]


def layer_picture(timeline: Timeline, activities: Sequence[Activity], activity: Activity, layer: int) -> str:
    """The SVG of ``layer`` in the block of ``activity``. Whiskers behind a row's end: p10 to p90 of that end over all blocks.
    MK463 when there is no such layer."""
    looped = {p["name"] for p in timeline.layout["phases"] if p["looped"]} or {p["name"] for p in timeline.layout["phases"]}
    runs = [r for r in activity.executions if r.phase in looped and r.layer == layer]
    if not runs:
        raise error(NO_LAYER, layer=layer, layers=len({r.layer for r in activity.executions if r.phase in looped}))
    issues = {r.phase: _issues(activity, r) for r in runs}
    first = min([r.previous for r in runs] + [t for times in issues.values() for t in times])
    axis = _Axis(first, max(r.result for r in runs))
    height = TOP + ROW * len(runs) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="18" font-size="14">layer {layer} on block {activity.block.number} (SM {activity.block.sm})</text>',
        *_legend(),
        *_grid(axis, height),
    ]
    for row, run in enumerate(runs):
        ends = [r.result for a in activities for r in a.executions if (r.phase, r.layer) == (run.phase, layer)]
        lines += _row(axis, TOP + ROW * row, run, issues[run.phase], np.quantile(ends, (0.1, 0.9)).tolist(), activity.idle)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _issues(activity: Activity, run: Execution) -> list[float]:
    return [
        float(t)
        for loads in activity.loads
        for t, phase, layer in zip(loads.issues.times, loads.phases, loads.issues.layers, strict=True)
        if (phase, int(layer)) == (run.phase, run.layer)
    ]


def _legend() -> Iterator[str]:
    x = 10
    for name, colour in COLOURS.items():
        text = f"{name}: {MEANINGS[name]}"
        yield f'<rect x="{x}" y="30" width="12" height="12" fill="{colour}"/><text x="{x + 16}" y="40">{escape(text)}</text>'
        x += 34 + 6 * len(text)


def _grid(axis: _Axis, height: int) -> Iterator[str]:
    for tick in axis.ticks():
        x = axis.x(tick)
        yield f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{height - 24}" stroke="#e3e5e8"/>'
        yield f'<text x="{x:.1f}" y="{height - 10}" text-anchor="middle" fill="#555">{tick:g} us</text>'


def _row(
    axis: _Axis, y: int, run: Execution, issues: Sequence[float], ends: Sequence[float], idle: Sequence[tuple[float, float]]
) -> Iterator[str]:
    yield f'<text x="{LEFT - 8}" y="{y + BAR - 3}" text-anchor="end">{escape(run.phase)}</text>'
    yield _bar(axis, y, run.previous, run.began, "gap")
    yield _bar(axis, y, run.began, run.result, "work")
    for begin, end in run.waits:
        yield _bar(axis, y, begin, end, "wait")
        for a, b in idle:
            if max(a, begin) < min(b, end):
                yield _bar(axis, y, max(a, begin), min(b, end), "exposed")
    middle = y + BAR / 2
    yield f'<line x1="{axis.x(ends[0]):.1f}" y1="{middle}" x2="{axis.x(ends[1]):.1f}" y2="{middle}" stroke="#222"/>'
    for time in issues:
        x = axis.x(time)
        yield f'<line x1="{x:.1f}" y1="{y + BAR + 2}" x2="{x:.1f}" y2="{y + BAR + 10}" stroke="{COLOURS["load"]}"/>'


def _bar(axis: _Axis, y: int, begin: float, end: float, kind: str) -> str:
    x = axis.x(begin)
    title = f"<title>{kind} {end - begin:.3f} us</title>"
    return f'<rect x="{x:.1f}" y="{y}" width="{max(0.0, axis.x(end) - x):.2f}" height="{BAR}" fill="{COLOURS[kind]}">{title}</rect>'
