"""rope: rotary position embedding of whole heads."""

from __future__ import annotations

from megadsl.diagnostics import Collector, declare
from megadsl.ir.spec import Node, Tensor
from megadsl.ops.base import Family, Outline, shape_text

ROPE_STYLE = declare(
    "MK118", "rope: unknown style {style!r}", 'use style="half" (Llama, pairs i and i + D/2) or style="interleaved" (2i, 2i + 1)'
)
ROPE_FEATURES = declare(
    "MK119",
    "rope: {tensor!r} of shape {shape} does not hold whole heads of {head_dim} features",
    "give head_dim= the width of one head; features must be heads * head_dim",
)
HEAD_DIM = declare("MK120", "{name}: head_dim {head_dim} is not supported", "use a head dimension of 64 or 128")
STYLES = ("half", "interleaved")
HEAD_DIMS = (64, 128)


def check_head_dim(node: Node, head_dim: int, found: Collector) -> bool:
    """Whether the head dimension is one the kernels are written for; MK120 when not."""
    if head_dim in HEAD_DIMS:
        return True
    found.add(HEAD_DIM, node.span, name=node.name, head_dim=head_dim)
    return False


def _outline(node: Node, inputs: tuple[Tensor, ...], found: Collector) -> tuple[Outline, ...]:
    head_dim = node.attrs["head_dim"]
    if node.attrs["style"] not in STYLES:
        found.add(ROPE_STYLE, node.span, style=node.attrs["style"])
    if check_head_dim(node, head_dim, found):
        for t in inputs:
            if len(t.shape) != 2 or t.shape[1] % head_dim:
                found.add(ROPE_FEATURES, node.span, tensor=t.name, shape=shape_text(t.shape), head_dim=head_dim)
    return tuple(Outline(t.shape) for t in inputs)


ROPE = Family("rope", _outline)
