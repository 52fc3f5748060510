"""Parsers of grammars, whose tables are kept: to work them out takes longer than all that is parsed by them."""

from __future__ import annotations

import io
import sys
from importlib.resources import files

import lark

from megadsl.entries import SmallEntries

_TABLES = SmallEntries(".grammar")


def parser(package: str, grammar: str, start: str, *, maybe_placeholders: bool) -> lark.Lark:
    """An LALR parser with positions of the grammar in file ``grammar`` of ``package``."""
    text = files(package).joinpath(grammar).read_text(encoding="utf-8")
    key = (text, start, str(maybe_placeholders), lark.__version__, sys.version)
    if (kept := _TABLES.load(key)) is not None:
        return lark.Lark.load(io.BytesIO(kept))
    made = lark.Lark(text, start=start, parser="lalr", propagate_positions=True, maybe_placeholders=maybe_placeholders)
    tables = io.BytesIO()
    made.save(tables)
    _TABLES.store(key, tables.getvalue())
    return made
