"""The knobs of a schedule, in one table: how a file and how Python says them, what they can be, and what turning one changes.

A new knob is one entry here, beside its method of mk.schedule: schedule files, their messages, ``megadsl explain --knobs`` and
docs/schedules.md follow from the entry, and the tests hold it to what it says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from megadsl.dsl.knob_values import Bytes, Count, Name, Syncs, Values, Words, name_text, words
from megadsl.dsl.overrides import (
    Decision,
    Override,
    Overrides,
    SetCount,
    SetKernel,
    SetLoader,
    SetPoll,
    SetPrefetch,
    SetRing,
    SetRole,
    SetScale,
    SetSplit,
    SetSync,
    recorded,
)
from megadsl.dsl.schedule import BLOCK_REGISTERS, FINISHES, GATHERS, HINTS, KINDS, PUBLISHES, RESIDUALS, SCALES
from megadsl.ir.schedule import CODE_PARTS, L2_BY, MERGES, SCOPES

KERNEL, ROLE, RING, OP, EDGE = SUBJECTS = ("kernel", "role", "ring", "op", "edge")  # in the order in which a file has them
_Key: TypeAlias = tuple[int, int | tuple[str, ...], int]


@dataclass(frozen=True)
class Knob:
    """One thing that a schedule can decide.

    ``name`` and ``of``, its subject, are what stands in a file; ``python`` is the call of a ScheduleBlock ``s`` that says the same.
    ``record`` and ``field`` are where the decision is kept. ``same_bits``: turning it changes no bit of any result; else sums are
    rounded otherwise. ``code``: turning it changes the kernel's code, which is then compiled anew; else only data of the launch.
    ``note`` says where that is not the whole of it.
    """

    name: str
    of: str
    python: str
    record: type[Override]
    field: str
    values: Values
    same_bits: bool
    code: bool
    note: str = ""


_SMEM = Words((("ring", True), ("none", False)))
_TRIGGERS = Name("an op of the layers; begin; end")
_ROUNDS, _KEEPS = False, True  # bits
_DATA, _CODE = False, True

_OWN_WINDOWS = "data where some op has one; 0 B: the ring's"

KNOBS: tuple[Knob, ...] = (
    Knob("launch", KERNEL, "s.launch(scope=...)", SetKernel, "scope", words(*SCOPES), _KEEPS, _CODE),
    Knob("launch_start", KERNEL, "s.launch(..., start=...)", SetKernel, "start", Name("an op of the layers"), _KEEPS, _CODE),
    Knob("launch_trigger", KERNEL, "s.launch(..., trigger=...)", SetKernel, "trigger", _TRIGGERS, _KEEPS, _CODE),
    Knob("block_registers", KERNEL, "s.registers(...)", SetKernel, "block_registers", words(*BLOCK_REGISTERS), _KEEPS, _CODE),
    Knob("finish", KERNEL, "s.finish(...)", SetKernel, "finish", words(*FINISHES), _KEEPS, _CODE),
    Knob(
        "blocks",
        KERNEL,
        "s.blocks(...)",
        SetCount,
        "blocks",
        Count(),
        _KEEPS,
        _CODE,
        "mostly data; rounds where split_kv is left to follow it",
    ),
    Knob("warps", KERNEL, "s.warps(...)", SetCount, "warps", Count(), _ROUNDS, _CODE, "of all roles"),
    Knob("batch", KERNEL, "s.batch(...)", SetCount, "batch", Count(), _KEEPS, _CODE),
    Knob("max_kv", KERNEL, "s.max_kv(...)", SetCount, "max_kv", Count(), _KEEPS, _DATA),
    Knob("warm_code", KERNEL, "s.warm_code(role=...)", SetKernel, "warm_up", Name("a role", none="none"), _KEEPS, _CODE),
    Knob("warm_code_blocks", KERNEL, "s.warm_code(..., blocks=...)", SetKernel, "warm_blocks", Count(none="all"), _KEEPS, _DATA),
    Knob("warm_code_part", KERNEL, "s.warm_code(..., part=...)", SetKernel, "warm_part", words(*CODE_PARTS), _KEEPS, _DATA),
    Knob("warm_code_every", KERNEL, "s.warm_code(..., every=...)", SetKernel, "warm_every", Count(), _KEEPS, _DATA),
    Knob("kind", ROLE, "s.role(..., kind=...)", SetRole, "kind", words(*KINDS), _KEEPS, _CODE, "adds a role"),
    Knob("warps", ROLE, "s.role(..., warps=...)", SetRole, "warps", Count(), _ROUNDS, _CODE),
    Knob("stages", RING, "s.ring(..., stages=...)", SetRing, "stages", Count(), _KEEPS, _CODE),
    Knob("stage_bytes", RING, "s.ring(..., stage_bytes=...)", SetRing, "stage_bytes", Bytes(), _KEEPS, _CODE),
    Knob("window", RING, "s.ring(..., window=...)", SetRing, "window", Bytes(), _KEEPS, _DATA),
    Knob("meeting_window", RING, "s.ring(..., meeting_window=...)", SetRing, "meeting_window", Bytes(), _KEEPS, _DATA),
    Knob("loader", OP, "s[...].loader(...)", SetLoader, "loader", Name("a loader role"), _KEEPS, _CODE),
    Knob("smem", OP, "s[...].prefetch(smem=...)", SetPrefetch, "smem", _SMEM, _KEEPS, _CODE),
    Knob("registers", OP, "s[...].prefetch(registers=...)", SetPrefetch, "registers", Count(0, none="auto"), _KEEPS, _CODE),
    Knob("l2", OP, "s[...].prefetch(l2=...)", SetPrefetch, "l2_bytes", Bytes(0), _KEEPS, _CODE, "data beyond 0"),
    Knob("l2_by", OP, "s[...].prefetch(l2_by=...)", SetPrefetch, "l2_by", words(*L2_BY), _KEEPS, _CODE),
    Knob("ahead_of", OP, "s[...].prefetch(ahead_of=...)", SetPrefetch, "ahead_of", Name("an op", none="none"), _KEEPS, _CODE),
    Knob("hint", OP, "s[...].prefetch(hint=...)", SetPrefetch, "hint", words(*HINTS), _KEEPS, _CODE),
    Knob("split_kv", OP, "s[...].split(kv=...)", SetSplit, "splits", Count(), _ROUNDS, _CODE, "mostly data"),
    Knob("share_offset", OP, "s[...].split(share_offset=...)", SetSplit, "share_offset", Count(0), _KEEPS, _DATA),
    Knob("chunk", OP, "s[...].split(chunk=...)", SetSplit, "chunk", Count(0), _ROUNDS, _CODE),
    Knob("columns", OP, "s[...].columns(ways=...)", SetSplit, "ways", Count(), _ROUNDS, _CODE),
    Knob("scale", OP, "s[...].scale(...)", SetScale, "scale", words(*SCALES), _ROUNDS, _CODE),
    Knob("gather", OP, "s[...].gather(...)", SetSplit, "gather", words(*GATHERS), _ROUNDS, _CODE),
    Knob("residual", OP, "s[...].residual(...)", SetSplit, "residual", words(*RESIDUALS), _KEEPS, _CODE),
    Knob("publish", OP, "s[...].publish(...)", SetSplit, "publish", words(*PUBLISHES), _KEEPS, _CODE),
    Knob("merge", OP, "s[...].merge(...)", SetSplit, "merge", words(*MERGES), _ROUNDS, _CODE),
    Knob("pause", OP, "s[...].poll(pause=...)", SetSplit, "pause", Count(0), _KEEPS, _CODE, "nanoseconds; data beyond 0"),
    Knob("meeting_window", OP, "s[...].poll(meeting_window=...)", SetSplit, "meeting_window", Bytes(0), _KEEPS, _CODE, _OWN_WINDOWS),
    Knob("dry_run", OP, "s[...].dry_run(...)", SetSplit, "dry_run", Words((("no", False), ("yes", True))), _KEEPS, _CODE),
    Knob("sync", OP, "s[...].sync(...)", SetSync, "sync", Syncs(), _KEEPS, _CODE),
    Knob("sync", EDGE, "s.edge(..., ...).sync(...)", SetSync, "sync", Syncs(), _KEEPS, _CODE, "rounds where parts become tagged"),
    Knob("back_off", EDGE, "s.edge(..., ...).poll(back_off=...)", SetPoll, "back_off", Count(0), _KEEPS, _CODE, "nanoseconds"),
    Knob("width", EDGE, "s.edge(..., ...).poll(width=...)", SetPoll, "width", Count(0), _KEEPS, _CODE, "0: the compiler chooses"),
)


def knobs_of(subject: str) -> dict[str, Knob]:
    """The knobs of a kind of subject, by name."""
    return {knob.name: knob for knob in KNOBS if knob.of == subject}


def knob_of(decision: Decision) -> Knob:
    """The knob that a decision turns."""
    edge = len(decision.subject) > 1
    return next(k for k in KNOBS if (k.record, k.field) == (decision.record, decision.field) and (k.of == EDGE) == edge)


def left_side(knob: Knob, subject: tuple[str, ...]) -> str:
    """What a file has in front of the value: ``ring weights: window``."""
    if not subject:
        return knob.name
    return f"{knob.of} {' -> '.join(map(name_text, subject))}: {knob.name}"


def statements(overrides: Overrides) -> Iterator[tuple[str, str]]:
    """Left and right side of every decision that counts, in a file's order."""
    for decision in normal(overrides).decisions():
        knob = knob_of(decision)
        yield left_side(knob, decision.subject), knob.values.write(decision.value)


def normal(overrides: Overrides) -> Overrides:
    """The same decisions, a record for each, without those that later ones replace, in a file's order.

    The kernel's first, then roles and rings as they are first named (in that order they are added), ops and edges by name;
    knobs in the order of the table. ``apply`` makes the same Schedule of both.
    """
    last = {_decides(d): d for d in overrides.decisions()}
    named = list(dict.fromkeys((d.record, d.subject) for d in overrides.decisions()))

    def key(d: Decision) -> _Key:
        knob = knob_of(d)
        place = named.index((d.record, d.subject)) if knob.of in (ROLE, RING) else d.subject
        return SUBJECTS.index(knob.of), place, KNOBS.index(knob)

    return Overrides(overrides.arch, tuple(recorded(d) for d in sorted(last.values(), key=key)))


def _decides(d: Decision) -> tuple[object, ...]:
    """What a later decision of the same replaces: an edge is its value, whichever of its readers is named."""
    if d.record is SetSync:
        return SetSync, d.subject[0], len(d.subject) > 1 and d.subject[0] == d.subject[1]
    if d.record is SetPoll:
        return SetPoll, d.field, d.subject[0], d.subject[0] == d.subject[1]
    return d.record, d.subject, d.field


COLUMNS = ("knob", "in Python", "values", "results", "kernel", "note")


def table() -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """All knobs as text: how they are said, what they can be, whether they keep the bits of results and the kernel's code."""
    return COLUMNS, [
        (
            f"{knob.of} {knob.name}",
            knob.python,
            knob.values.possible,
            "same bits" if knob.same_bits else "other rounding",
            "other code" if knob.code else "same code",
            knob.note,
        )
        for knob in KNOBS
    ]
