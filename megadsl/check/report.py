"""What a check gives: findings, time spent, and what was proved; and the table that every counterexample is shown as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from megadsl.diagnostics import Diagnostic, diagnose
from megadsl.ir.plan import Instr
from megadsl.source import Span


@dataclass(frozen=True)
class Report:
    """``findings`` is empty when the plan holds; ``seconds`` is wall time; ``proved`` says what was shown, a line each. ``kept``: this
    very plan was proved before by this very checker, and ``seconds`` is what it took then (megadsl/build/proofs.py)."""

    findings: tuple[Diagnostic, ...]
    seconds: float
    proved: tuple[str, ...]
    kept: bool = False


@dataclass
class Findings:
    """Collects findings, each kind once per op: the first counterexample says enough."""

    found: list[Diagnostic] = field(default_factory=list)
    seen: set[tuple[str, object]] = field(default_factory=set)

    def add(self, code: str, span: Span, columns: Sequence[tuple[str, Sequence[str]]], **fields: object) -> None:
        """``columns``: a title (a role or a block) and what it does, step by step."""
        key = (code, fields.get("op", fields.get("what")))
        if key in self.seen:
            return
        self.seen.add(key)
        self.found.append(diagnose(code, span, table(columns), **fields))


def table(columns: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Columns side by side, rows in the order of time."""
    widths = [max(len(title), *(len(line) for line in lines), 1) for title, lines in columns]
    titles = [title for title, _ in columns]
    rows = [titles, ["-" * w for w in widths], *zip_longest(*(lines for _, lines in columns), fillvalue="")]
    return "\n".join("    " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def shown(instr: Instr, layer: int | None = None) -> str:
    """An instruction as a cell of such a table: what, of which op and layer, and the spec's line."""
    where = f", layer {layer}" if layer is not None else ""
    return f"{instr.call} of {instr.op}{where} [{instr.span.short}]"
