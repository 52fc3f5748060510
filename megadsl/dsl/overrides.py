"""What a user decided about a schedule: one frozen record per call, in the order of the calls; later ones win."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from megadsl.ir.schedule import Sync
from megadsl.source import Span

Changes: TypeAlias = tuple[tuple[str, int | str | bool | None], ...]


@dataclass(frozen=True)
class SetCount:
    """``field`` of the Schedule (blocks, batch, max_kv) or "warps", the block's total."""

    field: str
    value: int
    span: Span


@dataclass(frozen=True)
class SetScope:
    """What one launch runs."""

    scope: str
    span: Span


@dataclass(frozen=True)
class SetRole:
    """Warps of a role. With ``kind`` the role need not exist: it is added."""

    role: str
    warps: int
    kind: str | None
    span: Span


@dataclass(frozen=True)
class SetRing:
    """Fields of the ring called ``ring``, or of the ring of the role called so."""

    ring: str
    changes: Changes
    span: Span


@dataclass(frozen=True)
class SetLoader:
    """Which role streams an op's weights or KV rows."""

    op: str
    role: str
    span: Span


@dataclass(frozen=True)
class SetPrefetch:
    """Fields of an op's Prefetch."""

    op: str
    changes: Changes
    span: Span


@dataclass(frozen=True)
class SetSplit:
    """Fields of an op's OpSchedule: splits, share_offset, chunk, ways, gather, residual."""

    op: str
    changes: Changes
    span: Span


@dataclass(frozen=True)
class SetScale:
    """Where an op's row scale meets its products."""

    op: str
    scale: str
    span: Span


@dataclass(frozen=True)
class SetSync:
    """Sync of the value that ``producer`` gives; ``consumer`` is named for the reader's sake and must read it."""

    producer: str
    consumer: str | None
    sync: Sync
    span: Span


Override: TypeAlias = SetCount | SetScope | SetRole | SetRing | SetLoader | SetPrefetch | SetSplit | SetScale | SetSync


@dataclass(frozen=True)
class Overrides:
    """All records for one architecture."""

    arch: str
    records: tuple[Override, ...]

    def said(self, default: Span, fields: str | tuple[str, ...], *subjects: str) -> Span:
        """Where one of ``fields`` was last decided, for one of the ops, rings or roles ``subjects``; ``default`` if nowhere."""
        wanted = {fields} if isinstance(fields, str) else set(fields)
        for record in reversed(self.records):
            subject, decided = _decision(record)
            if wanted & decided and (not subjects or subject in subjects):
                return record.span
        return default


def _decision(record: Override) -> tuple[str, set[str]]:
    """Whom a record is about ("" for the whole kernel), and the fields that it decides."""
    match record:
        case SetCount():
            return "", {record.field}
        case SetScope():
            return "", {"scope"}
        case SetRole():
            return record.role, {"warps", "kind"}
        case SetRing():
            return record.ring, {field for field, _ in record.changes}
        case SetLoader():
            return record.op, {"loader"}
        case SetPrefetch() | SetSplit():
            return record.op, {field for field, _ in record.changes}
        case SetScale():
            return record.op, {"scale"}
        case SetSync():
            return record.producer, {"sync"}
