"""What a launch runs, where it is less than a step: which ops begin one, and which values must reach another one.

A launch of a layer begins at the op ``start`` of one layer and ends before the same op of the next. The first one of a step runs what
comes before that op in layer 0, the last one what is left of the last layer and what stands behind the loop.
"""

from __future__ import annotations

from dataclasses import replace

from megadsl.diagnostics import Collector, MegadslError, declare, error
from megadsl.dsl.overrides import Overrides
from megadsl.ir.graph import Attention, Graph, Op
from megadsl.ir.schedule import BEGIN, END, Schedule
from megadsl.source import Span

NO_LAYER = declare("MK286", "{kernel!r} cannot be launched layer by layer: {why}", "{how}")
NO_OVERLAP = declare(
    "MK287",
    "a launch of a layer finds no room beside the one before: {why}",
    's.launch("layer", trigger="end") launches one when the other ends; or {how}',
)
RESIDENT = 2  # blocks that find room on an SM, for one launch to fill its rings while the one before still works
LAUNCHES = {"step": "a step", "layer": "a layer", "op": "an op"}  # a launch is


def choose_launches(graph: Graph, schedule: Schedule, asked: Overrides, found: Collector) -> Schedule:
    """``schedule`` with where launches begin decided, and whether two blocks share an SM. MK286 for what is no launch of a layer."""
    loops = list(dict.fromkeys(op.loop for op in graph.ops if op.loop is not None))
    inside = [op for op in graph.ops if op.loop is not None]
    if schedule.scope != "layer":
        for d in (d for d in asked.decisions() if d.field in ("start", "trigger")):
            why = f"{d.field}={d.value!r} is about launches of a layer, and here one is {LAUNCHES[schedule.scope]}"
            _refuse(graph, why, f'say s.launch("layer"), or leave {d.field}= out', d.span, found)
        return replace(schedule, resident=RESIDENT if schedule.scope == "op" else 1)
    if len(loops) != 1:
        why = "it has no layers" if not loops else f"it has {len(loops)} loops over layers"
        _refuse(graph, why, 'use s.launch("step")', asked.said(graph.span, "scope"), found)
        return schedule
    begins = next((op for op in inside if isinstance(op, Attention)), inside[0])
    known = ", ".join(op.name for op in inside)
    for field in ("start", "trigger"):
        op = getattr(schedule, field)
        if op not in ("", *((BEGIN, END) if field == "trigger" else ()), *(op.name for op in inside)):
            _refuse(graph, f"{op!r} is not in its layers", f"choose for {field}= one of: {known}", asked.said(graph.span, field), found)
            return schedule
    return replace(schedule, start=schedule.start or begins.name, resident=1 if schedule.trigger == END else RESIDENT)


def _refuse(graph: Graph, why: str, how: str, span: Span, found: Collector) -> None:
    found.add(NO_LAYER, span, kernel=graph.name, why=why, how=how)


def no_overlap(full: MegadslError, default: Span, asked: Overrides | None) -> MegadslError:
    """What half an SM's shared memory had no room for, at the line that wants two blocks there; the first diagnostic says how much."""
    first = full.diagnostics[0]
    span = first.span if asked is None or first.span != default else asked.said(default, ("scope", "trigger"))
    return error(NO_OVERLAP, span or default, first.detail, why=first.message, how=first.mend)


def begins_launch(op: Op, graph: Graph, schedule: Schedule) -> bool:
    """Whether a launch begins with ``op``, in some layer."""
    if schedule.scope == "step":
        return op is graph.ops[0]
    return schedule.scope == "op" or op.name in (schedule.start, graph.ops[0].name)


def crosses_launches(producer: Op, reader: Op, graph: Graph, schedule: Schedule) -> bool:
    """Whether ``reader`` may be in a later launch than the ``producer`` of what it reads, whose shared memory does not last so long."""
    if schedule.scope != "layer":
        return schedule.scope == "op"
    order = [op.name for op in graph.ops]
    made, read, start = (order.index(name) for name in (producer.name, reader.name, schedule.start))
    if producer.loop is None:
        return reader.loop is not None or (made < start <= read)
    if reader.loop is None or made < read:
        return made < start <= read
    return start > made or start <= read  # from one layer to the next, or into layer 0
