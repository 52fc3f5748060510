"""linear: x @ weight.T for one weight, or for several stacked by rows."""

from __future__ import annotations

from collections.abc import Sequence

from megadsl.diagnostics import Collector, declare
from megadsl.ir import graph
from megadsl.ir.expr import arg_names
from megadsl.ir.formats import FORMATS, PANEL_COLUMNS, PANEL_ROWS
from megadsl.ir.spec import Node, Tensor
from megadsl.ops.base import Cost, Family, Outline, shape_text
from megadsl.types import DType, Lifetime

LINEAR_RANK = declare(
    "MK112",
    "linear {name!r}: weight {weight!r} has shape {shape}, but a matrix is [rows, columns]",
    "declare it with two dimensions: (out_features, in_features)",
)
LINEAR_COLUMNS = declare(
    "MK113",
    "linear {name!r}: the input has {features} features (shape {x_shape}), weight {weight!r} has {columns} columns (shape {shape})",
    "make the weight's second dimension {features}, or feed an input of {columns} features",
)
BIAS_SHAPE = declare(
    "MK250",
    "linear {name!r}: bias {bias!r} has shape {shape}, weight {weight!r} has {rows} rows",
    "declare the bias with one dimension: ({rows},)",
)
BIAS_COUNT = declare("MK251", "linear {name!r} has {weights} weights and {biases} biases", "give bias= one vector for each weight")
LINEAR_INPUT = declare(
    "MK114",
    "linear {name!r}: {tensor!r} of shape {shape} is not an activation of shape [tokens, features]",
    "the first argument is the activation, the weights follow",
)


def _outline(node: Node, inputs: tuple[Tensor, ...], found: Collector) -> tuple[Outline, ...]:
    x, *rest = inputs
    weights, biases = rest[: node.attrs.get("weights", len(rest))], rest[node.attrs.get("weights", len(rest)) :]
    if x.lifetime is not Lifetime.ACTIVATION or len(x.shape) != 2:
        found.add(LINEAR_INPUT, node.span, name=node.name, tensor=x.name, shape=shape_text(x.shape))
    for w in weights:
        if len(w.shape) != 2:
            found.add(LINEAR_RANK, node.span, name=node.name, weight=w.name, shape=shape_text(w.shape))
        elif len(x.shape) == 2 and w.shape[1] != x.shape[1]:
            found.add(
                LINEAR_COLUMNS,
                node.span,
                name=node.name,
                features=x.shape[1],
                x_shape=shape_text(x.shape),
                weight=w.name,
                columns=w.shape[1],
                shape=shape_text(w.shape),
            )
    _check_biases(node, weights, biases, found)
    return tuple(Outline((x.shape[0], w.shape[0])) for w in weights)


def _check_biases(node: Node, weights: Sequence[Tensor], biases: Sequence[Tensor], found: Collector) -> None:
    if biases and len(biases) != len(weights):
        found.add(BIAS_COUNT, node.span, name=node.name, weights=len(weights), biases=len(biases))
        return
    for w, b in zip(weights, biases, strict=bool(biases)):
        if b.lifetime is not Lifetime.WEIGHT or b.shape != w.shape[:1]:
            found.add(BIAS_SHAPE, node.span, name=node.name, bias=b.name, shape=shape_text(b.shape), weight=w.name, rows=w.shape[0])


LINEAR = Family("linear", _outline)


def _operand_features(fused: graph.Fused | None, own_parts: set[str]) -> int:
    """Features of all values that an expression reads from the exchange."""
    if fused is None:
        return 0
    used = set(arg_names(fused.expr))
    refs = [ref for name, ref in fused.args if name in used and name not in own_parts]
    return sum(ref.features for ref in refs if isinstance(ref, graph.ValueRef))


def _vector_bytes(fused: graph.Fused | None) -> int:
    if fused is None:
        return 0
    return sum(ref.shape[0] * DType.BF16.bytes for _, ref in fused.args if isinstance(ref, graph.WeightRef))


def cost(op: graph.Linear, tokens: int) -> Cost:
    """Matrix and vector weights once, operands and result through the exchange; logits leave as fp32."""
    panel = FORMATS[op.format]
    weights = op.rows * op.columns * panel.panel_bytes // (PANEL_ROWS * PANEL_COLUMNS) + (
        op.rows * DType.F32.bytes if panel.row_scale else 0
    )
    weights += _vector_bytes(op.prologue) + _vector_bytes(op.epilogue)
    weights += op.rows * DType.BF16.bytes if op.biased else 0
    read = _operand_features(op.prologue, set()) + _operand_features(op.epilogue, {p.name for p in op.parts})
    written = op.rows * DType.F32.bytes if op.sink else op.out_features * DType.BF16.bytes
    return Cost(
        flops=2 * tokens * op.rows * op.columns,
        weight_bytes=weights,
        exchange_bytes=tokens * (read * DType.BF16.bytes + written),
    )
