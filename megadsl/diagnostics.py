"""Every message a user can be shown: a code, what is wrong, the mend, and the user's line.

A code is declared once in CATALOGUE and raised through :func:`error`. Several findings travel in one
:class:`MegadslError`, so that a user mends them in one round.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from megadsl.source import UNKNOWN, Span


@dataclass(frozen=True)
class Entry:
    """A kind of mistake. ``message`` and ``mend`` are format strings over the same fields."""

    message: str
    mend: str


CATALOGUE: dict[str, Entry] = {}


def declare(code: str, message: str, mend: str) -> str:
    """Add a code to the catalogue (at import time, beside the code that raises it); returns the code."""
    if code in CATALOGUE:
        raise ValueError(f"diagnostic {code} is declared twice")
    CATALOGUE[code] = Entry(message, mend)
    return code


@dataclass(frozen=True)
class Diagnostic:
    """One finding, ready to print. ``detail`` is free text below it (a caret line, a table of bytes)."""

    code: str
    message: str
    mend: str
    span: Span = UNKNOWN
    detail: str = ""
    severity: str = "error"  # or "warning": the work goes on

    def __str__(self) -> str:
        where = f"{self.span}: " if self.span.line else ""
        lines = [f"{where}{self.severity}[{self.code}]: {self.message}"]
        if self.detail:
            lines.append(self.detail)
        elif text := self.span.text.strip():
            lines.append(f"    {text}")
            if self.span.column:
                indent = self.span.text.index(text)
                lines.append(" " * (4 + max(0, self.span.column - 1 - indent)) + "^")
        lines.append(f"    mend: {self.mend}")
        return "\n".join(lines)


class MegadslError(Exception):
    """One or more diagnostics. ``diagnostics[0].code`` says which mistake; str() prints all of them."""

    def __init__(self, diagnostics: list[Diagnostic]) -> None:
        self.diagnostics = diagnostics
        super().__init__("\n".join(str(d) for d in diagnostics))

    @property
    def code(self) -> str:
        return self.diagnostics[0].code


def diagnose(code: str, span: Span = UNKNOWN, detail: str = "", **fields: object) -> Diagnostic:
    """Build a diagnostic from its catalogue entry."""
    entry = CATALOGUE[code]
    return Diagnostic(code, entry.message.format(**fields), entry.mend.format(**fields), span, detail)


def error(code: str, span: Span = UNKNOWN, detail: str = "", **fields: object) -> MegadslError:
    """An exception that carries one diagnostic; ``raise error("MK101", span, name="x")``."""
    return MegadslError([diagnose(code, span, detail, **fields)])


class MegadslWarning(UserWarning):
    """A diagnostic that does not stop the work. Turn it into an error with Python's own ``-W`` switch."""


def warning(code: str, span: Span = UNKNOWN, detail: str = "", **fields: object) -> Diagnostic:
    """Build a diagnostic that is not an error, to be shown in a report."""
    return replace(diagnose(code, span, detail, **fields), severity="warning")


def warn(code: str, span: Span = UNKNOWN, detail: str = "", **fields: object) -> None:
    """Show a diagnostic as a warning, through Python's ``warnings``."""
    warnings.warn(str(warning(code, span, detail, **fields)), MegadslWarning, stacklevel=2)


class Collector:
    """Gathers diagnostics and raises them together."""

    def __init__(self) -> None:
        self.found: list[Diagnostic] = []

    def add(self, code: str, span: Span = UNKNOWN, detail: str = "", **fields: object) -> None:
        self.found.append(diagnose(code, span, detail, **fields))

    def raise_if_any(self) -> None:
        if self.found:
            raise MegadslError(self.found)


@contextmanager
def collecting() -> Iterator[Collector]:
    """``with collecting() as c: c.add(...)`` raises once, at the end, when anything was added."""
    collector = Collector()
    yield collector
    collector.raise_if_any()
