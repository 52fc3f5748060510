"""custom: a role function in the user's own header, over whole rows of activations and over weights."""

from __future__ import annotations

from megadsl.diagnostics import Collector, declare
from megadsl.ir import graph
from megadsl.ir.custom import CustomCall
from megadsl.ir.spec import Node, Tensor
from megadsl.ops.base import Cost, Family, Outline, shape_text
from megadsl.types import DType, Lifetime

CUSTOM_OPERAND = declare(
    "MK276",
    "custom op {name!r}: argument {arg!r} is {tensor!r} of shape {shape}, {why}",
    "pass activations [tokens, features], at least one, and weights of one or two dimensions",
)
CUSTOM_FEATURES = declare(
    "MK277",
    "custom op {name!r} has outputs of {features} features",
    "give each output a positive multiple of {unit} features: blocks own them in groups of {unit}",
)
UNIT = 8  # features of a group


def _refused(t: Tensor) -> str:
    """Why a custom op cannot read ``t``; "" where it can."""
    if t.lifetime is Lifetime.WEIGHT:
        return "" if len(t.shape) <= 2 else "a weight of more than two dimensions"
    if t.lifetime is not Lifetime.ACTIVATION or t.dtype is not DType.BF16:
        return f"which is {t.dtype.value} of lifetime {t.lifetime.value}"
    return ""


def _outline(node: Node, inputs: tuple[Tensor, ...], found: Collector) -> tuple[Outline, ...]:
    call: CustomCall = node.attrs["call"]
    activations = [t for t in inputs if t.lifetime is Lifetime.ACTIVATION]
    for arg, t in zip(call.args, inputs, strict=True):
        why = _refused(t) or ("" if activations else "a weight, as all others are: there is no token to run over")
        if why:
            found.add(CUSTOM_OPERAND, node.span, name=node.name, arg=arg, tensor=t.name, shape=shape_text(t.shape), why=why)
    if any(features % UNIT for features in call.parts):
        found.add(CUSTOM_FEATURES, node.span, name=node.name, features=", ".join(map(str, call.parts)), unit=UNIT)
    tokens = activations[0].shape[0] if activations else 1
    return tuple(Outline((tokens, features)) for features in call.parts)


CUSTOM = Family("custom", _outline)


def weight_elements(ref: graph.WeightRef) -> int:
    """Elements of a weight of any shape."""
    count = 1
    for size in ref.shape:
        count *= size
    return count


def cost(op: graph.Custom, tokens: int) -> Cost:
    """Weights once, rows and results through the exchange, operations as the op declares them."""
    features = sum(ref.features for _, ref in op.inputs) + op.call.features
    return Cost(
        flops=tokens * op.call.flops,
        weight_bytes=sum(weight_elements(ref) for _, ref in op.weights) * DType.BF16.bytes,
        exchange_bytes=tokens * features * DType.BF16.bytes,
    )
