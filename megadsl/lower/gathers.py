"""Where an op's input arrives, and how its tiles lie in the ring because of that."""

from __future__ import annotations

from megadsl.ir.graph import Attention, Linear
from megadsl.ir.schedule import Schedule
from megadsl.lower.tiling import tiling

REGISTERS = "registers"
MOST_TOGETHER = 4  # tiles of a stage: their weights are in registers together


def is_direct(op: Linear | Attention, schedule: Schedule) -> bool:
    """Whether the op's input (an attention's queries, keys and values of this step) never lies in shared memory."""
    return schedule.op(op.name).gather == REGISTERS


def tiles_together(op: Linear, schedule: Schedule) -> int:
    """Tiles that lie in one stage of the ring: one, or where the input arrives in registers as many whole row groups as fit a stage and
    divide a batch of them."""
    tiles, role = tiling(op), schedule.op(op.name).loader
    most = min(schedule.ring(role).stage_bytes // tiles.group_bytes, MOST_TOGETHER // tiles.pieces, schedule.batch)
    if not is_direct(op, schedule) or most < 1:
        return 1
    return next(n for n in range(most, 0, -1) if schedule.batch % n == 0) * tiles.pieces
