"""argmax: the smallest index of the largest logit of each token."""

from __future__ import annotations

from megadsl.diagnostics import Collector, declare
from megadsl.ir.spec import Node, Tensor
from megadsl.ops.base import Family, Outline, shape_text
from megadsl.types import DType, Lifetime

ARGMAX_INPUT = declare(
    "MK124", "argmax: {tensor!r} of shape {shape} is not [tokens, vocabulary] logits", "pass the output of the last mk.linear"
)


def _outline(node: Node, inputs: tuple[Tensor, ...], found: Collector) -> tuple[Outline, ...]:
    (logits,) = inputs
    if logits.lifetime is not Lifetime.ACTIVATION or len(logits.shape) != 2:
        found.add(ARGMAX_INPUT, node.span, tensor=logits.name, shape=shape_text(logits.shape))
    return (Outline((logits.shape[0],), DType.I32, Lifetime.OUTPUT),)


ARGMAX = Family("argmax", _outline)
