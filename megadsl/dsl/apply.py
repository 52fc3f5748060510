"""Overrides on top of a default Schedule. Names are checked here, where the graph and the roles are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, TypeAlias

from megadsl.diagnostics import Collector, declare
from megadsl.dsl.overrides import (
    Changes,
    Decision,
    Override,
    Overrides,
    SetCount,
    SetKernel,
    SetLoader,
    SetPoll,
    SetPrefetch,
    SetRing,
    SetRole,
    SetScale,
    SetSplit,
    SetSync,
)
from megadsl.ir.graph import Attention, Embed, Graph, Linear, Op, RowMap, kept_values
from megadsl.ir.schedule import BEGIN, END, EdgeSchedule, OpSchedule, Ring, Role, Schedule, Tagged
from megadsl.ir.verify_graph import reads
from megadsl.source import Span

OP_UNKNOWN = declare("MK152", "schedule: no op is called {name!r}", "{hint}the ops are: {known}")
ROLE_UNKNOWN = declare("MK153", "schedule: no role is called {name!r}", '{hint}the roles are: {known}; a new role needs kind="loader"')
EDGE_UNKNOWN = declare("MK154", "schedule: {consumer!r} reads nothing from {producer!r}", "the readers of {producer!r} are: {known}")
RING_UNKNOWN = declare("MK155", "schedule: no ring or loader role is called {name!r}", "{hint}the rings are: {known}")
RING_PARTIAL = declare("MK156", "schedule: role {role!r} has no ring yet", "give all of stages=, stage_bytes= and window=")
WARPS_SUM = declare(
    "MK157",
    "schedule: warps({total}) does not match the roles: {roles}",
    "make the roles add up to {total}, or leave the consumer's warps out",
)
RING_TWICE = declare(
    "MK260",
    "schedule: {ring!r} and {other!r} are one ring, and its {field} is both {value} and {mine}",
    "keep one of the two",
)
NOT_FOR = declare("MK158", "schedule: {op!r} has no {what}", "{call} is for {which}")

# What would change nothing of some ops: of which it would, what the others lack, the call, and the first in words.
_FOR: dict[str, tuple[Callable[[Op], bool], str, str, str]] = {
    "splits": (lambda op: isinstance(op, Attention), "KV range to split", "split(kv=...)", "attention ops"),
    "merge": (lambda op: isinstance(op, Attention), "splits to add", "merge(...)", "attention ops"),
    "residual": (
        lambda op: isinstance(op, Linear | RowMap) and bool(kept_values(op)),
        "rows of another op to add",
        "residual(...)",
        "linears that add to their rows, and maps of rows",
    ),
    "pause": (lambda op: isinstance(op, Linear | Attention), "input to poll", "poll(...)", "linears and attention"),
    "meeting_window": (lambda op: isinstance(op, Linear | Attention), "input to poll", "poll(...)", "linears and attention"),
    "publish": (
        lambda op: not isinstance(op, Embed) and op.out is not None,
        "results of its own to send",
        "publish(...)",
        "linears and attention",
    ),
}
_OpRecord: TypeAlias = SetLoader | SetPrefetch | SetSplit | SetScale

# Roles first: later records may name roles that a role record adds.
_OF_THE_BLOCK = {ROLE_UNKNOWN, RING_UNKNOWN, RING_PARTIAL, WARPS_SUM}
_ORDER = (SetRole, SetRing, SetCount, SetKernel, SetLoader, SetPrefetch, SetSplit, SetScale, SetSync, SetPoll)


def apply(schedule: Schedule, graph: Graph, overrides: Overrides, found: Collector) -> Schedule:
    """``schedule`` with the overrides, less those that are wrong: MK152 to MK158 are added to ``found``, each at the user's line.

    Raises ``found`` when it is a role or a ring that is wrong, for all other decisions are judged by those.
    """
    for kind in _ORDER:
        for record in overrides.records:
            if isinstance(record, kind):
                schedule = _apply(schedule, graph, record, overrides, found)
    _check_names(schedule, overrides, found)
    if any(d.code in _OF_THE_BLOCK for d in found.found):
        found.raise_if_any()
    return schedule


def _apply(schedule: Schedule, graph: Graph, record: Override, overrides: Overrides, found: Collector) -> Schedule:
    match record:
        case SetRole():
            return _role(schedule, record, overrides, found)
        case SetRing():
            return _ring(schedule, record, overrides, found)
        case SetCount(field="warps"):
            return _warps(schedule, record, overrides, found)
        case SetCount():  # blocks, batch, max_kv
            return replace(schedule, **{record.field: record.value})  # type: ignore[arg-type]
        case SetKernel():
            return _kernel(schedule, graph, record, found)
        case SetSync() | SetPoll():
            return _edge(schedule, graph, record, found)
        case SetLoader() | SetPrefetch() | SetSplit() | SetScale():
            return _op(schedule, graph, record, found)


def _kernel(schedule: Schedule, graph: Graph, record: SetKernel, found: Collector) -> Schedule:
    roles, ops = [r.name for r in schedule.roles], [o.name for o in graph.ops]
    named = {"warm_up": (ROLE_UNKNOWN, roles, (None,)), "start": (OP_UNKNOWN, ops, ()), "trigger": (OP_UNKNOWN, ops, (BEGIN, END))}
    for field, value in record.changes:
        code, names, others = named.get(field, ("", (), (value,)))
        if value in others or _known(code, value, names, record.span, found):
            schedule = replace(schedule, **{field: value})  # type: ignore[arg-type]  # fields are the Schedule's
    return schedule


def _hint(name: object, known: Iterable[str]) -> str:
    close = get_close_matches(str(name), list(known), n=1)  # a user may have given anything
    return f"did you mean {close[0]!r}? " if close else ""


def _known(code: str, name: object, known: Iterable[str], span: Span, found: Collector) -> bool:
    names = list(known)
    if name not in names:
        found.add(code, span, name=name, hint=_hint(name, names), known=", ".join(names))
    return name in names


def _role(schedule: Schedule, record: SetRole, overrides: Overrides, found: Collector) -> Schedule:
    names = [r.name for r in schedule.roles]
    if record.role not in names:
        said = _all_changes(overrides, SetRole, record.role)
        if "kind" not in said:
            _known(ROLE_UNKNOWN, record.role, names, record.span, found)
            return schedule
        schedule = replace(schedule, roles=(*schedule.roles, Role(record.role, str(said["kind"]), 1)))
    return replace(schedule, roles=tuple(_replaced_role(r, record.changes) if r.name == record.role else r for r in schedule.roles))


def _replaced_role(role: Role, changes: Changes) -> Role:
    values = dict(changes)
    kind, warps = values.get("kind", role.kind), values.get("warps", role.warps)
    assert isinstance(kind, str) and isinstance(warps, int), "checked where they were said"
    return replace(role, kind=kind, warps=warps)


def _all_changes(overrides: Overrides, kind: type[Override], subject: str) -> dict[str, object]:
    """What is said of a role or a ring in all records: what is new needs several fields, which may come one by one."""
    return {d.field: d.value for d in overrides.decisions() if d.record is kind and d.subject == (subject,)}


def _ring(schedule: Schedule, record: SetRing, overrides: Overrides, found: Collector) -> Schedule:
    rings = dict(schedule.rings)
    by_name = {ring.name: role for role, ring in schedule.rings}
    loaders = [r.name for r in schedule.roles if r.kind == "loader"]
    if not _known(RING_UNKNOWN, record.ring, [*by_name, *loaders], record.span, found):
        return schedule
    role = by_name.get(record.ring, record.ring)
    if role not in rings:
        if not {"stages", "stage_bytes", "window"} <= set(_all_changes(overrides, SetRing, record.ring)):
            if record is next(r for r in overrides.records if isinstance(r, SetRing) and r.ring == record.ring):
                found.add(RING_PARTIAL, record.span, role=role)
            return schedule
        rings[role] = Ring(role, 0, 0, 0)
    rings[role] = _replaced_ring(rings[role], record.changes)
    return replace(schedule, rings=tuple(rings.items()))


def _check_names(schedule: Schedule, overrides: Overrides, found: Collector) -> None:
    """A ring has two names, its own and its role's: a field has one value under both."""
    by_name = {ring.name: role for role, ring in schedule.rings}
    before: dict[tuple[str, str], Decision] = {}
    for d in overrides.decisions():
        if d.record is SetRing:
            role = by_name.get(d.subject[0], d.subject[0])
            first = before.setdefault((role, d.field), d)
            if first.subject != d.subject and first.value != d.value:
                found.add(RING_TWICE, d.span, ring=d.subject[0], other=first.subject[0], field=d.field, mine=d.value, value=first.value)


def _replaced_ring(ring: Ring, changes: Changes) -> Ring:
    values = {k: v for k, v in changes if isinstance(v, int)}
    return replace(
        ring,
        stages=values.get("stages", ring.stages),
        stage_bytes=values.get("stage_bytes", ring.stage_bytes),
        window=values.get("window", ring.window),
        meeting_window=values.get("meeting_window", ring.meeting_window),
    )


def _warps(schedule: Schedule, record: SetCount, overrides: Overrides, found: Collector) -> Schedule:
    consumer = schedule.consumer
    left = record.value - sum(r.warps for r in schedule.roles if r is not consumer)
    fixed = any((d.record, d.subject, d.field) == (SetRole, (consumer.name,), "warps") for d in overrides.decisions())
    if left < 1 or (fixed and left != consumer.warps):
        roles = ", ".join(f"{r.name} {r.warps}" for r in schedule.roles)
        found.add(WARPS_SUM, record.span, total=record.value, roles=roles)
        return schedule
    return replace(schedule, roles=tuple(replace(r, warps=left) if r is consumer else r for r in schedule.roles))


def _op(schedule: Schedule, graph: Graph, record: _OpRecord, found: Collector) -> Schedule:
    names = [o.op for o in schedule.ops]
    if not _known(OP_UNKNOWN, record.op, names, record.span, found):
        return schedule
    old = schedule.op(record.op)
    new = _changed(old, graph, schedule, record, found)
    return replace(schedule, ops=tuple(new if o is old else o for o in schedule.ops), edges=_edges(schedule, graph, old, new))


def _edges(schedule: Schedule, graph: Graph, old: OpSchedule, new: OpSchedule) -> tuple[EdgeSchedule, ...]:
    """A linear whose columns are split has an edge of its own: its blocks hand parts to each other."""
    if (old.ways > 1) == (new.ways > 1) or not isinstance(graph.op(new.op), Linear):
        return schedule.edges
    parts = f"{new.op}.parts"
    added = (EdgeSchedule(parts, new.op, Tagged()),) if new.ways > 1 else ()
    edges = tuple(e for e in schedule.edges if e.value != parts) + added
    values, order = {v.name for v in graph.values}, [op.name for op in graph.ops]
    return tuple(sorted(edges, key=lambda e: -1 if e.value in values else order.index(e.producer)))  # whatever order they are said in


def _changed(old: OpSchedule, graph: Graph, schedule: Schedule, record: _OpRecord, found: Collector) -> OpSchedule:
    match record:
        case SetLoader():
            loaders = [r.name for r in schedule.roles if r.kind == "loader"]
            known = _known(ROLE_UNKNOWN, record.role, loaders, record.span, found)
            return replace(old, loader=record.role) if known else old
        case SetPrefetch():
            changes = dict(record.changes)
            ahead_of = changes.get("ahead_of")
            if ahead_of is not None and not _known(OP_UNKNOWN, ahead_of, [o.name for o in graph.ops], record.span, found):
                return old
            return replace(old, prefetch=replace(old.prefetch, **changes))  # type: ignore[arg-type]  # keys are Prefetch's
        case SetScale():
            return replace(old, scale=record.scale)
        case SetSplit():
            changes = dict(record.changes)
            for field, (has, what, call, which) in _FOR.items():
                if field in changes and not has(graph.op(old.op)):
                    found.add(NOT_FOR, record.span, op=old.op, what=what, call=call, which=which)
                    return old
            return replace(old, **changes)  # type: ignore[arg-type]  # keys are OpSchedule's


def _edge(schedule: Schedule, graph: Graph, record: SetSync | SetPoll, found: Collector) -> Schedule:
    names = [o.name for o in graph.ops]
    ends = [record.producer] + ([record.consumer] if record.consumer else [])
    known = [_known(OP_UNKNOWN, name, names, record.span, found) for name in ends]
    if not all(known):
        return schedule
    out = graph.op(record.producer).out
    readers = [o.name for o in graph.ops if out in {ref.value for ref in reads(o)}]
    chosen = [out] if out and readers and (record.consumer is None or record.consumer in readers) else []
    if record.consumer == record.producer:  # what the op's blocks hand to each other before its value is whole, if anything
        chosen = [e.value for e in schedule.edges if e.producer == record.producer and e.value != out] or chosen
    if not chosen:
        consumer = record.consumer or "any op"
        found.add(EDGE_UNKNOWN, record.span, consumer=consumer, producer=record.producer, known=", ".join(readers) or "none")
    changes: dict[str, Any] = {"sync": record.sync} if isinstance(record, SetSync) else dict(record.changes)
    return replace(schedule, edges=tuple(replace(e, **changes) if e.value in chosen else e for e in schedule.edges))
