"""What a knob of a schedule can be set to, and how that stands in a schedule file: numbers, bytes, words, names, syncs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from megadsl.ir.schedule import Flag, Sentinel, Tagged
from megadsl.types import KIB, MIB, Level

UNITS = {"MiB": MIB, "KiB": KIB, "B": 1}
_PLAIN = re.compile(r"[A-Za-z_]([\w.]|-(?!>))*(?<!-)")
_DIGITS = 15  # no size has more
_SYNCS: Mapping[str, type[Tagged] | type[Sentinel] | type[Flag]] = {"tagged": Tagged, "sentinel": Sentinel, "flag": Flag}


@dataclass(frozen=True)
class Raw:
    """A value as it was read, not yet judged. kind: number, range, word, text, call; ``head`` is the number, the word or the text."""

    kind: str
    head: str
    unit: str | None = None
    arguments: Mapping[str, Raw] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        if self.kind == "call":
            return f"{self.head}({', '.join(f'{name} = {value}' for name, value in self.arguments.items())})"
        shown = quoted(self.head) if self.kind == "text" else self.head
        return f"{shown} {self.unit}" if self.unit else shown


class Misfit(Exception):
    """A value that a knob cannot take. ``unit``: only its unit is wrong. ``why``, where the list of possible values does not say it."""

    def __init__(self, why: str = "", *, unit: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.unit = unit


class Values(Protocol):
    """All that a knob can be set to."""

    @property
    def possible(self) -> str:
        """In words, for a table or a mend."""

    def read(self, raw: Raw) -> object:
        """The value; Misfit when it is none of these."""

    def write(self, value: object) -> str:
        """As it stands in a file; ``read`` gives the same value."""


def quoted(text: str) -> str:
    """A string as a file has it."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def name_text(name: str) -> str:
    """A name as a file has it: in quotes where it would not be read as one word."""
    return name if _PLAIN.fullmatch(name) else quoted(name)


@dataclass(frozen=True)
class Count:
    """A whole number of at least ``least``; ``none`` is the word for None, where that is possible."""

    least: int = 1
    none: str | None = None

    @property
    def possible(self) -> str:
        return f"a whole number from {self.least} up" + (f", or {self.none}" if self.none else "")

    def read(self, raw: Raw) -> int | None:
        if self.none is not None and (raw.kind, raw.head) == ("word", self.none):
            return None
        value = _whole(raw)
        if raw.unit is not None:
            raise Misfit(f"it is a number without a unit: write {value}", unit=True)
        if value < self.least:
            raise Misfit
        return value

    def write(self, value: object) -> str:
        return str(self.none if value is None else value)


@dataclass(frozen=True)
class Bytes:
    """Bytes, at least ``least``, with their unit."""

    least: int = 1

    @property
    def possible(self) -> str:
        return f"bytes as in 48 KiB, at least {self.least} B"

    def read(self, raw: Raw) -> int:
        value = _whole(raw)
        if raw.unit not in UNITS:
            raise Misfit(f"write bytes as in {value} KiB or {value} B; the units are {', '.join(UNITS)}", unit=True)
        if value * UNITS[raw.unit] < self.least:
            raise Misfit
        return value * UNITS[raw.unit]

    def write(self, value: object) -> str:
        assert isinstance(value, int)
        unit = next(u for u, size in UNITS.items() if value % size == 0 and (value or size == 1))
        return f"{value // UNITS[unit]} {unit}"


@dataclass(frozen=True)
class Words:
    """One of some words, each with its value."""

    values: tuple[tuple[str, object], ...]

    @property
    def possible(self) -> str:
        return ", ".join(word for word, _ in self.values)

    def read(self, raw: Raw) -> object:
        if raw.kind != "word" or raw.head not in dict(self.values):
            raise Misfit
        return dict(self.values)[raw.head]

    def write(self, value: object) -> str:
        return next(word for word, meant in self.values if meant == value)


def words(*choices: str) -> Words:
    """Words that are the values themselves."""
    return Words(tuple((word, word) for word in choices))


@dataclass(frozen=True)
class Name:
    """The name of ``what``; ``none`` is the word for None, where that is possible."""

    what: str
    none: str | None = None

    @property
    def possible(self) -> str:
        return f"the name of {self.what}" + (f", or {self.none}" if self.none else "")

    def read(self, raw: Raw) -> str | None:
        if raw.kind not in ("word", "text"):
            raise Misfit
        return None if (raw.kind, raw.head) == ("word", self.none) else raw.head

    def write(self, value: object) -> str:
        if value is None:
            return str(self.none)
        return quoted(str(value)) if value == self.none else name_text(str(value))


@dataclass(frozen=True)
class Syncs:
    """A wire of an exchange, with its slots and its level."""

    @property
    def possible(self) -> str:
        return ", ".join(f"{name}(slots = {sync().slots})" for name, sync in _SYNCS.items())

    def read(self, raw: Raw) -> Tagged | Sentinel | Flag:
        if raw.kind not in ("word", "call") or raw.head not in _SYNCS:
            raise Misfit
        wire, given = _SYNCS[raw.head], dict(raw.arguments)
        default = wire()
        slots = Count().read(given.pop("slots")) if "slots" in given else default.slots
        level = words(*(x.value for x in Level)).read(given.pop("level")) if "level" in given else default.level
        if given:
            raise Misfit(f"{raw.head} has no {next(iter(given))!r}: it has slots and level")
        return wire(slots if slots is not None else default.slots, Level(level))

    def write(self, value: object) -> str:
        assert isinstance(value, Tagged | Sentinel | Flag)
        name = next(name for name, wire in _SYNCS.items() if type(value) is wire)
        level = "" if value.level is type(value)().level else f", level = {value.level.value}"
        return f"{name}(slots = {value.slots}{level})"


@dataclass(frozen=True)
class Range:
    """Whole numbers from one to another, both included: (first, last)."""

    @property
    def possible(self) -> str:
        return "a range such as 0..2048"

    def read(self, raw: Raw) -> tuple[int, int]:
        if raw.kind != "range":
            raise Misfit
        first, last = (_whole(Raw("number", end)) for end in raw.head.split(".."))
        if not 0 <= first <= last:
            raise Misfit
        return first, last

    def write(self, value: object) -> str:
        assert isinstance(value, tuple)
        return "{}..{}".format(*value)


def _whole(raw: Raw) -> int:
    """The number of a raw value; Misfit when it is none, or is no whole one."""
    digits = raw.head.replace("_", "")
    if raw.kind != "number" or not re.fullmatch(r"[+-]?[0-9]+", digits) or len(digits) > _DIGITS:
        raise Misfit
    return int(digits)
