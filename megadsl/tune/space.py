"""Points of the search: what is decided on top of the schedule that the tuner starts from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from megadsl.dsl.knobs import KNOBS, knob_of, left_side
from megadsl.dsl.overrides import Decision, Override, recorded
from megadsl.ir.graph import Graph
from megadsl.ir.schedule import Schedule
from megadsl.lower.memory import chunk_pieces
from megadsl.tune.effects import Scene, linears
from megadsl.tune.knobs import TURNS, Subject


@dataclass(frozen=True)
class Point:
    """Decisions, at most one of each knob and subject, in the order of the knobs: equal points decide the same."""

    decisions: tuple[Decision, ...] = ()

    def but(self, changes: Iterable[Decision]) -> Point:
        """This point with ``changes``."""
        found = {(d.record, d.field, d.subject): d for d in (*self.decisions, *changes)}
        return Point(tuple(sorted(found.values(), key=_place)))

    @property
    def records(self) -> tuple[Override, ...]:
        """As overrides, to stand behind those of the schedule that the tuner starts from."""
        return tuple(map(recorded, self.decisions))

    def __str__(self) -> str:
        return text_of(self.decisions)


@dataclass(frozen=True)
class Move:
    """Decisions that are tried together, and what they gain by the cost model, in microseconds of a step."""

    decisions: tuple[Decision, ...]
    gain_us: float

    @property
    def knob(self) -> str:
        return knob_of(self.decisions[0]).name

    def __str__(self) -> str:
        return text_of(self.decisions)


@cache
def _place(decision: Decision) -> tuple[int, Subject]:
    return KNOBS.index(knob_of(decision)), decision.subject


def side_of(decision: Decision) -> str:
    """What a schedule file has in front of the value."""
    return left_side(knob_of(decision), decision.subject)


def text_of(decisions: Iterable[Decision]) -> str:
    """As statements of a schedule file: ``batch = 4; op o_proj: residual = exchange``; "" for none."""
    return "; ".join(map(_statement, decisions))


@cache
def _statement(decision: Decision) -> str:
    return f"{side_of(decision)} = {knob_of(decision).values.write(decision.value)}"


def moves(scene: Scene) -> Iterator[Move]:
    """All that may be better than the schedule of ``scene``: every knob of every subject, and of several subjects at once."""
    for turn in TURNS:
        shared: dict[object, list[Subject]] = {}
        for subject in turn.subjects(scene):
            now = turn.now(scene, subject)
            for value in dict.fromkeys(turn.values(scene, subject)):
                if value != now:
                    shared.setdefault(value, []).append(subject)
                    yield Move(turn.decisions(scene, subject, value), turn.gain(scene, subject, value))
        for value, about in shared.items():
            if len(about) > 1:
                together = tuple(d for subject in about for d in turn.decisions(scene, subject, value))
                yield Move(together, sum(turn.gain(scene, subject, value) for subject in about))


def rounding(graph: Graph, schedule: Schedule) -> str:
    """What the bits of a step depend on: schedules that agree in it have to agree in every bit."""
    chunks = {op.name: chunk_pieces(op, graph, schedule) for op in linears(graph)}
    ops = [(o.op, o.splits, chunks.get(o.op, 0), o.ways, o.scale, o.gather) for o in schedule.ops]
    parts = [(e.value, type(e.sync).__name__) for e in schedule.edges if e.value != graph.op(e.producer).out]
    return repr((schedule.consumer.warps, ops, parts))
