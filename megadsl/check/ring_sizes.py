"""Rings: as many arrivals as a stage's barriers count, and room for stages, barriers and tapes."""

from __future__ import annotations

from megadsl.check.memory import block_kinds
from megadsl.check.model import Device, Step
from megadsl.check.report import Findings, shown
from megadsl.diagnostics import declare
from megadsl.ir.plan import Program
from megadsl.lower.launches import AWAIT
from megadsl.lower.memory import TAPE_ENTRY_BYTES
from megadsl.lower.programs import instructions
from megadsl.lower.scratch import BARRIER_BYTES, SLOTS, landed_area, scratch_area, slot_bytes
from megadsl.lower.shape import CHUNK_ROWS
from megadsl.types import ceil_div

ARRIVALS = declare(
    "MK522",
    "ring {ring!r} waits for {expected} arrivals per stage, {arriving} consumer warps let go of one",
    "let every consumer warp take part: the barrier's count and the role's warps are one number",
)
READ = declare(
    "MK525",
    "{op!r} reads {area!r}, where copies land in any order that are for L2 alone",
    "read what the ring holds: a scratch is overwritten while it lies there",
)
SMALL = declare("MK523", "{what} needs {need} bytes, it has {have}", "use larger stages, or fewer vectors and chunks")


def check_sizes(device: Device, findings: Findings) -> None:
    """Of every ring and its loader."""
    plan, span = device.plan, device.plan.graph.span
    areas = {a.name: a for a in plan.areas}
    if len({plan.tunables.consumer_warps, device.warps, plan.schedule.consumer.warps}) != 1:
        for role, _ in plan.schedule.rings:
            rows = [(role, [f"barrier of {plan.tunables.consumer_warps} arrivals"]), ("consumer", [f"{device.warps} warps"])]
            findings.add(ARRIVALS, span, rows, what=role, ring=role, expected=plan.tunables.consumer_warps, arriving=device.warps)
    records = {r.name: r.bytes for r in plan.packs}
    for program in (p for p in plan.programs if p.kind == "loader"):
        ring, role = plan.schedule.ring(program.role), program.role
        needs = [(f"ring.{role}", ring.stages * ring.stage_bytes), (f"barriers.{role}", 2 * 8 * ring.stages)]
        needs.append((f"tape.{role}", TAPE_ENTRY_BYTES * tape_entries(device, program)))
        if any("by" in step.instr.args for step in device.steps(program, 1)):
            needs += [(scratch_area(role), SLOTS * slot_bytes(ring)), (landed_area(role), SLOTS * BARRIER_BYTES)]
        for what, need in needs:
            if areas[what].bytes < need:
                findings.add(
                    SMALL,
                    span,
                    [(role, [f"{need} bytes"]), (what, [f"{areas[what].bytes} bytes"])],
                    what=what,
                    need=need,
                    have=areas[what].bytes,
                )
        for step in device.steps(program, 1):
            need = _stage_need(device, step, records)
            if need > ring.stage_bytes:
                rows = [(role, [shown(step.instr)]), (f"stage of {ring.name}", [f"{ring.stage_bytes} bytes"])]
                findings.add(SMALL, step.instr.span, rows, what=f"a stage for {step.instr.op!r}", need=need, have=ring.stage_bytes)


def check_scratches(device: Device, findings: Findings) -> list[str]:
    """Nobody reads what loaders bring into L2 by loads, so that nothing has to be ordered behind them."""
    loads = {r.name: i for p in device.plan.programs for i in instructions(p.body) if "by" in i.args for r in i.writes if r.space == "smem"}
    for program in device.plan.programs:
        for instr in instructions(program.body):
            for region in instr.reads:
                if region.space == "smem" and region.name in loads:
                    rows = [("loader", [shown(loads[region.name])]), (program.role, [shown(instr)])]
                    findings.add(READ, instr.span, rows, op=instr.op, area=region.name)
    return [f"L2: nobody reads {', '.join(loads)}, whose copies are bounded by its slots"] if loads else []


def _stage_need(device: Device, step: Step, records: dict[str, int]) -> int:
    match step.instr.call:
        case "load_vector":
            return records[str(step.instr.args["record"])]
        case "load_matrix":
            m = device.matrix(step.instr.op)
            return m.tile_bytes * m.together
        case "load_cache":
            return CHUNK_ROWS * int(device.op(step.instr.op).cache_dim) * 4
    return 0


def tape_entries(device: Device, program: Program) -> int:
    """Most entries that any kind of block writes; mk::Tape::matrix adds one for a part of the columns, or for a pass and chunk of it."""
    most = 0
    for block in block_kinds(device):
        entries = 0
        for step in device.steps(program, 1):
            entries += _entries(device, block, step)
        most = max(most, entries)
    return most


def _entries(device: Device, block: int, step: Step) -> int:
    if step.instr.call != "load_matrix":
        return int(step.instr.call != AWAIT)
    m = device.matrix(step.instr.op)
    own = [last - first for _, first, last in device.parts(step.instr.op)[block]]
    return sum(min(n, 1) if m.chunks == 1 else ceil_div(n, m.pass_groups) * m.chunks for n in own)
