"""plan.txt: the plan as a person reads it. Stable text: goldens and diffs compare it."""

from __future__ import annotations

from collections.abc import Iterator

from megadsl.ir.plan import Instr, LayerLoop, Phase, Plan, Region
from megadsl.ir.schedule import BEGIN, END, LOAD, MERGE_CLUSTER, REGISTERS


def print_plan(plan: Plan) -> str:
    """All sections: schedule, exchanges, shared memory, packing, the programs of the roles, sites."""
    lines: list[str] = []
    for title, body in _sections(plan):
        lines.append(f"== {title}")
        lines.extend(line.rstrip() for line in body)
        lines.append("")
    return "\n".join(lines)


def _sections(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    yield "schedule", list(_schedule(plan))
    yield "exchanges", list(_exchanges(plan))
    yield (
        f"shared memory ({plan.smem_bytes} bytes)",
        [f"{a.offset:>7} {a.bytes:>7}  {a.name}{'  (overlay)' if a.overlay else ''}" for a in plan.areas],
    )
    yield "stage records", [f"{s.op:<28} {s.bytes:>6} bytes  {s.format}" for s in plan.stages]
    yield (
        "weights",
        [
            f"{r.offset:>12} +{r.layer_stride:<10} {r.bytes:>11} bytes  {r.kind:<6} {r.name}: "
            + ", ".join(f"{s.weight} ({s.rows} rows, {s.order})" for s in r.sources)
            for r in plan.packs
        ],
    )
    for program in plan.programs:
        behind = f", and warp {program.warps}, which finishes" if program.kind == "consumer" and plan.tunables.finishes else ""
        start = [line for instr in program.start for line in _instr(instr, "")]
        yield f"role {program.role}: {program.warps} warps from warp {program.first_warp}{behind}", [*start, *_program(program.body)]
    yield "sites", [f"{s.id:>3}  {s.role:<10} {s.op:<16} {s.kind:<11} {s.span.short:<18} {s.expects}" for s in plan.sites]
    yield "shape", [f"{r.type} {r.name} = {', '.join(map(str, r.words))}" for r in plan.shape]


def _schedule(plan: Plan) -> Iterator[str]:
    s = plan.schedule
    batch = f" of each of {s.sequences} sequences" if s.sequences > 1 else ""
    yield f"{s.arch}, {s.blocks} blocks, {plan.tunables.threads} threads, batch {s.batch}, KV rows {s.max_kv}{batch}"
    if s.page_rows:
        yield f"KV rows lie in pages of {s.page_rows}, {s.pool_pages} in each layer's pool"
    if plan.tunables.consumer_registers:
        yield f"registers move: {plan.tunables.consumer_registers} of a consumer's thread, {plan.tunables.loader_registers} of a loader's"
    if s.scope == "op":
        yield f"one op of one layer a launch, blocks to an SM: {s.resident}"
    if s.scope == "layer":
        behind = {BEGIN: "with it", END: "behind its last block"}.get(s.trigger, f"when all its blocks have begun {s.trigger}")
        yield f"one layer a launch, from {s.start} on, blocks to an SM: {s.resident}; the next launch may begin {behind}"
    if plan.tunables.copies == "lanes":
        yield "stages are copied by all lanes of a loader's warp, 16 bytes each"
    if s.warm_up is not None:
        blocks = "all" if s.warm_blocks is None else f"the first {s.warm_blocks}"
        often = f", every {s.warm_every} steps" if s.warm_every > 1 else ""
        yield f"code is read ahead by {s.warm_up} of {blocks} blocks, each the {s.warm_part} of it{often}"
    for role, ring in s.rings:
        window = f"window {ring.window} bytes, {ring.meeting_window or ring.window} around meetings"
        yield f"ring {ring.name} of {role}: {ring.stages} stages of {ring.stage_bytes} bytes, {window}"
    for op in s.ops:
        p = op.prefetch
        placement = "smem" if p.smem else "smem once the op has begun"
        held = f", {p.registers} tiles into registers ahead of its input" if p.registers else ""
        by = " by loads" if p.l2_by == LOAD else ""
        ahead = f", {p.l2_bytes} bytes into L2{by} ahead of {p.ahead_of or op.op}" if p.l2_bytes else ""
        splits = f", {op.splits} KV splits" if op.splits > 1 else ""
        splits += f" added within clusters of {op.splits}" if op.merge == MERGE_CLUSTER else ""
        splits += f", columns in {op.ways} parts from block {op.part_offset}" if op.ways > 1 else ""
        scale = ", scaled after its products" if op.scale == "after" else ""
        scale += ", gathered into registers" if op.gather == REGISTERS else ""
        scale += f", polled after {op.pause} ns" if op.pause else ""
        scale += f", {op.meeting_window} bytes in flight until its input is there" if op.meeting_window else ""
        scale += ", a dry run of its products ahead of its input" if op.dry_run else ""
        scale += ", published from registers" if op.publish == REGISTERS else ""
        yield f"op {op.op}: loaded by {op.loader}, {placement}{held}{ahead}, {p.hint}, share offset {op.share_offset}{splits}{scale}"


def _exchanges(plan: Plan) -> Iterator[str]:
    for e in plan.exchanges:
        how = next((edge for edge in plan.schedule.edges if edge.value == e.name), None)
        polled = f", a thread polls at most {how.width} vectors at once" if how and how.width else ""
        polled += f", {how.back_off} ns between polls in vain" if how and how.back_off else ""
        yield (
            f"{e.name}: {e.wire} {e.dtype}, level {e.level.value}, {e.owners} owners x {e.vectors} vectors x {e.slots} slots at {e.offset},"
            f" {e.groups} groups{', dense' if e.dense else ''}{', by words' if e.words else ''}, {e.uses} rounds per launch{polled}"
        )


def _program(items: tuple[Phase | LayerLoop, ...]) -> Iterator[str]:
    for item in items:
        if isinstance(item, LayerLoop):
            yield f"for layer in {item.trips}:"
            for phase in item.body:
                yield from _phase(phase, "  ")
        else:
            yield from _phase(item, "")


def _phase(phase: Phase, indent: str) -> Iterator[str]:
    yield f"{indent}{phase.title}  [{phase.span.short}]"
    for instr in phase.body:
        yield from _instr(instr, indent + "  ")


def _instr(instr: Instr, indent: str) -> Iterator[str]:
    site = f" site {instr.site}" if instr.site is not None else ""
    trips = f" x {instr.trips}" if instr.trips != "1" else ""
    reads = f" reads {_regions(instr.reads)}" if instr.reads else ""
    writes = f" writes {_regions(instr.writes)}" if instr.writes else ""
    syncs = f" meets at {', '.join(instr.syncs)}" if instr.syncs else ""
    yield f"{indent}{instr.verb.value} {instr.call}{site}{trips}{reads}{writes}{syncs}"
    for inner in instr.body:
        yield from _instr(inner, indent + "  ")


def _regions(regions: tuple[Region, ...]) -> str:
    return ", ".join(f"{r.space}.{r.name}[{r.index}]" if r.index else f"{r.space}.{r.name}" for r in regions)
