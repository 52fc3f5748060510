"""What a user decided about a schedule: one frozen record per call, in the order of the calls; later ones win.

Records are equal where they decide the same, wherever that was written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

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
class SetScope:
    """What one launch runs."""

    scope: str
    span: Span = dataclasses.field(compare=False)


@dataclass(frozen=True)
class SetStart:
    """The op at which launches of a layer begin."""

    start: str
    span: Span = dataclasses.field(compare=False)


@dataclass(frozen=True)
class SetTrigger:
    """From where on the launch behind a launch of a layer may begin."""

    trigger: str
    span: Span = dataclasses.field(compare=False)


@dataclass(frozen=True)
class SetRegisters:
    """Which registers the threads of a block have."""

    registers: str
    span: Span = dataclasses.field(compare=False)


@dataclass(frozen=True)
class SetFinish:
    """Who adds a block's partial sums and publishes."""

    finish: str
    span: Span = dataclasses.field(compare=False)


@dataclass(frozen=True)
class SetWarmUp:
    """How the kernel's code is read ahead: warm_up, warm_blocks, warm_part, warm_every of the Schedule."""

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


Override: TypeAlias = (
    SetCount | SetScope | SetStart | SetTrigger | SetRegisters | SetFinish | SetWarmUp | SetRole | SetRing | SetLoader | SetPrefetch
    | SetSplit | SetScale | SetSync | SetPoll
)  # fmt: skip
# Records of one word about the whole kernel: the name of the decision, and where the record keeps it.
_OF_THE_KERNEL: dict[Any, tuple[str, str]] = {
    SetScope: ("scope", "scope"),
    SetStart: ("start", "start"),
    SetTrigger: ("trigger", "trigger"),
    SetRegisters: ("block_registers", "registers"),
    SetFinish: ("finish", "finish"),
}


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
    same = scope in [d.value for d in overrides.decisions() if d.record is SetScope][-1:]
    kept = (d for d in overrides.decisions() if same or d.field not in _NOT_IN[scope])
    return Overrides(overrides.arch, (*map(recorded, kept), SetScope(scope, span)))


def of_the_kernel(record: SetScope | SetRegisters | SetFinish) -> dict[str, str]:
    """The field of the Schedule that a record of one word decides, and the word."""
    attribute = _OF_THE_KERNEL[type(record)][1]
    return {attribute: getattr(record, attribute)}


def decided(record: Override) -> Iterator[Decision]:
    """The decisions of one record."""
    match record:
        case SetCount():
            yield Decision(SetCount, (), record.field, record.value, record.span)
        case SetScope() | SetStart() | SetTrigger() | SetRegisters() | SetFinish():
            name, attribute = _OF_THE_KERNEL[type(record)]
            yield Decision(type(record), (), name, getattr(record, attribute), record.span)
        case SetWarmUp() | SetRole() | SetRing() | SetPrefetch() | SetSplit() | SetPoll():
            yield from (Decision(type(record), _subject(record), name, value, record.span) for name, value in record.changes)
        case SetLoader():
            yield Decision(SetLoader, (record.op,), "loader", record.role, record.span)
        case SetScale():
            yield Decision(SetScale, (record.op,), "scale", record.scale, record.span)
        case SetSync():
            ends = (record.producer,) if record.consumer is None else (record.producer, record.consumer)
            yield Decision(SetSync, ends, "sync", record.sync, record.span)


def _subject(record: SetWarmUp | SetRole | SetRing | SetPrefetch | SetSplit | SetPoll) -> tuple[str, ...]:
    """What the fields of a record are of."""
    match record:
        case SetWarmUp():
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
        case kind if kind in _OF_THE_KERNEL:
            made: Any = kind
            return cast(Override, made(value, span))
        case kind if kind is SetWarmUp:
            return SetWarmUp(((decision.field, value),), span)
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
