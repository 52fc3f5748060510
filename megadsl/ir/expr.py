"""Expression trees: the typed meaning of ``mk.map``, row reductions, prologues and epilogues.

Scalars are fp32. A *row* is one token's features. ``Arg`` varies along the row, ``Reduce`` collapses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Const:
    """An fp32 literal."""

    value: float


@dataclass(frozen=True)
class Arg:
    """The element of the named argument at the current feature (or, for a vector weight, its element)."""

    name: str


@dataclass(frozen=True)
class Unary:
    """``op`` in UNARY_OPS applied to one operand."""

    op: str
    operand: Expr


@dataclass(frozen=True)
class Binary:
    """``op`` in BINARY_OPS applied to two operands."""

    op: str
    left: Expr
    right: Expr


@dataclass(frozen=True)
class Reduce:
    """``op`` in REDUCE_OPS over all features of the row; the operand is elementwise. fp32 accumulation."""

    op: str
    operand: Expr


Expr: TypeAlias = Const | Arg | Unary | Binary | Reduce

UNARY_OPS = ("neg", "exp", "log", "sqrt", "rsqrt", "abs", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh", "relu", "square")
BINARY_OPS = ("add", "sub", "mul", "div", "max", "min", "pow")
REDUCE_OPS = ("sum", "mean", "max")


def children(e: Expr) -> tuple[Expr, ...]:
    """Direct operands, left to right."""
    match e:
        case Const() | Arg():
            return ()
        case Unary(_, a) | Reduce(_, a):
            return (a,)
        case Binary(_, a, b):
            return (a, b)


def varies(e: Expr) -> bool:
    """Whether ``e`` differs from feature to feature of one row."""
    return isinstance(e, Arg) or (not isinstance(e, Reduce) and any(varies(child) for child in children(e)))


def arg_names(e: Expr) -> tuple[str, ...]:
    """Names of all arguments, each once, in order of first use."""
    seen: dict[str, None] = {}

    def walk(node: Expr) -> None:
        if isinstance(node, Arg):
            seen.setdefault(node.name)
        for child in children(node):
            walk(child)

    walk(e)
    return tuple(seen)


def reductions(e: Expr) -> tuple[Reduce, ...]:
    """All distinct reductions, innermost first, so that each only needs those before it."""
    found: dict[Reduce, None] = {}

    def walk(node: Expr) -> None:
        for child in children(node):
            walk(child)
        if isinstance(node, Reduce):
            found.setdefault(node)

    walk(e)
    return tuple(found)


def substitute(e: Expr, by: dict[str, Expr]) -> Expr:
    """``e`` with each argument named in ``by`` replaced by its expression."""
    match e:
        case Const():
            return e
        case Arg(name):
            return by.get(name, e)
        case Unary(op, a):
            return Unary(op, substitute(a, by))
        case Reduce(op, a):
            return Reduce(op, substitute(a, by))
        case Binary(op, a, b):
            return Binary(op, substitute(a, by), substitute(b, by))
