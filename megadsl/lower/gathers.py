"""Where an op's input arrives, and how its tiles lie in the ring because of that.

In registers there are two forms. Of few tokens (templates/include/megadsl/direct.h) both column ranges of all tokens share the lanes of a
warp; of more (wide.h) a lane has whole units of one or two tokens.
"""

from __future__ import annotations

from megadsl.ir.graph import Attention, Linear
from megadsl.ir.schedule import REGISTERS, Schedule
from megadsl.lower.tiling import PANEL, tiling
from megadsl.types import ceil_div

MOST_TOGETHER = 4  # tiles of a stage: their weights are in registers together
FEW_TOKENS = 4  # mk::TileSums::kShared
TOKENS_OF_LANES = 8  # of a warp: the N of an mma
UNIT_REGISTERS = 4  # 8 features of one token
WIDE_REGISTERS = 64  # of a lane, for the units that it gathers at once


def in_registers(op: Linear | Attention, schedule: Schedule) -> bool:
    """Whether the op's input (an attention's queries, keys and values of this step) never lies in shared memory."""
    return schedule.op(op.name).gather == REGISTERS


def is_direct(op: Linear | Attention, schedule: Schedule, tokens: int) -> bool:
    """Whether it does not, and is of few tokens."""
    return in_registers(op, schedule) and tokens <= FEW_TOKENS


def is_wide(op: Linear | Attention, schedule: Schedule, tokens: int) -> bool:
    """Whether it does not, and is of more."""
    return in_registers(op, schedule) and tokens > FEW_TOKENS


def wide_registers(op: Linear, schedule: Schedule, tokens: int) -> int:
    """Registers of a lane that hold one tile's columns of its tokens, where these are more than a few."""
    return ceil_div(tiling(op).tile_columns // PANEL, schedule.consumer.warps) * ceil_div(tokens, TOKENS_OF_LANES) * UNIT_REGISTERS


def tiles_together(op: Linear, schedule: Schedule, tokens: int) -> int:
    """Tiles that lie in one stage of the ring: one, or where the input arrives in registers as many whole row groups as fit a stage and
    divide a batch of them."""
    tiles, role = tiling(op), schedule.op(op.name).loader
    most = min(schedule.ring(role).stage_bytes // tiles.group_bytes, MOST_TOGETHER // tiles.pieces, schedule.batch)
    if not is_direct(op, schedule, tokens) or most < 1:
        return 1
    return next(n for n in range(most, 0, -1) if schedule.batch % n == 0) * tiles.pieces
