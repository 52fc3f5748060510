"""What a linear's prologue and epilogue read, sorted by how it reaches the block."""

from __future__ import annotations

from megadsl.ir.expr import reductions
from megadsl.ir.graph import Fused, Linear, ValueRef, WeightRef
from megadsl.ir.schedule import Schedule, Tagged


def prologue_values(op: Linear) -> list[tuple[str, ValueRef]]:
    """Gathered operands of a prologue, in argument order."""
    return [(name, ref) for name, ref in op.prologue.args if isinstance(ref, ValueRef)]


def kept_values(op: Linear) -> list[tuple[str, ValueRef]]:
    """Values that an epilogue combines with the op's own rows; operands that name a part are the op's products."""
    fused: Fused | None = op.epilogue
    parts = {p.name for p in op.parts}
    return [] if fused is None else [(name, ref) for name, ref in fused.args if isinstance(ref, ValueRef) and ref.value not in parts]


def needs_whole_rows(op: Linear) -> bool:
    """A prologue with reductions or vector operands must see all columns at once."""
    return bool(reductions(op.prologue.expr)) or len(op.prologue.args) > len(prologue_values(op))


def takes_chunks(op: Linear, schedule: Schedule) -> bool:
    """Whether the columns of the operand may come one after another: it needs no reduction, or has its row scale meet the products,
    and its last elements travel with the others, for those that come apart wait where a later chunk's sums meet."""
    if not needs_whole_rows(op):
        return True
    tagged = any(isinstance(schedule.edge(ref.value).sync, Tagged) for _, ref in prologue_values(op))
    return schedule.op(op.name).scale == "after" and not tagged


def vectors(op: Linear) -> list[tuple[str, WeightRef]]:
    """Vector weights of the prologue, in argument order: the order the loader streams them."""
    return [(name, ref) for name, ref in op.prologue.args if isinstance(ref, WeightRef)]
