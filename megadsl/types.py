"""Words that every floor uses: element types, lifetimes, placement levels."""

from __future__ import annotations

from enum import Enum


class DType(Enum):
    """Element type of a tensor. ``bits`` is the storage width."""

    BF16 = "bf16"
    F32 = "f32"
    I32 = "i32"

    @property
    def bits(self) -> int:
        return {"bf16": 16, "f32": 32, "i32": 32}[self.value]

    @property
    def bytes(self) -> int:
        return self.bits // 8


class Lifetime(Enum):
    """How long a tensor's contents live, and who writes them."""

    WEIGHT = "weight"  # constant over all launches, packed once
    ACTIVATION = "activation"  # produced and consumed inside one launch
    STATE = "state"  # survives launches: KV caches
    INPUT = "input"  # written by the host (or by the previous launch) before a launch
    OUTPUT = "output"  # read by the host after a launch


class Level(Enum):
    """Placement level that an exchange or a region spans, outermost first."""

    MESH = "mesh"
    GPU = "gpu"
    GROUP = "group"
    CLUSTER = "cluster"
    BLOCK = "block"
    WARP = "warp"


KIB = 1024
MIB = 1024 * 1024


def ceil_div(a: int, b: int) -> int:
    """Smallest integer >= a / b, for b > 0."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is >= a."""
    return ceil_div(a, multiple) * multiple
