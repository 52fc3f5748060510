"""The mutation score of the checker: every way to break the synchronisation of a plan, one at a time, and what finds it.

The mutants are made from the plan itself: each of its instructions, barriers, rounds, exchanges, shares, areas and rings is
spoilt in the ways that its kind allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from megadsl.check.accesses import Access, Meet
from megadsl.check.areas import FINISHER, Stream
from megadsl.check.checker import check_plan
from megadsl.check.edits import Edit, edited, with_area, with_exchange, with_words
from megadsl.check.launches import alone
from megadsl.check.memory import LAYERS, TURNS, block_kinds
from megadsl.check.model import Device
from megadsl.check.ring_sizes import tape_entries
from megadsl.ir.plan import Exchange, Instr, LayerLoop, Plan, Program, ident
from megadsl.ir.schedule import MERGE_CLUSTER
from megadsl.lower.exchanges import ASYNC
from megadsl.lower.launches import AWAIT, JOIN, launches
from megadsl.lower.memory import TAPE_ENTRY_BYTES
from megadsl.lower.scratch import BARRIER_BYTES
from megadsl.lower.shape import PAGES
from megadsl.machine import Machine
from megadsl.types import Level

# Instructions that order something. Arithmetic is not the checker's subject.
_SIGNALS = ("publish", "keep", "load_matrix", "load_vector", "load_cache", "open_gate", "release_vector", "release_rows", "acquire_rows")
_WAITS = ("gather", "gather_kept", "wait_vector", "copy_vector", "hold_vector", "hold_tiles", "sync", "await_rows", JOIN, AWAIT)
_ROUNDS = ("round", "qkv_round", "parts_round")
_WIRES = ("wire", "qkv_wire", "parts_wire")
_OTHER_WIRE = {"Tagged": "Flag", "Sentinel": "Tagged", "Flag": "Sentinel"}


@dataclass(frozen=True)
class PlanMutant:
    """A plan with one mistake; ``what`` says which, ``where`` the op or area."""

    what: str
    where: str
    plan: Plan

    def __str__(self) -> str:
        return f"{self.what}: {self.where}"


@dataclass(frozen=True)
class PlanVerdict:
    """``code`` is the first finding's, "" for a survivor; ``argument`` then says why the mutant is equivalent, or is ""."""

    name: str
    code: str
    evidence: str
    argument: str

    @property
    def survived(self) -> bool:
        return not self.code and not self.argument


def judge_plan(mutant: PlanMutant, plan: Plan, on: Machine) -> PlanVerdict:
    """Check one mutant of ``plan``."""
    findings = check_plan(mutant.plan, on).findings
    code, evidence = (findings[0].code, str(findings[0])) if findings else ("", "")
    return PlanVerdict(str(mutant), code, evidence, "" if code else argument_for(mutant, plan))


def score_plan(plan: Plan, on: Machine, progress: Callable[[int, int], None] | None = None) -> tuple[PlanVerdict, ...]:
    """Check every mutant of ``plan``. ``progress`` is told how many of how many are judged."""
    todo = list(plan_mutants(plan))
    verdicts: list[PlanVerdict] = []
    for mutant in todo:
        verdicts.append(judge_plan(mutant, plan, on))
        if progress is not None:
            progress(len(verdicts), len(todo))
    return tuple(verdicts)


@dataclass(frozen=True)
class Equivalent:
    """Mutants that are no mistake: which, why, and whether that holds for a plan and what the mutant made of it."""

    what: str
    where: str
    argument: str
    holds: Callable[[Plan, PlanMutant], bool]


def _one_pass(plan: Plan, _: PlanMutant) -> bool:
    device = Device(plan)
    owned = (parts for op in device.ops[0] for parts in device.parts(op.name))
    return all(len(parts) == 1 and parts[0][2] - parts[0][1] <= plan.tunables.batch for parts in owned)


def _one_instruction(plan: Plan, mutant: PlanMutant) -> bool:
    """Whether a single instruction of all roles touches the exchange of the argmax that the mutant has changed."""
    found = [i for program in plan.programs for i in _instructions(program)]
    changed = next(i for i in found if f"{i.call} of {i.op} " in f"{mutant.where} " and i.call == "argmax")
    names = {r.name for r in (*changed.reads, *changed.writes) if r.space == "exchange"}
    return bool(names) and [i for i in found if names & {r.name for r in (*i.reads, *i.writes)}] == [changed]


def _asked_elsewhere(plan: Plan, mutant: PlanMutant) -> bool:
    """Whether in each layer a gather of the mutant still asks all blocks, or each is asked as the owner of something."""
    loops = (item for p in mutant.plan.programs for item in p.body if isinstance(item, LayerLoop))
    gathers = (i for loop in loops for phase in loop.body for instr in phase.body for i in instr.body)
    return any(i.args.get("whole") is True for i in gathers) or _asked_in_each_layer(plan, mutant)


def _asked_in_each_layer(plan: Plan, _: PlanMutant) -> bool:
    device = Device(plan)
    loops = (item for p in plan.programs for item in p.body if isinstance(item, LayerLoop))
    gathers = (i for loop in loops for phase in loop.body for instr in phase.body for i in instr.body if i.args.get("whole") is True)
    values = {str(i.args["value"]) for i in gathers}
    asked = (device.owners(device.exchanges[v], 0, plan.graph.value(v).features) for v in values)
    units = max((device.heads(op.name).units for op in device.ops[1]), default=0)
    return set().union(*asked, range(units)) >= set(range(device.blocks))


def _kept_apart(_: Plan, mutant: PlanMutant) -> bool:
    """Whether the barriers that are left keep all that a block's warps do around the publication apart."""
    device = Device(mutant.plan)
    windows = [window for block in block_kinds(device) for window in _windows(device, block, mutant.where)]
    return bool(windows) and all(map(_clear, windows))


def _windows(device: Device, block: int, where: str) -> Iterator[list[tuple[int, Access]]]:
    """What the block does between the barriers before and behind each run of an instruction, and how many barriers of the warps
    that multiply came before. A meeting touches nothing itself: what its op does is behind it."""
    calls = "meet_finisher" if where.startswith("meet_finisher of ") else ""
    window: list[tuple[int, Access]] = []
    met = 0
    for event in (*Stream(device, block).events(min(LAYERS, device.plan.graph.layers), device.turns(TURNS)), Meet("")):
        if isinstance(event, Access):
            window.append((met, event))
        elif event.team:
            met += 1
        else:
            if any(f"{calls or a.step.instr.call} of {a.step.instr.op} (" in where for _, a in window):
                yield window
            window = []


def _clear(window: list[tuple[int, Access]]) -> bool:
    """No two of the accesses touch the same bytes, one of them writing, unless one warp does both or one instruction deals them out."""
    for at, (before, a) in enumerate(window):
        for behind, b in window[at + 1 :]:
            touch = a.begin < b.begin + b.size and b.begin < a.begin + a.size and (a.write or b.write)
            apart = before != behind and FINISHER not in (a.solo, b.solo)
            if touch and not apart and not (a.solo and a.solo == b.solo) and a.step != b.step:
                return False
    return True


def _met_behind_queries(plan: Plan, _: PlanMutant) -> bool:
    queries = {op.q.value for op in Device(plan).ops[1]}
    found = (i for program in plan.programs for i in _instructions(program) if i.call == "publish" and i.args["value"] in queries)
    return all(i.syncs for i in found)


def _few_stages(plan: Plan, mutant: PlanMutant) -> bool:
    area = mutant.where.removeprefix("area ")
    stages = plan.schedule.ring(area.removeprefix("barriers.")).stages
    return next(a.bytes for a in mutant.plan.areas if a.name == area) >= 2 * BARRIER_BYTES * stages


def _few_entries(plan: Plan, mutant: PlanMutant) -> bool:
    area = mutant.where.removeprefix("area ")
    room = next(a.bytes for a in mutant.plan.areas if a.name == area)
    devices = [Device(alone(plan, launch)) for launch in launches(plan)]
    written = [tape_entries(device, device.plan.program(area.removeprefix("tape."))) for device in devices]
    return bool(written) and room >= TAPE_ENTRY_BYTES * max(written)


EQUIVALENT = (
    Equivalent(
        "a round late (round)",
        "argmax of",
        "the argmax publishes and reads in one instruction, and no other one touches its exchange: a constant added to its round moves"
        " both ends",
        _one_instruction,
    ),
    Equivalent(
        "idle blocks left out",
        "gather of",
        "blocks that own nothing are waited for at another gather of the same layer, so that the checker still finds every reader of a"
        " slot ahead of its next writer",
        _asked_elsewhere,
    ),
    Equivalent(
        "idle blocks left out",
        "every gather",
        "in every layer each block is waited for as one that has something: a part of a value that is gathered whole, or a unit of an"
        " attention whose merge is",
        _asked_in_each_layer,
    ),
    Equivalent(
        "barrier 'idle' dropped",
        "attention of",
        "publishing the queries, by one warp alone or under a flag, ends with a barrier behind the last read of what was staged",
        _met_behind_queries,
    ),
    Equivalent(
        "barrier 'done' dropped",
        "publish of",
        "no two accesses to the same bytes are kept apart by it alone: in every kind of block the next barrier comes before others touch"
        " what the first warp still reads",
        _kept_apart,
    ),
    *(
        Equivalent(
            f"barrier {name!r} dropped",
            f"{call} of",
            "no two accesses to the same bytes are kept apart by it alone, in every kind of block: the finisher and the others meet again"
            " before either touches what the other still uses. It spares polls beside a publication",
            _kept_apart,
        )
        for name, call in (("input", "matrix"), ("input", "meet_finisher"), ("input", "attention"), ("merge", "attention"))
    ),
    Equivalent(
        "half the bytes",
        "area barriers.",
        "the area is for as many stages as a whole SM's shared memory has room for: where two blocks share it, half of them is enough",
        _few_stages,
    ),
    Equivalent(
        "half the bytes",
        "area tape.",
        "the area is for the entries of a whole step: a launch of one op writes its own alone, and half of the area is enough for those",
        _few_entries,
    ),
    Equivalent(
        "half the bytes",
        "area partials",
        "no block owns more row groups than are reduced together, so that the second half is never used",
        _one_pass,
    ),
)


def argument_for(mutant: PlanMutant, plan: Plan) -> str:
    """Why the mutant of ``plan`` is no mistake, "" when nobody has said so."""
    found = (e for e in EQUIVALENT if mutant.what == e.what and mutant.where.startswith(e.where) and e.holds(plan, mutant))
    return next((e.argument for e in found), "")


def plan_mutants(plan: Plan) -> Iterator[PlanMutant]:
    """Every mutant of ``plan``; no two alike, none the plan itself."""
    for program in plan.programs:
        seen: Counter[str] = Counter()
        for instr in _instructions(program):
            at = f"{instr.call} of {instr.op}"
            seen[at] += 1
            number = f" number {seen[at]}" if seen[at] > 1 else ""
            yield from _spoilt_instruction(plan, program, instr, f"{at}{number} ({program.role})")
    for e in plan.exchanges:
        yield from _spoilt_exchange(plan, e)
    deaf = edited(plan, lambda i: replace(i, args={**i.args, "whole": False}) if i.args.get("whole") is True else i)
    if deaf != plan and any(e.groups < e.owners for e in plan.exchanges):
        yield PlanMutant("idle blocks left out", "every gather", deaf)
    yield from _spoilt_shapes(plan)
    yield from _spoilt_pages(plan)
    yield from _spoilt_areas(plan)
    yield from _spoilt_rings(plan)
    yield from _spoilt_clusters(plan)
    yield from _spoilt_launches(plan)


def _instructions(program: Program) -> Iterator[Instr]:
    for item in program.body:
        for phase in item.body if isinstance(item, LayerLoop) else (item,):
            for instr in phase.body:
                yield instr
                yield from instr.body


def _spoilt_instruction(plan: Plan, program: Program, instr: Instr, at: str) -> Iterator[PlanMutant]:
    def change(what: str, made: Instr | tuple[Instr, ...] | None) -> PlanMutant:
        edit: Edit = lambda i: made if i is instr else i  # noqa: E731
        return PlanMutant(what, at, edited(plan, edit, program.role))

    if instr.call in (*_SIGNALS, *_WAITS):
        yield change("dropped", None)
    if instr.args.get("raw") and instr.args["wire"] == "Sentinel":
        yield change("a table's bits taken for results", replace(instr, args={**instr.args, "raw": False}))
    if instr.call == "publish" and not instr.args["words"]:
        yield change("sent word by word", replace(instr, args={**instr.args, "words": True}))
    if instr.call.startswith("load_"):
        yield change("repeated", (instr, instr))
    for what, made in _other_arguments(plan, instr):
        yield change(what, made)
    for i, name in enumerate(instr.syncs):
        yield change(f"barrier {name!r} dropped", replace(instr, syncs=instr.syncs[:i] + instr.syncs[i + 1 :]))


def _other_arguments(plan: Plan, instr: Instr) -> Iterator[tuple[str, Instr]]:
    def given(**changes: object) -> Instr:
        return replace(instr, args={**instr.args, **changes})

    for argument in _ROUNDS:
        if argument in instr.args:
            for by, what in (("+ 1", "a round late"), ("- 1", "a round early")):
                yield f"{what} ({argument})", given(**{argument: f"{instr.args[argument]} {by}"})
    for argument in _WIRES:
        if instr.args.get(argument) in _OTHER_WIRE:
            other = _OTHER_WIRE[str(instr.args[argument])]
            yield f"{argument} {other} instead of {instr.args[argument]}", given(**{argument: other})
    e = next((e for e in plan.exchanges if e.name == instr.args.get("value")), None)
    if instr.args.get("tells"):
        yield "loaders are not told", given(tells=False)
    if instr.args.get("whole") is True and e is not None and e.groups < e.owners:
        yield "idle blocks left out", given(whole=False)


def _spoilt_exchange(plan: Plan, e: Exchange) -> Iterator[PlanMutant]:
    def change(what: str, **changes: Any) -> PlanMutant:
        return PlanMutant(what, f"exchange {e.name}", with_exchange(plan, e.name, **changes))

    slots = e.slots
    while (slots := slots // 2) > 0:
        yield change(f"{slots} slots instead of {e.slots}", slots=slots)
    yield change(f"{e.slots + 1} slots instead of {e.slots}", slots=e.slots + 1)
    for level in (Level.CLUSTER, Level.BLOCK) if e.level is Level.GPU else (Level.BLOCK,):
        yield change(f"scope of a {level.value}", level=level)
    if e.wire == "Sentinel":
        yield change("an empty value that can be produced", dtype="u32")
    yield change("one vector too few", vectors=e.vectors - 1)
    if e.dtype == "bf16":  # the others are no features that blocks share out
        yield change("one unit too few", units=e.units - 1)
        yield change("one group too few", groups=e.groups - 1)
        if plan.schedule.blocks > 1:
            yield change("another share", share_offset=(e.share_offset + 1) % plan.schedule.blocks)
    other = next(x for x in plan.exchanges if x is not e) if len(plan.exchanges) > 1 else None
    if other is not None and e.wire != ASYNC:
        yield change(f"in the place of {other.name}", offset=other.offset)


def _spoilt_shapes(plan: Plan) -> Iterator[PlanMutant]:
    """Words that loaders and consumers compute their shares from."""
    words = {
        "mk::LinearShape": {
            "row groups": 2,
            "fold": 3,
            "bytes of a tile": 7,
            "columns of a tile": 8,
            "tiles of a group": 9,
            "parts of the columns": 10,
            "tiles of a stage": 12,
        },
        "mk::AttentionShape": {"KV heads": 3, "splits": 4, "rows": 12},
        "mk::MergeShape": {"groups": 0, "share": 1},
        "mk::ClusterShape": {"place of the parts": 0, "place of their barrier": 1, "groups of a block": 2},
        "mk::CustomShape": {"groups": 2, "share": 3},
        "mk::RowsShape": {"features": 1},
    }
    for record in plan.shape:
        for what, index in words.get(record.type, {}).items():
            for value in (record.words[index] + 1, record.words[index] - 1):
                if value > 0:
                    made = with_words(plan, record.name, {index: value})
                    yield PlanMutant(f"{what} {value} instead of {record.words[index]}", record.name, made)


def _spoilt_pages(plan: Plan) -> Iterator[PlanMutant]:
    """Words by which pages are found: of the pool, of the table, of the strides, and what the host allocates for them."""
    if not plan.schedule.page_rows:
        return
    attentions = [r for r in plan.shape if r.type == "mk::AttentionShape"]
    words = [(PAGES, "pages", 0, 1), (PAGES, "entries", 1, -1), *((r.name, "layer's pages", 1, -1) for r in attentions)]
    words += [(r.name, "page of a head", 2, by) for r in attentions for by in (1, -1)]
    words += [(r.name, "first page", 0, 1) for r in attentions]
    for name, what, index, by in words:
        word = next(r for r in plan.shape if r.name == name).words[index]
        yield PlanMutant(f"{what} {word + by} instead of {word}", name, with_words(plan, name, {index: word + by}))
    for rows in (plan.schedule.page_rows * 2, plan.schedule.page_rows // 2):
        yield PlanMutant(f"pages of {rows} rows", "kernel", replace(plan, schedule=replace(plan.schedule, page_rows=rows)))
    for buffer in ("kv", "pages"):
        smaller = {**plan.buffers, buffer: plan.buffers[buffer] - 16}
        yield PlanMutant("16 bytes less", f"buffer {buffer}", replace(plan, buffers=smaller))


def _spoilt_areas(plan: Plan) -> Iterator[PlanMutant]:
    """Each area half as large, and over the one before it."""
    placed = [a for a in plan.areas if a.bytes]
    for area in placed:
        yield PlanMutant("half the bytes", f"area {area.name}", with_area(plan, area.name, bytes=area.bytes // 2))
    for before, area in pairwise(placed):
        if not (before.overlay and area.overlay):
            made = with_area(plan, area.name, offset=before.offset)
            member = f"{ident(area.name.removeprefix('kept.'))}_kept"
            if area.name.startswith("kept.") and any(r.name == member for r in plan.shape):
                made = with_words(made, member, {0: before.offset})
            yield PlanMutant(f"over {before.name}", f"area {area.name}", made)


def _spoilt_rings(plan: Plan) -> Iterator[PlanMutant]:
    for role, ring in plan.schedule.rings:
        changed = replace(ring, stage_bytes=ring.stage_bytes // 16)
        rings = tuple((r, changed if r == role else x) for r, x in plan.schedule.rings)
        yield PlanMutant("stages a sixteenth as large", f"ring of {role}", replace(plan, schedule=replace(plan.schedule, rings=rings)))
    warps = plan.tunables.consumer_warps
    for value in (warps - 1, warps + 1, warps // 2):
        made = replace(plan, tunables=replace(plan.tunables, consumer_warps=value))
        yield PlanMutant(f"{value} arrivals on a stage instead of {warps}", "rings", made)


def _spoilt_clusters(plan: Plan) -> Iterator[PlanMutant]:
    """Launches in clusters of another size: the schedule alone says it."""
    size = plan.schedule.cluster
    for other in (size // 2, size * 2) if size > 1 else ():
        ops = tuple(replace(o, splits=other) if o.merge == MERGE_CLUSTER else o for o in plan.schedule.ops)
        made = replace(plan, schedule=replace(plan.schedule, ops=ops))
        yield PlanMutant(f"clusters of {other} blocks instead of {size}", "launch", made)


def _spoilt_launches(plan: Plan) -> Iterator[PlanMutant]:
    """Launches of a layer that begin at another op than the one that waits for the launch before."""
    inside = [op.name for op in plan.graph.ops if op.loop is not None and op.name != plan.schedule.start]
    for start in inside if plan.schedule.scope == "layer" else ():
        made = replace(plan, schedule=replace(plan.schedule, start=start))
        yield PlanMutant(f"from {start} on instead of {plan.schedule.start}", "launch", made)
