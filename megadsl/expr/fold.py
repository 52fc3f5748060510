"""Constant folding in fp32: operands are fp32 values, results are rounded to fp32."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable

from megadsl.ir.expr import Binary, Const, Expr, Reduce, Unary


def fp32(value: float) -> float:
    """``value`` rounded to the nearest fp32. Raises ArithmeticError when that is not finite."""
    if not math.isfinite(value):
        raise ArithmeticError(f"{value} is not finite")
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def _sigmoid(x: float) -> float:
    # exp of a positive argument would overflow for a result that is merely tiny
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def _gelu_tanh(x: float) -> float:
    return 0.5 * x * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


_UNARY: dict[str, Callable[[float], float]] = {
    "neg": operator.neg,
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1.0 / math.sqrt(x),
    "abs": abs,
    "tanh": math.tanh,
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1.0 + math.erf(x / math.sqrt(2.0))),
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: max(x, 0.0),
    "square": lambda x: x * x,
}
_BINARY: dict[str, Callable[[float, float], float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
    "min": min,
    "pow": math.pow,
}


def fold(e: Expr) -> Expr:
    """``e`` as one Const when all its operands are Consts, else ``e`` itself; operands are taken as already folded.

    The sum of a constant over a row stays: the row's length is not known here. Raises ArithmeticError when the result
    is not a finite fp32 (1 / 0, log(-1), exp(200)).
    """
    try:
        match e:
            case Unary(op, Const(a)):
                return Const(fp32(_UNARY[op](a)))
            case Binary(op, Const(a), Const(b)):
                return Const(fp32(_BINARY[op](a, b)))
            case Reduce("mean" | "max", Const(a)):
                return Const(a)
            case _:
                return e
    except ValueError as outside_domain:
        raise ArithmeticError(str(outside_domain)) from outside_domain
