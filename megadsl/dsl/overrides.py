"""What a user decided about a schedule: one frozen record per call, in the order of the calls; later ones win.

Records are equal where they decide the same, wherever that was written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from megadsl.ir.schedule import Sync
from megadsl.source import Span

Changes: TypeAlias = tuple[tuple[str, int | str | bool | None], ...]


@dataclass(frozen=True)
class SetCount:
    """``field`` of the Schedule (blocks, batch, max_kv) or "warps", the block's total."""

    field: str
    value: int
    span: Span = dataclasses.field(compare=False)


@dataclass(frozen=True)
class SetKernel:
    """Fields of the Schedule: scope, start, trigger, block_registers, finish, warm_up, warm_blocks, warm_part, warm_every."""

    changes: Changes
    span: Span = dataclasses.field(compare=False)


@dataclass(frozen=True)
class SetRole:
    """Fields of a role: warps, kind. With a kind the role need not exist: it is added."""

    role: str
    changes: Changes
    span: Span = dataclasses.field(compare=False)


@dataclass(frozen=True)
class SetRing:
    """Fields of the ring called ``ring``, or of the ring of the role called so."""

    ring: str
    changes: Changes
    span: Span = dataclasses.field(compare=False)


@dataclass(frozen=True)
class SetLoader:
    """Which role streams an op's weights or KV rows."""

    op: str
    role: str
    span: Span = dataclasses.field(compare=False)


@dataclass(frozen=True)
class SetPrefetch:
    """Fields of an op's Prefetch."""

    op: str
    changes: Changes
    span: Span = dataclasses.field(compare=False)


@dataclass(frozen=True)
class SetSplit:
    """Fields of an op's OpSchedule: splits, share_offset, chunk, ways, gather, residual, pause, meeting_window, dry_run, publish,
    merge."""

    op: str
    changes: Changes
    span: Span = dataclasses.field(compare=False)


@dataclass(frozen=True)
class SetScale:
    """Where an op's row scale meets its products."""

    op: str
    scale: str
    span: Span = dataclasses.field(compare=False)


@dataclass(frozen=True)
class SetSync:
    """Sync of the value that ``producer`` gives; ``consumer`` is named for the reader's sake and must read it."""

    producer: str
    consumer: str | None
    sync: Sync
    span: Span = dataclasses.field(compare=False)


@dataclass(frozen=True)
class SetPoll:
    """How the readers of the value that ``producer`` gives poll it: back_off, width; ``consumer`` as in SetSync."""

    producer: str
    consumer: str
    changes: Changes
    span: Span = dataclasses.field(compare=False)


Override: TypeAlias = SetCount | SetKernel | SetRole | SetRing | SetLoader | SetPrefetch | SetSplit | SetScale | SetSync | SetPoll


@dataclass(frozen=True)
class Decision:
    """One ``field`` of one ``subject``: () for the whole kernel, (role,), (ring,), (op,), or (producer, consumer). ``record`` is the
    kind of record that says it."""

    record: type[Override]
    subject: tuple[str, ...]
    field: str
    value: object
    span: Span = dataclasses.field(compare=False)


@dataclass(frozen=True)
class Overrides:
    """All records for one architecture."""

    arch: str
    records: tuple[Override, ...]

    def decisions(self) -> Iterator[Decision]:
        """One by one, in the order of the records."""
        return (decision for record in self.records for decision in decided(record))

    def said(self, default: Span, fields: str | tuple[str, ...], *subjects: str) -> Span:
        """Where one of ``fields`` was last decided, for one of the ops, rings or roles ``subjects``; ``default`` if nowhere."""
        wanted = {fields} if isinstance(fields, str) else set(fields)
        for d in reversed(list(self.decisions())):
            if d.field in wanted and (not subjects or (d.subject and d.subject[0] in subjects)):
                return d.span
        return default


# What launches of less than a step cannot follow, and results do not depend on; a layer's have half the shared memory for their rings.
_WARM = ("warm_up", "warm_blocks", "warm_part", "warm_every")
_NOT_IN = {
    "step": {"start", "trigger"},
    "op": {"start", "trigger", "publish", "merge", "finish", *_WARM},
    "layer": {"publish", "merge", "finish", "stages", *_WARM},
}


def in_scope(overrides: Overrides, scope: str, span: Span) -> Overrides:
    """The decisions under another launch ``scope``, less those that such a launch cannot follow."""
    same = scope in [d.value for d in overrides.decisions() if (d.record, d.field) == (SetKernel, "scope")][-1:]
    kept = (d for d in overrides.decisions() if same or d.field not in _NOT_IN[scope])
    return Overrides(overrides.arch, (*map(recorded, kept), SetKernel((("scope", scope),), span)))


def decided(record: Override) -> Iterator[Decision]:
    """The decisions of one record."""
    match record:
        case SetCount():
            yield Decision(SetCount, (), record.field, record.value, record.span)
        case SetKernel() | SetRole() | SetRing() | SetPrefetch() | SetSplit() | SetPoll():
            yield from (Decision(type(record), _subject(record), name, value, record.span) for name, value in record.changes)
        case SetLoader():
            yield Decision(SetLoader, (record.op,), "loader", record.role, record.span)
        case SetScale():
            yield Decision(SetScale, (record.op,), "scale", record.scale, record.span)
        case SetSync():
            ends = (record.producer,) if record.consumer is None else (record.producer, record.consumer)
            yield Decision(SetSync, ends, "sync", record.sync, record.span)


def _subject(record: SetKernel | SetRole | SetRing | SetPrefetch | SetSplit | SetPoll) -> tuple[str, ...]:
    """What the fields of a record are of."""
    match record:
        case SetKernel():
            return ()
        case SetRole():
            return (record.role,)
        case SetRing():
            return (record.ring,)
        case SetPoll():
            return record.producer, record.consumer
    return (record.op,)


def recorded(decision: Decision) -> Override:
    """The record that decides this and nothing else."""
    value: Any = decision.value
    subject, span = decision.subject, decision.span
    match decision.record:
        case kind if kind is SetCount:
            return SetCount(decision.field, value, span)
        case kind if kind is SetKernel:
            return SetKernel(((decision.field, value),), span)
        case kind if kind is SetLoader:
            return SetLoader(subject[0], value, span)
        case kind if kind is SetScale:
            return SetScale(subject[0], value, span)
        case kind if kind is SetSync:
            return SetSync(subject[0], subject[1] if len(subject) > 1 else None, value, span)
        case kind if kind is SetPoll:
            return SetPoll(subject[0], subject[1], ((decision.field, value),), span)
    fields: Any = decision.record  # SetRole, SetRing, SetPrefetch, SetSplit
    record: Override = fields(subject[0], ((decision.field, value),), span)
    return record
