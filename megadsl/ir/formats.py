"""Formats of weights: what a matrix's elements are in memory, beside bf16.

A weight is code * scale * row scale. Codes and scales lie in the tile, panel by panel (8 rows of 32 columns), and are turned into a bf16
number on their way into the products: exactly, but for int4, whose products of code and scale are rounded. The row scale, fp32, one
for each packed row, multiplies the finished sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from megadsl.diagnostics import declare

FORMAT_UNKNOWN = declare("MK288", "{what}: there is no format {name!r} of weights", "take one of {known}")
FORMAT_OP = declare("MK289", "formats {asked!r}: the kernel has no linear called {op!r}", "its linears are {known}")

PANEL_ROWS, PANEL_COLUMNS = 8, 32  # of a matrix in memory: what a warp multiplies at a time


@dataclass(frozen=True)
class WeightFormat:
    """``bits`` of a code; ``block`` columns that share a scale of ``scale_bytes`` (0: there is none); ``device``: its type in formats.h."""

    name: str
    device: str
    bits: int
    block: int = 0
    scale_bytes: int = 0
    row_scale: bool = False

    @property
    def panel_bytes(self) -> int:
        """Of 8 rows by 32 columns: codes, and behind them the scales."""
        scales = PANEL_COLUMNS // self.block * self.scale_bytes if self.block else 0
        return PANEL_ROWS * (PANEL_COLUMNS * self.bits // 8 + scales)


FORMATS = {
    one.name: one
    for one in (
        WeightFormat("bf16", "Bf16Weights", 16),
        WeightFormat("fp8", "Fp8Weights", 8, row_scale=True),
        WeightFormat("int8", "Int8Weights", 8, row_scale=True),
        WeightFormat("nvfp4", "Nvfp4Weights", 4, 16, 1, row_scale=True),
        WeightFormat("mxfp4", "Mxfp4Weights", 4, 32, 1),
        WeightFormat("int4", "Int4Weights", 4, 32, 2),
    )
}
PLAIN = "bf16"

# formats.h multiplies codes by an nth of their blocks' scales, so that the factor is a bf16 number; row scales are so much larger.
DEVICE_SCALE = {"nvfp4": 128.0}
