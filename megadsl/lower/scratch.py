"""What comes into L2 by loads: copies into a scratch of the loader's that nobody reads.

A prefetch instruction lets memory work while blocks wait for each other; what a load has brought is read again at nearly twice the rate
(docs/performance.md). A loader that has such copies to make has room for two of half a stage: it waits for the first before it makes the
third, and for all of them before its block leaves.
"""

from __future__ import annotations

from megadsl.ir.plan import Record, Region, ident
from megadsl.ir.schedule import LOAD, Ring, Schedule
from megadsl.types import Level, round_up

SLOTS = 2
_UNIT = 128  # bytes
BARRIER_BYTES = 8  # an mbarrier


def loads_l2(schedule: Schedule, role: str) -> bool:
    """Whether a loader brings something into L2 by loads."""
    return any(o.loader == role and o.prefetch.l2_bytes and o.prefetch.l2_by == LOAD for o in schedule.ops)


def slot_bytes(ring: Ring) -> int:
    """Of one copy."""
    return round_up(ring.stage_bytes // 2, _UNIT)


def scratch_area(role: str) -> str:
    """Where its copies land."""
    return f"scratch.{role}"


def landed_area(role: str) -> str:
    """The barriers that count their bytes, one for each of the SLOTS."""
    return f"scratch_barriers.{role}"


def scratch_areas(schedule: Schedule) -> list[tuple[str, int]]:
    """Names and bytes, of all loaders."""
    found: list[tuple[str, int]] = []
    for role, ring in schedule.rings:
        if loads_l2(schedule, role):
            found += [(landed_area(role), SLOTS * BARRIER_BYTES), (scratch_area(role), SLOTS * slot_bytes(ring))]
    return found


def scratch_region(role: str) -> Region:
    """What such a copy writes."""
    return Region("smem", scratch_area(role), Level.BLOCK)


def scratch_record(role: str, at: int, landed: int) -> Record:
    """mk::ScratchShape of a loader."""
    return Record("mk::ScratchShape", scratch_member(role), (at, landed))


def scratch_member(role: str) -> str:
    return f"scratch_{ident(role)}"
