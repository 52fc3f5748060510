"""What one schedule changes against another, of one model: in what is decided, in what follows from it, and in the plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import SequenceMatcher
from typing import Protocol

from megadsl.dsl.knobs import KERNEL, KNOBS, OP, RING, statements
from megadsl.dsl.overrides import Overrides
from megadsl.ir.graph import Linear
from megadsl.ir.plan import Plan
from megadsl.ir.schedule import OpSchedule
from megadsl.lower.explain import EDGE_COLUMNS, Table, rows
from megadsl.lower.memory import chunk_pieces

DECISION_COLUMNS = ("decision", "A", "B")
DERIVED_COLUMNS = ("what follows", "A", "B")
PLAN_COLUMNS = ("plan.txt", "lines", "only in A", "only in B")
UNSAID = "-"
_POLLED = EDGE_COLUMNS[-1]
_COMMENT = re.compile(r"[ \t]*//.*")


class Side(Protocol):
    """One of two compilations of the same model: driver.Compiled."""

    @property
    def plan(self) -> Plan: ...
    @property
    def plan_text(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def overrides(self) -> Overrides: ...


def difference(a: Side, b: Side) -> list[Table]:
    """Three tables, of the lines that differ only: decisions, as a schedule file has them ("-": left to the compiler); what follows
    from them, sizes in bytes; and how many lines of each section of plan.txt are in one plan alone."""
    decisions = _different(dict(statements(a.overrides)), dict(statements(b.overrides)))
    derived = _different(dict(_derived(a)), dict(_derived(b)))
    derived.append(["kernel code", *(("the same", "the same") if _code(a) == _code(b) else ("its own", "its own"))])
    return [(DECISION_COLUMNS, decisions), (DERIVED_COLUMNS, derived), (PLAN_COLUMNS, _sections(a.plan_text, b.plan_text))]


def _different(a: Mapping[str, str], b: Mapping[str, str]) -> list[list[str]]:
    both = dict.fromkeys([*a, *b])
    return [[key, a.get(key, UNSAID), b.get(key, UNSAID)] for key in both if a.get(key) != b.get(key)]


def _code(side: Side) -> str:
    return _COMMENT.sub("", side.source)


def _said(of: str, record: object) -> Iterator[tuple[str, str]]:
    """The fields of a record of the schedule, in the words of their knobs where they have one."""
    written = {knob.field: knob for knob in KNOBS if knob.of == of}
    for f in fields(record):  # type: ignore[arg-type]  # all of them are dataclasses
        value = getattr(record, f.name)
        knob = written.get(f.name)
        if isinstance(value, str | int | None):
            shown = UNSAID if value is None else knob.values.write(value) if knob else str(value)
            yield knob.name if knob else f.name, shown


def _derived(side: Side) -> Iterator[tuple[str, str]]:
    plan, schedule = side.plan, side.plan.schedule
    yield from _of_the_kernel(plan)
    for role in schedule.roles:
        yield f"role {role.name}", f"{role.kind}, {role.warps} warps"
    for _, ring in schedule.rings:
        yield from ((f"ring {ring.name}: {name}", value) for name, value in _said(RING, ring) if name != "name")
    for how in schedule.ops:
        yield from ((f"op {how.op}: {name}", value) for name, value in _of_an_op(plan, how))
    _, (columns, lines) = rows(side)
    polled = 0
    for line in lines:
        cells = dict(zip(columns, line, strict=True))
        shown = ", ".join(f"{cells[name]} {name}" for name in ("slots", "vectors"))
        polled += int(cells[_POLLED].replace(",", ""))
        yield f"exchange {line[0]}", f"{cells['sync']}, {cells['level']}, {shown}, {cells[_POLLED]} B polled"
    yield "all exchanges", f"{polled:,} B polled"


def _of_the_kernel(plan: Plan) -> Iterator[tuple[str, str]]:
    yield from _said(KERNEL, plan.schedule)
    looped = {op.name for op in plan.graph.ops if op.loop}
    values = {v.name: v.producer for v in plan.graph.values}
    hops = sum(values.get(e.name, e.name.rpartition(".")[0]) in looped for e in plan.exchanges)
    yield "shared memory", f"{plan.smem_bytes:,}"
    yield "hops per layer", str(hops)
    yield "exchange arena", f"{plan.buffers['exchange']:,}"


def _of_an_op(plan: Plan, how: OpSchedule) -> Iterator[tuple[str, str]]:
    op = plan.graph.op(how.op)
    for name, value in (*_said(OP, how), *_said(OP, how.prefetch)):
        if name == "chunk" and isinstance(op, Linear):
            value = str(chunk_pieces(op, plan.graph, plan.schedule))
        if name != "op":
            yield name, value


def _sections(a: str, b: str) -> list[list[str]]:
    """How many lines of each section differ, for those that do."""
    left, right = _by_title(a), _by_title(b)
    found = []
    for title in dict.fromkeys([*left, *right]):
        mine, other = left.get(title, []), right.get(title, [])
        changed = [c for c in SequenceMatcher(None, mine, other, autojunk=False).get_opcodes() if c[0] != "equal"]
        if changed:
            gone, come = sum(c[2] - c[1] for c in changed), sum(c[4] - c[3] for c in changed)
            found.append([title, str(max(len(mine), len(other))), str(gone), str(come)])
    return found


def _by_title(text: str) -> dict[str, list[str]]:
    parts = (part.splitlines() for part in text.removeprefix("== ").split("\n== "))
    return {re.split(r" \(|:", lines[0])[0]: lines for lines in parts}
