"""Expressions as text: the canonical form that parses back, and C++ for the emitted kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megadsl.expr.fold import fp32
from megadsl.ir.expr import Arg, Binary, Const, Expr, Reduce, Unary

_SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**"}
_PRECEDENCE = {"add": 1, "sub": 1, "mul": 2, "div": 2, "neg": 3, "pow": 4}
_ATOM = 5


def decimal(value: float) -> str:
    """Shortest decimal that reads back as fp32(value), whether the reader goes through double or not."""
    exact = fp32(value)
    for digits in range(1, 10):
        text = f"{exact:.{digits}g}"
        near = float(text)
        # neighbours agree as well: then no double rounding can move the literal to another fp32
        if all(_reads_as(candidate, exact) for candidate in (near, math.nextafter(near, math.inf), math.nextafter(near, -math.inf))):
            return repr(near)
    raise AssertionError(f"nine digits identify every fp32, yet not {exact!r}")


def _reads_as(candidate: float, exact: float) -> bool:
    try:
        return fp32(candidate) == exact
    except ArithmeticError:
        return False


class _Text:
    """Prints with as few parentheses as precedence allows; keeps the tree's association, for fp32 is not associative."""

    operators = frozenset(_SYMBOLS)
    namespace = ""

    def const(self, value: float) -> str:
        return decimal(value).removesuffix(".0")

    def arg(self, name: str) -> str:
        return name

    def reduce(self, e: Reduce) -> str:
        return f"{e.op}({self.render(e.operand)})"

    def render(self, e: Expr, least: int = 0) -> str:
        """Text of ``e``, parenthesised when it binds less tightly than ``least``."""
        text, precedence = self._bare(e)
        return text if precedence >= least else f"({text})"

    def _bare(self, e: Expr) -> tuple[str, int]:
        match e:
            case Const(value):
                text = self.const(value)
                return text, _PRECEDENCE["neg"] if text.startswith("-") else _ATOM
            case Arg(name):
                return self.arg(name), _ATOM
            case Reduce():
                return self.reduce(e), _ATOM
            case Unary("neg", a):
                # an operand that is itself negated gets parentheses: -- is another operator in C++
                return f"-{self.render(a, _PRECEDENCE['neg'] + 1)}", _PRECEDENCE["neg"]
            case Unary(op, a):
                return f"{self.namespace}{op}({self.render(a)})", _ATOM
            case Binary(op, a, b):
                return self._binary(op, a, b)

    def _binary(self, op: str, a: Expr, b: Expr) -> tuple[str, int]:
        if op not in self.operators:
            return f"{self.namespace}{op}({self.render(a)}, {self.render(b)})", _ATOM
        own = _PRECEDENCE[op]
        left, right = (_ATOM, _PRECEDENCE["neg"]) if op == "pow" else (own, own + 1)
        return f"{self.render(a, left)} {_SYMBOLS[op]} {self.render(b, right)}", own


class _Cuda(_Text):
    operators = frozenset({"add", "sub", "mul", "div"})
    namespace = "mk::math::"

    def __init__(self, names: Mapping[str, str], reduced: Mapping[Reduce, str]) -> None:
        self.names = names
        self.reduced = reduced

    def const(self, value: float) -> str:
        return decimal(value) + "f"

    def arg(self, name: str) -> str:
        return self.names[name]

    def reduce(self, e: Reduce) -> str:
        return self.reduced[e]


def to_text(e: Expr) -> str:
    """Canonical text of ``e``. For a folded ``e`` (what parse returns): parse(to_text(e), span, arg_names(e)) == e."""
    return _Text().render(e)


def to_cuda(e: Expr, names: Mapping[str, str], reduced: Mapping[Reduce, str]) -> str:
    """``e`` as one C++ expression of type float, for nvcc and for g++.

    ``names`` gives each argument and ``reduced`` each outermost reduction as a C++ primary expression (an identifier, a
    call, an indexing, something parenthesised) of type float. Functions become ``mk::math::<op>``, also max, min, pow.
    Reductions are computed elsewhere, one statement each in the order of ir.expr.reductions: their operands are printed
    by further calls. Raises KeyError for an argument or reduction without text.
    """
    return _Cuda(names, reduced).render(e)
