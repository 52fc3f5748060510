"""Plans with one thing changed, for mutants and for tests: each function gives a new plan and leaves the old one alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megadsl.ir.plan import Exchange, Instr, LayerLoop, Phase, Plan, Program, ident

Edit = Callable[[Instr], Instr | tuple[Instr, ...] | None]


def edited(of: Plan, edit: Edit, role: str | None = None) -> Plan:
    """Every instruction (of a role) replaced by what ``edit`` gives for it: another, several, or None to drop it."""

    def many(body: tuple[Instr, ...]) -> tuple[Instr, ...]:
        made: list[Instr] = []
        for instr in body:
            found = edit(instr)
            if found is not None:
                made.extend(found if isinstance(found, tuple) else (found,))
        return tuple(replace(i, body=many(i.body)) if i.body else i for i in made)

    def item(it: Phase | LayerLoop) -> Phase | LayerLoop:
        if isinstance(it, LayerLoop):
            return replace(it, body=tuple(replace(p, body=many(p.body)) for p in it.body))
        return replace(it, body=many(it.body))

    def program(p: Program) -> Program:
        return p if role not in (None, p.role) else replace(p, body=tuple(item(i) for i in p.body))

    return replace(of, programs=tuple(program(p) for p in of.programs))


def with_words(of: Plan, name: str, changes: Mapping[int, int]) -> Plan:
    """Other words in one member of Shape, by their index."""
    words = {r.name: tuple(changes.get(i, w) for i, w in enumerate(r.words)) for r in of.shape if r.name == name}
    assert words, f"Shape has no {name}"
    return replace(of, shape=tuple(replace(r, words=words.get(r.name, r.words)) for r in of.shape))


def with_exchange(of: Plan, name: str, **changes: Any) -> Plan:
    """Another exchange, in the plan and in what the kernel reads."""
    before = of.exchange(name)
    e: Exchange = replace(before, **changes)
    made = replace(of, exchanges=tuple(e if x is before else x for x in of.exchanges))
    if not any(r.name == f"{ident(name)}_exchange" for r in of.shape):
        return made  # what a cluster's blocks send each other: the kernel reads nothing of it
    words = {0: e.offset // 16, 1: e.owners * e.vectors, 2: e.slots, 3: e.vectors, 4: e.units, 5: e.groups, 7: e.share_offset}
    return with_words(made, f"{ident(name)}_exchange", words)


def with_rings(of: Plan, stages: int) -> Plan:
    """Every ring as deep as that; their areas stay as they are."""
    rings = tuple((role, replace(ring, stages=stages)) for role, ring in of.schedule.rings)
    return replace(of, schedule=replace(of.schedule, rings=rings))


def with_area(of: Plan, name: str, **changes: Any) -> Plan:
    """An area of shared memory moved or resized, in the plan alone."""
    return replace(of, areas=tuple(replace(a, **changes) if a.name == name else a for a in of.areas))
