"""Accesses to a block's shared memory, and its barriers: what the checker's streams (areas.py) are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from megadsl.check.model import Step
from megadsl.lower.tiling import PANEL
from megadsl.types import ceil_div


@dataclass(frozen=True)
class Access:
    """Bytes [begin, begin + size) of ``area``. ``own``: each thread touches only what it wrote itself before. ``holds`` tells what is
    written from anything else that these bytes may hold, and what a read needs to find there. ``solo`` names the one warp that does it,
    and meets itself before the next; "" where several do."""

    area: str
    begin: int
    size: int
    write: bool
    step: Step
    holds: tuple[object, ...]
    own: bool = False
    solo: str = ""


@dataclass(frozen=True)
class Meet:
    """The block's barrier: everything before it is over. ``team``: of the warps that multiply, while another one finishes."""

    name: str
    team: bool = False


Event: TypeAlias = Access | Meet


def some_rows(area: Access, rows: range, columns: int, height: int) -> Iterator[Access]:
    """The bytes of some rows, where ``height`` of them lie side by side panel by panel; they begin with the first, or are within
    ``height``."""
    line, panels = PANEL * 2, ceil_div(columns, PANEL)
    whole, rest = (0, rows) if rows.start else (len(rows) // height, range(len(rows) % height))
    if whole:
        yield replace(area, size=whole * height * panels * line)
    for panel in range(panels if rest else 0):
        begin = area.begin + ((whole * panels + panel) * height + rest.start) * line
        yield replace(area, begin=begin, size=len(rest) * line)


def mapped(gathered: Access) -> Access:
    return replace(gathered, holds=(*gathered.holds, "mapped"))


def reading(a: Access) -> Access:
    return replace(a, write=False)
