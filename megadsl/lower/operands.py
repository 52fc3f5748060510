"""What a linear's prologue and epilogue, an attention's maps over heads and a custom op read, sorted by how it reaches the block."""

from __future__ import annotations

from megadsl.ir.expr import reductions
from megadsl.ir.graph import Attention, Custom, Linear, RowMap, ValueRef, WeightRef
from megadsl.ir.schedule import Schedule, Tagged
from megadsl.lower.tiling import GROUP_ROWS
from megadsl.types import DType, ceil_div


def prologue_values(op: Linear) -> list[tuple[str, ValueRef]]:
    """Gathered operands of a prologue, in argument order."""
    return [(name, ref) for name, ref in op.prologue.args if isinstance(ref, ValueRef)]


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


def vectors(op: Linear | Custom | RowMap) -> list[tuple[str, WeightRef]]:
    """Vector weights of the prologue, or a custom op's weights, in argument order: the order the loader streams them. Of a map of rows
    those that a block reads from memory, as far as it owns their features."""
    if isinstance(op, Custom):
        return list(op.weights)
    fused = op.prologue if isinstance(op, Linear) else op.fused
    return [(name, ref) for name, ref in fused.args if isinstance(ref, WeightRef)]


def head_vectors(op: Attention) -> list[tuple[str, str, WeightRef]]:
    """Vector weights of the maps over heads: (q or k, argument, weight)."""
    return [(which, name, ref) for which, fused in op.maps for name, ref in fused.args if isinstance(ref, WeightRef)]


def input_area(op: Custom, arg: str) -> str:
    """The area of shared memory where the rows of a custom op's input lie."""
    return f"{op.name}.{arg}.rows"


def scratch_area(op: Custom) -> str:
    """The area that belongs to a custom op's function while it runs."""
    return f"{op.name}.scratch"


def row_bytes(ref: ValueRef) -> int:
    """Bytes of a row of a custom op's input: whole units."""
    return ceil_div(ref.features, GROUP_ROWS) * GROUP_ROWS * DType.BF16.bytes
