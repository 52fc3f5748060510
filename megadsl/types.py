"""Words that every floor uses: element types, lifetimes, placement levels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")

Drawn = tuple[float, float]  # mean and standard deviation of random numbers


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


@dataclass(frozen=True)
class PerLayer(Generic[T]):
    """A value for each layer of the loop, in order. The loop's body is traced once, so what differs from layer to layer is data."""

    values: tuple[T, ...]

    def alike(self) -> T | PerLayer[T]:
        """The one value, where all layers have the same."""
        return self.values[0] if all(v == self.values[0] for v in self.values[1:]) else self


def at_layer(value: T | PerLayer[T], layer: int) -> T:
    """What a layer has of something that may differ from layer to layer."""
    return value.values[layer] if isinstance(value, PerLayer) else value


def all_layers(value: T | PerLayer[T]) -> tuple[T, ...]:
    """What there is of it, each once, in the order of the layers."""
    return tuple(dict.fromkeys(value.values)) if isinstance(value, PerLayer) else (value,)


KIB = 1024
MIB = 1024 * 1024


def ceil_div(a: int, b: int) -> int:
    """Smallest integer >= a / b, for b > 0."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is >= a."""
    return ceil_div(a, multiple) * multiple
