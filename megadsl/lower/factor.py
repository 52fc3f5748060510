"""Factors that are the same for a whole row, taken out of prologues: they may multiply the products instead of the operand.

``x * rsqrt(mean(x * x) + eps) * w`` is ``operand = x * w`` times ``scale = rsqrt(mean(x * x) + eps)``. The operand needs no
reduction, so that each element is final when it arrives, and the scale is not needed before the first products are finished.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

from megadsl.ir.expr import Binary, Const, Expr, Unary, arg_names, reductions, varies
from megadsl.ir.graph import Factored, Graph, Linear
from megadsl.ir.schedule import Schedule
from megadsl.lower.operands import prologue_values

ONE = Const(1.0)


def factor(graph: Graph, schedule: Schedule) -> Graph:
    """``graph`` with the prologues factored whose ops the schedule scales after their products."""
    ops = tuple(
        replace(op, factored=factored(op)) if isinstance(op, Linear) and schedule.op(op.name).scale == "after" else op for op in graph.ops
    )
    return replace(graph, ops=ops)


def factored(op: Linear) -> Factored | None:
    """The prologue's two factors; None where it has no such form.

    A prologue of one gathered value, which the operand reads, and a scale of at least one reduction, each over that value
    alone and none inside another.
    """
    values = [name for name, _ in prologue_values(op)]
    found = _factors(op.prologue.expr)
    if found is None or len(values) != 1:
        return None
    varying = [f for f in found if varies(f)]
    scales = [f for f in found if not varies(f)]
    if any(reductions(f) for f in varying) or not any(reductions(f) for f in scales):
        return None
    operand, scale = (reduce(_times, factors) for factors in (varying, scales)) if varying else (ONE, ONE)
    inner = [r.operand for r in reductions(scale)]
    if values[0] not in arg_names(operand) or any(reductions(e) or set(arg_names(e)) - set(values) for e in inner):
        return None
    return Factored(operand, scale)


def _factors(e: Expr) -> list[Expr] | None:
    """Factors of a product, in order; a divisor counts as one over it. None where one mixes both kinds."""
    match e:
        case Binary("mul", a, b):
            left, right = _factors(a), _factors(b)
            return None if left is None or right is None else left + right
        case Binary("div", a, b) if a != ONE:
            left, right = _factors(a), _factors(Binary("div", ONE, b))
            return None if left is None or right is None else left + right
        case Unary("neg", a):
            inner = _factors(a)
            return None if inner is None else [Const(-1.0), *inner]
        case _:
            return None if varies(e) and reductions(e) else [e]


def _times(a: Expr, b: Expr) -> Expr:
    """a * b; a divisor is a divisor again."""
    match b:
        case Binary("div", Const(1.0), c):
            return Binary("div", a, c)
        case _:
            return Binary("mul", a, b)
