"""How a linear's matrix is cut into tiles. A function of the matrix alone, so that schedules never force a repack."""

from __future__ import annotations

from dataclasses import dataclass

from megadsl.ir.formats import FORMATS, PANEL_COLUMNS, PANEL_ROWS
from megadsl.ir.graph import Linear
from megadsl.types import ceil_div, round_up

GROUP_ROWS = PANEL_ROWS  # rows per tile; they fill the mma's 16 as two column ranges
PANEL = PANEL_COLUMNS  # columns per panel: two k16 steps, one 16-byte load per lane
MAX_TILE_COLUMNS = 1024  # 8 rows x 1024 bf16 = 16 KB, one ring stage
MAX_NARROW_COLUMNS = 2048  # of codes of 8 bits and less: more would not fit a lane's registers


@dataclass(frozen=True)
class Tiling:
    """Row groups of 8, each cut into ``pieces`` tiles of ``tile_columns`` columns."""

    groups: int
    pieces: int
    tile_columns: int
    fold: int  # row groups that make one group of 8 features
    panel_bytes: int

    @property
    def columns_padded(self) -> int:
        return self.pieces * self.tile_columns

    @property
    def tile_bytes(self) -> int:
        """Whole units of a bulk copy."""
        return round_up(self.tile_columns // PANEL * self.panel_bytes, 16)

    @property
    def group_bytes(self) -> int:
        return self.pieces * self.tile_bytes

    @property
    def shares(self) -> int:
        """What is shared out over the blocks: row groups, in folds."""
        return self.groups // self.fold

    @property
    def share_bytes(self) -> int:
        return self.fold * self.group_bytes

    @property
    def bytes(self) -> int:
        return self.groups * self.group_bytes


def tiling(op: Linear) -> Tiling:
    """Equal pieces of at most MAX_TILE_COLUMNS (MAX_NARROW_COLUMNS), each a whole number of panels: little padding for any column count."""
    weights = FORMATS[op.format]
    pieces = ceil_div(op.columns, MAX_TILE_COLUMNS if weights.bits > 8 else MAX_NARROW_COLUMNS)
    fold = len(op.parts) if op.epilogue is not None else 1
    return Tiling(
        round_up(ceil_div(op.rows, GROUP_ROWS), fold), pieces, round_up(ceil_div(op.columns, pieces), PANEL), fold, weights.panel_bytes
    )


def tile_bytes(op: Linear) -> int:
    """Bytes of one weight tile."""
    return tiling(op).tile_bytes
