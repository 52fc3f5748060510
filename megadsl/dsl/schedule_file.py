"""Schedules as text: one decision a line, in an order that does not depend on who found it, so that two files compare line by line.

    # what measured fastest
    model = llama-3.2-1b
    arch = sm_90a
    tokens = 1

    ring weights: meeting_window = 48 KiB

    op o_proj: residual = exchange  # 1.004x

``parse`` and ``render`` are each other's inverse: what a file decides is what mk.schedule would record, less what later calls replace
(megadsl.dsl.knobs.normal). Comments stay with their line; blank lines and the width of spaces do not. docs/schedules.md has all knobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

from megadsl.diagnostics import Collector, MegadslError, declare, error
from megadsl.dsl.knob_values import Count, Misfit, Name, Range, Values
from megadsl.dsl.knobs import EDGE, KERNEL, SUBJECTS, Knob, knobs_of, left_side, normal, statements
from megadsl.dsl.overrides import Decision, Overrides, recorded
from megadsl.dsl.registry import FILE_MISSING
from megadsl.dsl.schedule_lines import Statement, read_line
from megadsl.machine import machine
from megadsl.source import Span, remember

SUBJECT_UNKNOWN = declare(
    "MK262", "a schedule decides nothing about {subject!r}", "begin the line with role NAME:, ring NAME:, op NAME: or edge OP -> READER:"
)
KNOB_UNKNOWN = declare("MK263", "{of} has no knob {name!r}", "{hint}the knobs are: {known}")
VALUE_BAD = declare("MK264", "{knob} cannot be {value}", "{how}")
UNIT_BAD = declare("MK265", "{knob} = {value} has the wrong unit", "{how}")
TWICE = declare("MK266", "{decision} is decided twice", "keep one: the other stands in line {line}")
NO_ARCH = declare("MK267", "the schedule does not say which architecture it is for", "write `arch = ...` in its head")

SUFFIX = ".schedule"
HEAD: Mapping[str, Values] = MappingProxyType(
    {
        "model": Name("a model", none="any"),
        "arch": Name("an architecture"),
        "tokens": Count(none="any"),
        "sequences": Count(none="any"),
        "kv": Range(),
        "machine": Name("a machine"),
    }
)


@dataclass(frozen=True)
class Head:
    """What a schedule is meant for: ``model``, ``tokens`` and ``sequences`` of a launch, None for any; ``kv``, cached rows (of each
    sequence) from first to last, and ``machine``, where it was measured."""

    arch: str
    model: str | None = None
    tokens: int | None = None
    kv: tuple[int, int] | None = None
    machine: str | None = None
    sequences: int | None = None


@dataclass(frozen=True)
class Note:
    """The comments of a line: whole lines above it, and the one behind it, each with its #."""

    above: tuple[str, ...] = ()
    beside: str = ""


@dataclass(frozen=True)
class ScheduleFile:
    """``overrides``, in their normal form, each with its place in the file. ``notes``: comments by the left side of their line
    ("op o_proj: residual", "arch"); those in front of all under TOP, those behind all under END."""

    TOP = "top"
    END = "end"

    head: Head
    overrides: Overrides
    notes: Mapping[str, Note] = field(default_factory=lambda: MappingProxyType({}))
    path: str = field(default="", compare=False)
    places: Mapping[str, Span] = field(default_factory=lambda: MappingProxyType({}), compare=False)  # of the head's lines

    @property
    def digest(self) -> str:
        """Of what ``render`` writes, as sha256sum shows it."""
        return sha256(render(self).encode()).hexdigest()


def written(head: Head, overrides: Overrides, beside: Mapping[str, str] | None = None) -> ScheduleFile:
    """A file for decisions that were found otherwise; ``beside``: what to say, in a comment, behind a decision, by its left side."""
    notes = {left: Note(beside=f"# {text}") for left, text in (beside or {}).items()}
    return ScheduleFile(head, normal(overrides), MappingProxyType(notes))


def render(file: ScheduleFile) -> str:
    """The text of a file: head, then the decisions in their order; ends with a newline."""
    given = {f.name: value for f in fields(Head) if (value := getattr(file.head, f.name)) is not None}
    lines = [*file.notes.get(ScheduleFile.TOP, Note()).above]
    for name in (name for name in HEAD if name in given):
        lines += _line(name, HEAD[name].write(given[name]), file.notes)
    for _, group in groupby(statements(file.overrides), key=lambda s: _subject_kind(s[0])):
        lines.append("")
        for left, right in group:
            lines += _line(left, right, file.notes)
    if end := file.notes.get(ScheduleFile.END, Note()).above:
        lines += ["", *end]
    return "\n".join(lines) + "\n"


def _line(left: str, right: str, notes: Mapping[str, Note]) -> list[str]:
    note = notes.get(left, Note())
    return [*note.above, f"{left} = {right}" + (f"  {note.beside}" if note.beside else "")]


def _subject_kind(left: str) -> str:
    return left.partition(" ")[0] if ": " in left else KERNEL


def load(path: Path) -> ScheduleFile:
    """The schedule in a file: MK181 when it cannot be read, and what ``parse`` finds."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as missing:
        raise error(FILE_MISSING, what="schedule", path=path, why=missing.strerror or str(missing)) from missing
    except UnicodeDecodeError as broken:
        raise error(FILE_MISSING, what="schedule", path=path, why="it is not UTF-8 text") from broken
    return parse(text, str(path))


def parse(text: str, path: str) -> ScheduleFile:
    """What ``text`` decides, each decision with its line and column of ``path``.

    Raises everything that is wrong at once: MK261 lines that are none, MK262 and MK263 unknown subjects and knobs, MK264 and MK265
    values, MK266 what is decided twice, MK267 and MK001 for the architecture. Names of ops, roles and rings are judged where the
    schedule is applied (MK152 to MK158), budgets where it is lowered, all at their line of the file.
    """
    remember(path, text)
    reader = _Reader(path)
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        reader.read(line.removesuffix("\r"), number)
    return reader.finish()


class _Reader:
    """Gathers the lines of a file, and what is wrong with them."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.found = Collector()
        self.head: dict[str, object] = {}
        self.decisions: list[Decision] = []
        self.lines: dict[str, Span] = {}
        self.notes: dict[str, Note] = {}
        self.above: list[str] = []
        self.begun = False

    def read(self, line: str, number: int) -> None:
        statement, comment = read_line(line, self.path, number, self.found)
        if statement is None:
            if comment:
                self.above.append(comment)
            elif self.above and not self.begun and not line.strip():
                self._top()
            return
        left = self._decide(statement)
        if not self.begun:
            self._top()
        if self.above or comment:
            self.notes[left] = Note(tuple(self.above), comment)
        self.above = []

    def _top(self) -> None:
        """Comments in front of all are the file's, wherever its first line goes."""
        self.begun = True
        if self.above:
            self.notes[ScheduleFile.TOP] = Note(tuple(self.above))
        self.above = []

    def finish(self) -> ScheduleFile:
        if self.above:
            self.notes[ScheduleFile.END if self.begun else ScheduleFile.TOP] = Note(tuple(self.above))
        if "arch" not in self.lines:
            self.found.add(NO_ARCH, Span(self.path, 1))
        arch = self.head.get("arch")
        if isinstance(arch, str):
            try:
                machine(arch, self.lines["arch"])
            except MegadslError as unknown:
                self.found.found += unknown.diagnostics
        self.found.raise_if_any()
        assert isinstance(arch, str), "else something was found"
        overrides = Overrides(arch, tuple(map(recorded, self.decisions)))
        head, places = Head(**self.head), {name: self.lines[name] for name in self.head}  # type: ignore[arg-type]
        return ScheduleFile(head, normal(overrides), MappingProxyType(self.notes), self.path, MappingProxyType(places))

    def _decide(self, said: Statement) -> str:
        """Keep what a statement decides; its left side."""
        if not said.of and said.knob in HEAD:
            value = self._value(said.knob, HEAD[said.knob], said)
            self._once(said.knob, said.span)
            self.head[said.knob] = value
            return said.knob
        knob = self._knob(said)
        if knob is None:
            return f"line {said.span.line}"
        left = left_side(knob, said.subject)
        value = self._value(left, knob.values, said)
        self._once(_value_of(left, said), said.span)
        self.decisions.append(Decision(knob.record, said.subject, knob.field, value, said.span))
        return left

    def _knob(self, said: Statement) -> Knob | None:
        of = said.of or KERNEL
        if of not in SUBJECTS or (said.of == KERNEL) or (len(said.subject) > 1) != (of == EDGE):
            self.found.add(SUBJECT_UNKNOWN, said.span, subject=" ".join([said.of, " -> ".join(said.subject)]))
            return None
        known = knobs_of(of)
        if said.knob not in known:
            names = [*known, *(HEAD if of == KERNEL else ())]
            close = get_close_matches(said.knob, names, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            whose = "the kernel" if of == KERNEL else f"{of} {' -> '.join(said.subject)}"
            self.found.add(KNOB_UNKNOWN, said.at_knob, of=whose, name=said.knob, hint=hint, known=", ".join(names))
        return known.get(said.knob)

    def _value(self, left: str, values: Values, said: Statement) -> object:
        try:
            return values.read(said.value)
        except Misfit as misfit:
            how = misfit.why or f"it can be {values.possible}"
            self.found.add(UNIT_BAD if misfit.unit else VALUE_BAD, said.at_value, knob=left, value=said.value, how=how)
            return None

    def _once(self, key: str, span: Span) -> None:
        first = self.lines.setdefault(key, span)
        if first is not span:
            self.found.add(TWICE, span, decision=key, line=first.line)


def _value_of(left: str, said: Statement) -> str:
    """The left side, or of a sync the value that it is about: one that an op gives to all readers, whichever of them is named."""
    if said.knob != "sync":
        return left
    producer = said.subject[0]
    return f"the sync of what {producer} gives" + (" to itself" if said.subject[1:] == (producer,) else "")


__all__ = ["SUFFIX", "Head", "Note", "ScheduleFile", "load", "parse", "render", "written"]
