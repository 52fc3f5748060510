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
    """Fields of an op's OpSchedule: splits, share_offset, chunk, ways."""

    op: str
    changes: Changes
    span: Span


@dataclass(frozen=True)
class SetSync:
    """Sync of the value that ``producer`` gives; ``consumer`` is named for the reader's sake and must read it."""

    producer: str
    consumer: str | None
    sync: Sync
    span: Span


Override: TypeAlias = SetCount | SetRole | SetRing | SetLoader | SetPrefetch | SetSplit | SetSync


@dataclass(frozen=True)
class Overrides:
    """All records for one architecture."""

    arch: str
    records: tuple[Override, ...]
