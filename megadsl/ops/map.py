"""map: an expression over the features of one token; residual adds and norms are maps."""

from __future__ import annotations

from megadsl.diagnostics import Collector, declare
from megadsl.ir import graph
from megadsl.ir.spec import Node, Tensor
from megadsl.ops.base import Cost, Family, Outline, shape_text
from megadsl.types import DType, Lifetime

MAP_FEATURES = declare(
    "MK115",
    "{name}: operands disagree: {first!r} has shape {first_shape}, {other!r} has shape {other_shape}",
    "all operands of a map have the same number of features; a vector weight has one element per feature",
)
MAP_OPERAND = declare(
    "MK116",
    "{name}: operand {tensor!r} of shape {shape} is neither an activation [tokens, features] nor a vector weight [features]",
    "use mk.linear for matrices",
)
MAP_NO_ACTIVATION = declare(
    "MK117",
    "{name}: all operands are weights, so there is no token to run over",
    "give it at least one activation; fold constants into the weight before packing",
)


def is_operand(t: Tensor) -> bool:
    """Whether a map can read ``t``: an activation, or a vector weight."""
    if t.lifetime is Lifetime.WEIGHT:
        return len(t.shape) == 1
    return t.lifetime is Lifetime.ACTIVATION and t.dtype is DType.BF16


def _outline(node: Node, inputs: tuple[Tensor, ...], found: Collector) -> tuple[Outline, ...]:
    activations = [t for t in inputs if t.lifetime is Lifetime.ACTIVATION]
    first = activations[0] if activations else inputs[0]
    if not activations:
        found.add(MAP_NO_ACTIVATION, node.span, name=node.name)
    for t in inputs:
        if not is_operand(t):
            found.add(MAP_OPERAND, node.span, name=node.name, tensor=t.name, shape=shape_text(t.shape))
        elif t.shape[-1] != first.shape[-1]:
            found.add(
                MAP_FEATURES,
                node.span,
                name=node.name,
                first=first.name,
                first_shape=shape_text(first.shape),
                other=t.name,
                other_shape=shape_text(t.shape),
            )
    return (Outline(first.shape),)


MAP = Family("map", _outline)


def cost(op: graph.RowMap, tokens: int) -> Cost:
    """Vectors once; all values that are read, the one that is reduced as a whole, and the result through the exchange."""
    bf16 = DType.BF16.bytes
    vectors = sum(ref.shape[0] for _, ref in op.fused.args if isinstance(ref, graph.WeightRef))
    read = sum(ref.features for _, ref in graph.kept_values(op))
    return Cost(weight_bytes=vectors * bf16, exchange_bytes=tokens * (read + op.features) * bf16)
