"""Text to expression tree. Every mistake is a diagnostic with a caret below the place in the text."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import cast

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedToken

from megadsl.diagnostics import Collector, MegadslError, declare, error
from megadsl.expr.fold import fold, fp32
from megadsl.expr.grammars import parser
from megadsl.ir.expr import BINARY_OPS, REDUCE_OPS, UNARY_OPS, Arg, Binary, Const, Expr, Reduce, Unary
from megadsl.source import Span

MISSING_OPERAND = declare("MK201", "an operand is missing {where}", "write a name, a number, a call or something in parentheses there")
UNBALANCED = declare("MK202", "parentheses do not balance: {what}", "close each '(' with one ')' or drop the odd one")
UNKNOWN_CHARACTER = declare(
    "MK203", "{character!r} cannot be part of an expression", "use names, numbers, + - * / **, parentheses and commas; a power is x ** 2"
)
MISSING_OPERATOR = declare("MK204", "an operator is missing before {token!r}", "write one of + - * / ** there")
STRAY_COMMA = declare("MK205", "a comma outside the arguments of a call", "commas separate arguments, as in max(a, b); drop this one")
UNKNOWN_NAME = declare("MK206", "unknown name {name!r}", "{hint} (known names: {known})")
UNKNOWN_FUNCTION = declare("MK207", "unknown function {name!r}", "{hint} (known functions: {known})")
WRONG_ARITY = declare("MK208", "{name} takes {wanted}, here it has {found}", "write {example}")
UNUSED_NAME = declare("MK209", "{name!r} is given but the expression does not use it", "use it in the expression or do not pass it")
NOT_FINITE = declare(
    "MK210",
    "the constant {text!r} has no finite fp32 value or vanishes in fp32",
    "use magnitudes between 1e-45 and 3.4e38 and defined operations",
)
TOO_DEEP = declare("MK211", "the expression is nested deeper than {limit} levels", "split it into several mk.map calls")

MAX_DEPTH = 200
_OPERATORS = frozenset({"add", "sub", "mul", "div", "pow"})
_CALLED_BINARY = frozenset(BINARY_OPS) - _OPERATORS
FUNCTIONS = tuple(sorted({*UNARY_OPS, *_CALLED_BINARY, *REDUCE_OPS}))


def parse(text: str, span: Span, args: Collection[str], constants: Mapping[str, float] = MappingProxyType({})) -> Expr:
    """The tree of ``text``; subtrees of constants only are folded in fp32.

    ``args`` are the names of tensors, ``constants`` names with a value; a name may be in one of them only (ValueError).
    Functions: UNARY_OPS, max and min of two arguments, the row reductions sum, mean and max of one argument; reductions
    may nest. Raises MegadslError with MK201 to MK211, its ``span`` is ``span`` and its ``detail`` the text with a caret.
    """
    both = set(args) & set(constants)
    if both:
        raise ValueError(f"names both of tensors and of constants: {sorted(both)}")
    builder = _Builder(text, span, args, constants)
    return builder.finish(builder.build(_tree(text, span), 1))


@cache
def _lark() -> Lark:
    return parser(__package__, "grammar.lark", "start", maybe_placeholders=False)


def _tree(text: str, span: Span) -> Tree[Token]:
    try:
        return _lark().parse(text)
    except UnexpectedCharacters as unread:
        at = cast(int, unread.pos_in_stream)  # lark declares it as None and always sets it
        raise error(UNKNOWN_CHARACTER, span, _caret(text, at, at + 1), character=text[at]) from None
    except UnexpectedToken as unexpected:
        raise _syntax_error(text, span, unexpected.token, unexpected.accepts) from None


def _syntax_error(text: str, span: Span, token: Token, accepts: Collection[str]) -> MegadslError:
    """What the parser would have taken instead names the mistake: every state of the grammar falls into one case."""
    ended = token.type == "$END"
    begin, end = (len(text.rstrip()),) * 2 if ended else _extent(token)
    caret = _caret(text, begin, end)
    if ended and "RPAR" in accepts:
        opened = _last_open(text)
        return error(UNBALANCED, span, _caret(text, opened, opened + 1), what="this '(' is never closed")
    if "NAME" in accepts:
        return error(MISSING_OPERAND, span, caret, where="at the end" if ended else f"before {str(token)!r}")
    if token.type == "RPAR":
        return error(UNBALANCED, span, caret, what="this ')' closes nothing")
    if token.type == "COMMA":
        return error(STRAY_COMMA, span, caret)
    return error(MISSING_OPERATOR, span, caret, token=str(token))


def _last_open(text: str) -> int:
    stack: list[int] = []
    for index, character in enumerate(text):
        if character == "(":
            stack.append(index)
        elif character == ")":
            stack.pop()
    return stack[-1]


def _extent(node: Tree[Token] | Token) -> tuple[int, int]:
    where = node if isinstance(node, Token) else node.meta
    assert where.start_pos is not None and where.end_pos is not None, "every node covers text"
    return where.start_pos, where.end_pos


def _caret(text: str, begin: int, end: int) -> str:
    """The line of ``text`` that holds ``begin``, and carets under [begin, end) as far as it is on that line."""
    first = text.rfind("\n", 0, begin) + 1
    line = text[first:].split("\n", 1)[0]
    width = max(1, min(end, first + len(line)) - begin)
    padding = "".join("\t" if c == "\t" else " " for c in line[: begin - first])
    return f"    {line}\n    {padding}{'^' * width}"


class _Builder:
    """Turns lark's tree into ours and gathers what is wrong with names, functions and constants."""

    def __init__(self, text: str, span: Span, args: Collection[str], constants: Mapping[str, float]) -> None:
        self.text = text
        self.span = span
        self.args = args
        self.constants = constants
        self.used: set[str] = set()
        self.problems = Collector()

    def finish(self, e: Expr) -> Expr:
        if not self.problems.found:  # a misspelt name would be reported twice, as unknown and as unused
            for name in (*self.args, *self.constants):
                if name not in self.used:
                    self.problems.add(UNUSED_NAME, self.span, self._at(0, len(self.text)), name=name)
        self.problems.raise_if_any()
        return e

    def build(self, node: Tree[Token] | Token, depth: int) -> Expr:
        """Never fails on a wrong name or function: it notes the problem and goes on to find the others."""
        assert isinstance(node, Tree), "the grammar leaves no bare token where an expression stands"
        if depth > MAX_DEPTH:
            begin, _ = _extent(node)
            raise error(TOO_DEEP, self.span, self._at(begin, begin + 1), limit=MAX_DEPTH)
        match node.data:
            case "number":
                return self._number(node)
            case "name":
                return self._name(node)
            case "call":
                return self._call(node, depth)
            case "neg":
                return self._fold(Unary("neg", self.build(node.children[0], depth + 1)), node)
            case operation:
                left, right = (self.build(child, depth + 1) for child in node.children)
                return self._fold(Binary(operation, left, right), node)

    def _at(self, begin: int, end: int) -> str:
        return _caret(self.text, begin, end)

    def _add(self, code: str, node: Tree[Token] | Token, **fields: object) -> None:
        self.problems.add(code, self.span, self._at(*_extent(node)), **fields)

    def _constant(self, value: float, node: Tree[Token], text: str) -> Const:
        try:
            rounded = fp32(value)
        except ArithmeticError:
            rounded = 0.0
        if rounded == 0.0 != value:
            self._add(NOT_FINITE, node, text=text)
        return Const(rounded)

    def _number(self, node: Tree[Token]) -> Const:
        literal = str(node.children[0])
        return self._constant(float(literal), node, literal)

    def _name(self, node: Tree[Token]) -> Expr:
        name = str(node.children[0])
        self.used.add(name)
        if name in self.constants:
            value = self.constants[name]
            return self._constant(value, node, f"{name} = {value}")
        if name not in self.args:
            known = sorted({*self.args, *self.constants})
            hint = f"a function is called: {name}(...)" if name in FUNCTIONS else _hint(name, known)
            self._add(UNKNOWN_NAME, node, name=name, hint=hint, known=", ".join(known) or "none")
        return Arg(name)

    def _call(self, node: Tree[Token], depth: int) -> Expr:
        token, *rest = node.children
        operands = [self.build(child, depth + 1) for child in rest]
        name, count = str(token), len(operands)
        if name not in FUNCTIONS:
            self._add(UNKNOWN_FUNCTION, token, name=name, hint=_hint(name, FUNCTIONS), known=", ".join(FUNCTIONS))
        elif name in _CALLED_BINARY and count == 2:
            return self._fold(Binary(name, operands[0], operands[1]), node)
        elif name in REDUCE_OPS and count == 1:
            return self._fold(Reduce(name, operands[0]), node)
        elif name in UNARY_OPS and count == 1:
            return self._fold(Unary(name, operands[0]), node)
        else:
            wanted, example = _arity(name)
            self._add(WRONG_ARITY, node, name=name, wanted=wanted, found=count, example=example)
        return Arg(name)  # never leaves: finish raises

    def _fold(self, e: Expr, node: Tree[Token]) -> Expr:
        try:
            return fold(e)
        except ArithmeticError:
            begin, end = _extent(node)
            self._add(NOT_FINITE, node, text=self.text[begin:end])
            return e


def _hint(name: str, known: Collection[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else "correct the name"


def _arity(name: str) -> tuple[str, str]:
    if name in _CALLED_BINARY and name in REDUCE_OPS:
        return "one argument (over the row) or two", f"{name}(x) or {name}(x, y)"
    if name in _CALLED_BINARY:
        return "two arguments", f"{name}(x, y)"
    return "one argument", f"{name}(x)"
