"""Points of the search: what is decided on top of the schedule that the tuner starts from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeAlias

from megadsl.diagnostics import declare, error
from megadsl.dsl.overrides import Override
from megadsl.ir.graph import Graph
from megadsl.ir.schedule import Schedule
from megadsl.lower.memory import chunk_pieces
from megadsl.tune.effects import Scene, linears
from megadsl.tune.knobs import AUTO, KNOBS, PARTS, WHOLE, Value

KNOB_UNKNOWN = declare("MK490", "there is no knob {name!r}", "{hint}the knobs are: {known}")
DECISION_BAD = declare(
    "MK491",
    "{text!r} decides nothing of this model: {why}",
    "write KNOB=VALUE for all that the knob is about, or KNOB@SUBJECT=VALUE",
)

Decision: TypeAlias = tuple[str, str, Value]
"""A knob, its subject, its value."""


@dataclass(frozen=True)
class Point:
    """Decisions, at most one of a knob and subject, in the order of the table. Two that decide the same are equal."""

    decisions: tuple[Decision, ...] = ()

    def but(self, changes: Iterable[Decision]) -> Point:
        """This point with ``changes``; what a changed knob takes along goes back to AUTO."""
        found = {(knob, subject): value for knob, subject, value in self.decisions}
        for knob, subject, value in changes:
            found[knob, subject] = value
            for other in KNOBS[knob].along:
                found[other, subject] = AUTO
        order = list(KNOBS)
        return Point(tuple((k, s, found[k, s]) for k, s in sorted(found, key=lambda key: (order.index(key[0]), key[1]))))

    def records(self, graph: Graph) -> tuple[Override, ...]:
        """As overrides, to stand behind those of the schedule that the tuner starts from."""
        return tuple(record for knob, subject, value in self.decisions for record in KNOBS[knob].records(graph, subject, value))

    def __str__(self) -> str:
        return text_of(self.decisions)


@dataclass(frozen=True)
class Move:
    """Decisions that are tried together, and what they gain by the cost model, in microseconds of a step."""

    decisions: tuple[Decision, ...]
    effect_us: float

    @property
    def knob(self) -> str:
        return self.decisions[0][0]

    def __str__(self) -> str:
        return text_of(self.decisions)


def text_of(decisions: Iterable[Decision]) -> str:
    """``stages@weights=12 batch=4 sync@x=sentinel``; "" for none."""
    return " ".join(f"{knob}@{subject}={value}" if subject else f"{knob}={value}" for knob, subject, value in decisions)


def moves(scene: Scene) -> Iterator[Move]:
    """All that may be better than the schedule of ``scene``: every knob of every subject, and of all its subjects at once."""
    for name, knob in KNOBS.items():
        subjects = list(knob.subjects(scene))
        shared: dict[Value, list[str]] = {}
        for subject in subjects:
            now = knob.now(scene.schedule, subject)
            for value in dict.fromkeys(knob.values(scene, subject)):
                if value != now:
                    shared.setdefault(value, []).append(subject)
                    yield Move(((name, subject, value),), knob.effect(scene, subject, value))
        for value, about in shared.items():
            if len(about) > 1:
                effect = sum(knob.effect(scene, subject, value) for subject in about)
                yield Move(tuple((name, subject, value) for subject in about), effect)


def rounding(graph: Graph, schedule: Schedule) -> str:
    """What the bits of a step depend on: schedules that agree in it have to agree in every bit."""
    chunks = {op.name: chunk_pieces(op, graph, schedule) for op in linears(graph)}
    ops = [(o.op, o.splits, chunks.get(o.op, 0), o.ways, o.scale, o.gather) for o in schedule.ops]
    parts = [(e.value, type(e.sync).__name__) for e in schedule.edges if e.value.endswith(PARTS)]
    return repr((schedule.consumer.warps, ops, parts))


def parse(texts: Iterable[str], scene: Scene) -> tuple[Decision, ...]:
    """Decisions in the words of ``text_of``, each of ``texts`` a list with commas or blanks. Without a subject: of all subjects.

    Raises MK490 for an unknown knob, MK491 for a subject that it is not about or a missing value.
    """
    found: list[Decision] = []
    for item in (item for text in texts for item in text.replace(",", " ").split()):
        left, _, value = item.partition("=")
        name, _, subject = left.partition("@")
        if name not in KNOBS:
            close = get_close_matches(name, KNOBS, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise error(KNOB_UNKNOWN, name=name, hint=hint, known=", ".join(KNOBS))
        about = list(KNOBS[name].subjects(scene))
        if not value:
            raise error(DECISION_BAD, text=item, why="it has no value")
        if subject not in about and subject != WHOLE:
            raise error(DECISION_BAD, text=item, why=f"{name} is about {', '.join(about) or 'nothing here'}")
        read: Value = int(value) if value.lstrip("-").isdigit() else value
        found += [(name, one, read) for one in ([subject] if subject in about else about)]
    return tuple(found)


def as_json(point: Point) -> Mapping[str, Value]:
    """``{"sync@x": "sentinel"}``."""
    return {f"{knob}@{subject}" if subject else knob: value for knob, subject, value in point.decisions}
