"""What a family tells the compiler about an op: the outline of each output, and what it moves and computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megadsl.diagnostics import Collector
from megadsl.ir.spec import Node, Tensor
from megadsl.types import DType, Lifetime


@dataclass(frozen=True)
class Outline:
    """Shape, element type and lifetime of an output."""

    shape: tuple[int, ...]
    dtype: DType = DType.BF16
    lifetime: Lifetime = Lifetime.ACTIVATION


# Adds what is wrong to the collector and still answers with the most plausible outlines, so that tracing goes on.
ShapeRule = Callable[[Node, tuple[Tensor, ...], Collector], tuple[Outline, ...]]


@dataclass(frozen=True)
class Family:
    """One kind of spec node."""

    name: str
    outline: ShapeRule


@dataclass(frozen=True)
class Cost:
    """What one run of an op (one layer's worth) has to do. Bytes count each byte once, whatever the schedule.

    ``flops`` counts a multiply-add as two. ``weight_bytes`` and ``kv_bytes`` come from HBM; ``exchange_bytes`` are the
    activations (and logits) read and written, which stay in L2.
    """

    flops: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0
    exchange_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
            self.exchange_bytes + other.exchange_bytes,
        )

    def times(self, n: int) -> Cost:
        """The cost of ``n`` runs."""
        return Cost(self.flops * n, self.weight_bytes * n, self.kv_bytes * n, self.exchange_bytes * n)

    @property
    def hbm_bytes(self) -> int:
        """Bytes that must come from HBM when the weights do not fit in L2."""
        return self.weight_bytes + self.kv_bytes


def shape_text(shape: tuple[int, ...]) -> str:
    """``[16, 576]``, as messages show shapes."""
    return "[" + ", ".join(str(d) for d in shape) + "]"
