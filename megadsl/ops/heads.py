"""head_map: an expression over each head of each token; norms of queries and keys are such maps."""

from __future__ import annotations

from megadsl.diagnostics import Collector, declare
from megadsl.ir.spec import Node, Tensor
from megadsl.ops.base import Family, Outline, shape_text
from megadsl.ops.map import MAP_NO_ACTIVATION, MAP_OPERAND, is_operand
from megadsl.ops.rope import MAPPED_DIMS, check_head_dim
from megadsl.types import Lifetime

ONE_ACTIVATION = declare(
    "MK233",
    "{name}: a map over heads of {head_dim} takes one activation, here are {count}: {tensors}",
    "map each of them by itself, or drop head_dim= where rows of all features are meant",
)
WHOLE_HEADS = declare(
    "MK227",
    "{name}: {tensor!r} of shape {shape} does not hold whole heads of {head_dim} features",
    "give head_dim= the width of one head; features must be heads * head_dim",
)
HEAD_VECTOR = declare(
    "MK228",
    "{name}: vector {tensor!r} has shape {shape}, but a map over heads of {head_dim} takes vectors of {head_dim} elements",
    "declare it with the length of one head, ({head_dim},): all heads share it",
)


def _outline(node: Node, inputs: tuple[Tensor, ...], found: Collector) -> tuple[Outline, ...]:
    head_dim = node.attrs["head_dim"]
    activations = [t for t in inputs if t.lifetime is Lifetime.ACTIVATION]
    first = activations[0] if activations else inputs[0]
    if not activations:
        found.add(MAP_NO_ACTIVATION, node.span, name=node.name)
    if len(activations) > 1:
        names = ", ".join(t.name for t in activations)
        found.add(ONE_ACTIVATION, node.span, name=node.name, head_dim=head_dim, count=len(activations), tensors=names)
    known = check_head_dim(node, head_dim, found, MAPPED_DIMS)
    for t in inputs:
        if not is_operand(t):
            found.add(MAP_OPERAND, node.span, name=node.name, tensor=t.name, shape=shape_text(t.shape))
        elif known and t in activations and t.shape[1] % head_dim:
            found.add(WHOLE_HEADS, node.span, name=node.name, tensor=t.name, shape=shape_text(t.shape), head_dim=head_dim)
        elif known and t not in activations and t.shape != (head_dim,):
            found.add(HEAD_VECTOR, node.span, name=node.name, tensor=t.name, shape=shape_text(t.shape), head_dim=head_dim)
    return (Outline(first.shape),)


HEAD_MAP = Family("head_map", _outline)
