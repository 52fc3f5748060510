"""One line of a schedule file: who decides what, where it stands, and the comment behind it. Names and values are judged elsewhere."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import cast

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedToken

from megadsl.diagnostics import Collector, declare
from megadsl.dsl.knob_values import Raw
from megadsl.expr.grammars import parser
from megadsl.source import Span

MALFORMED = declare(
    "MK261",
    "this line is no statement of a schedule: {what}",
    "{how}; a statement is `knob = value`, `op NAME: knob = value` or `edge OP -> READER: sync = value`",
)

_SAID = {
    "EQUAL": "'='",
    "COLON": "':'",
    "COMMA": "','",
    "LPAR": "'('",
    "RPAR": "')'",
    "ARROW": "'->'",
    "DOTS": "'..'",
    "NAME": "a name",
    "STRING": "a text in quotes",
    "NUMBER": "a number",
    "COMMENT": "a comment",
    "$END": "nothing",
}


@dataclass(frozen=True)
class Statement:
    """``of subject: knob = value``; of is "" and there is no subject where the line begins with the knob. Spans: of the statement, the
    knob and the value."""

    of: str
    subject: tuple[str, ...]
    knob: str
    value: Raw
    span: Span
    at_knob: Span
    at_value: Span


def read_line(text: str, file: str, number: int, found: Collector) -> tuple[Statement | None, str]:
    """The statement and the comment of line ``number``; MK261 is added to ``found`` for what is neither."""

    def misread(column: int, what: str, how: str) -> tuple[Statement | None, str]:
        found.add(MALFORMED, Span(file, number, column), what=what, how=how)
        return None, ""

    try:
        tree = _lark().parse(text)
    except UnexpectedCharacters as unread:
        column = cast(int, unread.pos_in_stream) + 1  # lark declares it as None and always sets it
        return misread(column, f"{text[column - 1]!r} has no place", f"write {_expected(unread.allowed or ())} there")
    except UnexpectedToken as unexpected:
        ended = unexpected.token.type == "$END"
        column = len(text.rstrip()) + 1 if ended else cast(int, unexpected.token.column)
        what = "something is missing at the end" if ended else f"{str(unexpected.token)!r} has no place"
        return misread(column, what, f"write {_expected(unexpected.accepts)} there")
    statement, comment = tree.children
    try:
        read = None if statement is None else _statement(cast(Tree[Token], statement), file, number)
    except _Repeated as repeated:
        return misread(repeated.column, f"{repeated.name!r} is given twice", "keep one of the two")
    except json.JSONDecodeError as wrong:
        return misread(text.index('"') + 1, f"a text that cannot be read: {wrong.msg}", "write quotes and backslashes as JSON does")
    return read, str(comment or "").rstrip()


@cache
def _lark() -> Lark:
    return parser(__package__, "schedule.lark", "line", maybe_placeholders=True)


def _expected(terminals: Collection[str]) -> str:
    return " or ".join(said for terminal, said in _SAID.items() if terminal in terminals)


class _Repeated(Exception):
    """An argument that is given twice."""

    def __init__(self, name: str, column: int) -> None:
        super().__init__(name)
        self.name = name
        self.column = column


def _statement(tree: Tree[Token], file: str, number: int) -> Statement:
    subject, knob, value = tree.children
    assert isinstance(knob, Token) and isinstance(value, Tree)
    of, names = "", tuple[str, ...]()
    if isinstance(subject, Tree):
        kind, first, _, second = subject.children
        of, names = str(kind), tuple(_name(name) for name in (first, second) if name is not None)
    at = [Span(file, number, cast(int, column)) for column in (tree.meta.column, knob.column, value.meta.column)]
    return Statement(of, names, str(knob), _raw(value), *at)


def _name(tree: Tree[Token] | Token) -> str:
    (token,) = cast(Tree[Token], tree).children
    assert isinstance(token, Token)
    return _text(token) if token.type == "STRING" else str(token)


def _text(token: Token) -> str:
    return str(json.loads(str(token)))


def _raw(tree: Tree[Token]) -> Raw:
    head, *rest = tree.children
    assert isinstance(head, Token)
    match tree.data:
        case "number":
            return Raw("number", str(head), None if rest[0] is None else str(rest[0]))
        case "range":
            return Raw("range", f"{head}..{rest[1]}")
        case "text":
            return Raw("text", _text(head))
        case "call":
            return Raw("call", str(head), arguments=_arguments([cast(Tree[Token], a) for a in rest if a is not None]))
        case _:
            return Raw("word", str(head))


def _arguments(trees: list[Tree[Token]]) -> MappingProxyType[str, Raw]:
    found: dict[str, Raw] = {}
    for tree in trees:
        name, value = tree.children
        assert isinstance(name, Token) and isinstance(value, Tree)
        if str(name) in found:
            raise _Repeated(str(name), cast(int, name.column))
        found[str(name)] = _raw(value)
    return MappingProxyType(found)
