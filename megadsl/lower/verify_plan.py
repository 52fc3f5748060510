"""Structural legality of a plan: what must hold whatever the model. The proofs of synchronisation are check/'s."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from megadsl.ir.graph import Linear
from megadsl.ir.plan import Area, Instr, Item, LayerLoop, Plan, Verb
from megadsl.lower.programs import instructions
from megadsl.lower.tiling import tiling


def verify_plan(plan: Plan) -> None:
    """Raises AssertionError that names what broke; a broken plan is a bug of megadsl, never of the user."""
    _sites(plan)
    _loads_match(plan)
    _areas(plan.areas, plan.smem_bytes)
    _exchanges(plan)
    _divisions(plan)


def _sites(plan: Plan) -> None:
    used = [i.site for p in plan.programs for i in instructions(p.body) if i.site is not None]
    extra = [int(str(i.args["gather_site"])) for p in plan.programs for i in instructions(p.body) if "gather_site" in i.args]
    ids = [s.id for s in plan.sites]
    assert ids == list(range(len(ids))), "site ids are not consecutive"
    assert sorted({*used, *extra}) == ids, "a site is never used or unknown"


def _loads_match(plan: Plan) -> None:
    """Per ring, the consumers take stages in the order in which the loader fills them, loop by loop."""
    fills = {"load_matrix", "load_vector", "load_cache"}
    vector = dict.fromkeys(("wait_vector", "copy_vector", "hold_vector"), "load_vector")
    takes = {"matrix": "load_matrix", "attention": "load_cache", **vector}
    consumer = next(p for p in plan.programs if p.kind == "consumer")
    for program in plan.programs:
        if program.kind != "loader":
            continue
        filled = [(looped, i.op, i.call) for looped, i in _walk(program.body) if i.call in fills]
        taken = []
        for looped, i in _walk(consumer.body):
            if i.call in takes and i.args.get("ring") == program.role:
                taken.append((looped, i.op, takes[i.call]))
        # A matrix instruction comes before the vector waits nested in it, but the kernel takes the vectors first.
        assert sorted(filled) == sorted(taken), f"loader {program.role!r} fills {filled}, the consumers take {taken}"
        assert _op_order(filled) == _op_order(taken), f"loader {program.role!r} and the consumers disagree on the order of ops"


def _walk(items: Iterable[Item]) -> list[tuple[bool, Instr]]:
    """Every instruction, and whether it runs once per layer."""
    found: list[tuple[bool, Instr]] = []
    for item in items:
        looped = isinstance(item, LayerLoop)
        found.extend((looped, i) for i in instructions([item]))
    return found


def _op_order(stages: list[tuple[bool, str, str]]) -> list[str]:
    order: list[str] = []
    for _, op, _ in stages:
        if not order or order[-1] != op:
            order.append(op)
    return order


def _areas(areas: tuple[Area, ...], total: int) -> None:
    fixed = sorted((a for a in areas if not a.overlay and a.bytes), key=lambda a: a.offset)
    for before, after in pairwise(fixed):
        assert before.offset + before.bytes <= after.offset, f"shared memory: {before.name} runs into {after.name}"
    overlays = [a for a in areas if a.overlay]
    for a in overlays:
        for b in fixed:
            assert a.offset + a.bytes <= b.offset or b.offset + b.bytes <= a.offset, f"shared memory: {a.name} overlaps {b.name}"
    assert max((a.offset + a.bytes for a in areas), default=0) <= total, "shared memory: an area reaches past the launch's bytes"


def _divisions(plan: Plan) -> None:
    """mk::Divisor is exact while dividend * divisor stays below 2^32."""
    blocks = plan.schedule.blocks
    for e in plan.exchanges:
        assert (e.groups + 1) * blocks * blocks < 2**32, f"share of {e.name} is too large for mk::Divisor"
        if e.dtype == "bf16":  # of the others, owners are found by Divisor::divide_any, or not at all
            assert (e.groups + 1) * blocks * e.groups < 2**32, f"groups of {e.name} are too many for mk::Divisor"
    for op in plan.graph.ops:
        if isinstance(op, Linear):
            groups = tiling(op).groups * plan.schedule.op(op.name).ways
            assert (groups + 1) * blocks * blocks < 2**32, f"rows of {op.name} are too many for mk::Divisor"


def _exchanges(plan: Plan) -> None:
    written = {r.name for p in plan.programs for i in instructions(p.body) for r in i.writes if r.space == "exchange"}
    read = {r.name for p in plan.programs for i in instructions(p.body) for r in i.reads if r.space == "exchange"}
    names = {e.name for e in plan.exchanges}
    assert written == names, f"exchanges nobody writes: {names - written}"
    assert read <= names, f"reads of unknown exchanges: {read - names}"
    for p in plan.programs:
        for i in instructions(p.body):
            assert i.verb is not Verb.WAIT or i.site is not None, f"the wait {i.call} of {i.op} has no site"
