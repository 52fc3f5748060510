"""Pass ``program``: the instructions of every role, with their sites, regions and trip counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from megadsl.ir.expr import reductions
from megadsl.ir.graph import Attention, Custom, Embed, Linear, Op, Rope, RowMap, ValueRef, kept_values
from megadsl.ir.plan import Exchange, Instr, Item, LayerLoop, Phase, Program, Region, Verb
from megadsl.ir.schedule import LOAD
from megadsl.lower.builder import Builder, sequence
from megadsl.lower.custom import custom_phase, loads
from megadsl.lower.exchanges import is_local, merge_lanes, merges_in_cluster
from megadsl.lower.finish import finishers
from megadsl.lower.gathers import in_registers, is_direct
from megadsl.lower.handoffs import end_meetings, gather, keep, publish
from megadsl.lower.heads import in_halves, query_tiles
from megadsl.lower.launches import joined, triggered
from megadsl.lower.memory import copy_name, least_groups, own_groups
from megadsl.lower.operands import head_vectors, prologue_values, vectors
from megadsl.lower.packing import bias_regions, head_vector_name, vector_name
from megadsl.lower.publish import results_of, staged
from megadsl.lower.row_maps import row_map
from megadsl.lower.scope import begins_launch
from megadsl.lower.scratch import scratch_region
from megadsl.lower.steps import HANDED, ROWS, around_rows, feeds_itself, hands_step_on, passes_rows_on
from megadsl.lower.tiling import tiling
from megadsl.lower.warm import warm_up
from megadsl.types import Level


def build_programs(builder: Builder) -> tuple[Program, ...]:
    """One program per role, loaders' first; their warps come behind the consumers', which are whole warpgroups then (lower/threads.py)."""
    programs: list[Program] = []
    warp = builder.schedule.consumer.warps + finishers(builder.schedule)
    for role in sorted(builder.schedule.roles, key=lambda r: r.kind != "loader"):
        phases = _load_phases if role.kind == "loader" else _consume_phases
        first = warp if role.kind == "loader" else 0
        start = warm_up(builder.graph, builder.schedule, role.name)
        programs.append(Program(role.name, role.kind, first, role.warps, _in_loops(builder, phases, role.name), start))
        warp += role.warps
    return tuple(programs)


def _in_loops(builder: Builder, phases: Callable[[Builder, Op, str], Iterator[Phase]], role: str) -> tuple[Item, ...]:
    items: list[Item] = []
    inside: list[Phase] = []
    for op in builder.graph.ops:
        found = list(phases(builder, op, role))
        if op.loop is not None:
            inside.extend(found)
            continue
        if inside:
            items.append(LayerLoop("layers", tuple(inside)))
            inside = []
        items.extend(found)
    if inside:
        items.append(LayerLoop("layers", tuple(inside)))
    return tuple(items)


def _load_phases(builder: Builder, op: Op, role: str) -> Iterator[Phase]:
    body: list[Instr] = []
    for other in builder.graph.ops:
        how = builder.schedule.op(other.name)
        if (
            isinstance(other, Linear | Attention)
            and how.prefetch.l2_bytes
            and how.loader == role
            and (how.prefetch.ahead_of or other.name) == op.name
        ):
            body.append(_prefetch(builder, other, op, role))
    if loads(op) and builder.schedule.op(op.name).loader == role:
        body.extend(_loads(builder, op, role))
    if body:
        yield Phase(op.name, _title(op), op.span, tuple(body))


def _prefetch(builder: Builder, op: Linear | Attention, at: Op, role: str) -> Instr:
    """Into L2, when the loader has come to the op ``at``; where that stands behind ``op`` in the layer, what the next layer streams."""
    order, how = builder.graph.ops, builder.schedule.op(op.name).prefetch
    together = at.loop is not None and at.loop == op.loop and builder.schedule.scope != "op"  # which knows one layer
    ahead = int(together and order.index(at) > order.index(op))
    args: dict[str, object] = {}
    site: int | None = None
    writes: tuple[Region, ...] = ()
    if how.l2_by == LOAD:
        site = builder.site(role, op.name, "scratch", "parity of the copy before the last", op.span)
        writes, args = (scratch_region(role),), {"by": LOAD}
    if isinstance(op, Attention):
        rows = Region("kv", op.cache, Level.GPU, "rows before kv_len")
        return Instr(Verb.PREFETCH, "prefetch_cache", op.name, op.span, site, (rows,), writes, args={"ahead": ahead, **args})
    args |= {"ahead": ahead} if ahead else {}
    return Instr(Verb.PREFETCH, "prefetch_l2", op.name, op.span, site, (Region("weights", op.name, Level.GPU),), writes, args=args)


def _loads(builder: Builder, op: Op, role: str) -> Iterator[Instr]:
    hint = builder.schedule.op(op.name).prefetch.hint
    if builder.gated(op):
        site = builder.site(role, op.name, "gate", "the layer whose op the consumers have begun, plus 1", op.span)
        yield Instr(Verb.WAIT, "pass_gate", op.name, op.span, site, reads=(Region("smem", f"gates.{op.name}", Level.BLOCK),))
    site = builder.site(role, op.name, "ring.empty", "parity of the slot's round before", op.span)
    ring = Region("ring", role, Level.BLOCK)
    if isinstance(op, Attention):
        if hands_step_on(builder.graph, builder.schedule):
            turn = builder.site(role, op.name, "gate", "the step, which the consumers read when the launch before has ended", op.span)
            yield Instr(Verb.WAIT, "await_step", op.name, op.span, turn, reads=(HANDED,))
        if passes_rows_on(builder.graph, builder.schedule):
            turn = builder.site(role, op.name, "gate", "the epoch whose cached rows may be copied", op.span)
            yield Instr(Verb.WAIT, "await_rows", op.name, op.span, turn, reads=(ROWS,))
        rows = Region("kv", op.cache, Level.GPU, "rows before kv_len")
        yield Instr(Verb.LOAD, "load_cache", op.name, op.span, site, (rows,), (ring,), "kv_stages(kv_len)", args={"hint": hint})
        return
    if isinstance(op, Embed):
        return
    for arg, _ in vectors(op):
        record = vector_name(op, arg)
        weights = Region("weights", record, Level.GPU)
        yield Instr(Verb.LOAD, "load_vector", op.name, op.span, site, (weights,), (ring,), args={"record": record, "hint": hint})
    if not isinstance(op, Linear):
        return
    weights = Region("weights", op.name, Level.GPU)
    yield Instr(Verb.LOAD, "load_matrix", op.name, op.span, site, (weights,), (ring,), "own_groups * pieces", args={"hint": hint})


def _consume_phases(builder: Builder, op: Op, role: str) -> Iterator[Phase]:
    before, behind = around_rows(op, builder.graph, builder.schedule)
    for index, phase in enumerate(_own_phases(builder, op, role)):
        if index == 0 and (before or behind):
            phase = replace(phase, body=(*before, *phase.body, *behind))
        if index == 0:
            phase = triggered(phase, builder.schedule)
        begins = builder.schedule.scope == "op" or (index == 0 and begins_launch(op, builder.graph, builder.schedule))
        yield joined(phase, builder.graph, builder.schedule) if begins and builder.schedule.scope != "step" else phase


def _own_phases(builder: Builder, op: Op, role: str) -> Iterator[Phase]:
    match op:
        case Embed():
            yield Phase(op.name, _title(op), op.span, tuple(_embed(builder, op, role)))
        case RowMap():
            yield Phase(op.name, _title(op), op.span, tuple(row_map(builder, op, role)))
        case Linear():
            yield Phase(op.name, _title(op), op.span, tuple(_linear(builder, op, role)))
            if builder.schedule.op(op.name).ways > 1:
                yield Phase(op.name, f"{op.name}: add the parts of the columns", op.span, tuple(_add_parts(builder, op, role)))
        case Attention():
            yield Phase(op.name, _title(op), op.span, tuple(_attention(builder, op, role)))
            begun = _begin_behind(builder, op, role)
            yield Phase(op.name, f"{op.name}: add the splits", op.span, (*begun, *_merge(builder, op, role)))
        case Custom():
            yield Phase(op.name, _title(op), op.span, tuple(custom_phase(builder, op, role)))


def _title(op: Op) -> str:
    match op:
        case Embed():
            return f"{op.name}: rows of the table"
        case RowMap():
            return f"{op.name}: rows of {op.features}"
        case Linear():
            return f"{op.name}: {op.rows} x {op.columns}"
        case Attention():
            return f"{op.name}: {op.heads} heads of {op.head_dim} over {op.kv_heads} KV heads"
        case Custom():
            return f"{op.name}: {op.call.function} of {op.call.header.name}"


def _embed(builder: Builder, op: Embed, role: str) -> Iterator[Instr]:
    reads = (Region("weights", op.name, Level.GPU), Region("control", "token_ids", Level.GPU))
    yield Instr(Verb.COMPUTE, "embed", op.name, op.span, None, reads, (staged(),), syncs=("end",))
    yield publish(builder, op, role, op.out)
    yield from keep(builder, op, op.out)


def _follower(builder: Builder, op: Attention) -> Linear | None:
    """The linear that begins before the splits of ``op`` are added: no other stage of its ring comes between, and it copies no
    vectors, for which the block would have to meet first."""
    after = builder.position(op.name) + 1
    found = builder.graph.ops[after] if after < len(builder.graph.ops) else None
    if found is None or begins_launch(found, builder.graph, builder.schedule):
        return None
    return found if isinstance(found, Linear) and found.loop == op.loop and not vectors(found) else None


def _begin_behind(builder: Builder, op: Attention, role: str) -> tuple[Instr, ...]:
    """How the follower of ``op`` begins where it holds tiles. Its site has this place in any case: numbers are stable."""
    follower = _follower(builder, op)
    if follower is not None:
        builder.site_of(role, follower)
    return tuple(_begin(builder, follower, role)) if follower is not None and builder.held(follower) else ()


def _begins_early(builder: Builder, op: Linear) -> bool:
    before = builder.graph.ops[builder.position(op.name) - 1]
    return isinstance(before, Attention) and _follower(builder, before) is op and builder.held(op) > 0


def _begin(builder: Builder, op: Linear, role: str) -> Iterator[Instr]:
    """What a linear does before it waits for any block: it opens its gate, and where it holds tiles, takes them and what lies
    before them in the ring."""
    ring_role, tiles = builder.schedule.op(op.name).loader, builder.held(op)
    ring = Region("ring", ring_role, Level.BLOCK)
    sites = {arg: builder.site_of(role, op, arg) for arg in (*(arg for arg, _ in vectors(op)), "")}
    if builder.gated(op):
        yield Instr(Verb.SIGNAL, "open_gate", op.name, op.span, writes=(Region("smem", f"gates.{op.name}", Level.BLOCK),))
    direct = is_direct(op, builder.schedule, builder.graph.tokens)
    if direct:
        for index, (arg, _) in enumerate(vectors(op)):
            lanes = Region("registers", copy_name(op, arg), Level.WARP)
            args = {"linear": op, "arg": arg, "ahead": index, "ring": ring_role}
            yield Instr(Verb.WAIT, "hold_vector", op.name, op.span, sites[arg], (ring,), (lanes,), args=args)
    if builder.copies(op):
        yield from _copies(op, ring_role, sites)
        if vectors(op) and not finishers(builder.schedule):  # before they are read: a finisher meets the others there anyway
            yield Instr(Verb.BARRIER, "sync", op.name, op.span)
    if not tiles:
        return
    held = Region("registers", op.name, Level.WARP)
    pieces, schedule = tiling(op).pieces, builder.schedule
    everywhere, whole = least_groups(op, schedule) * pieces >= tiles, own_groups(op, schedule) * pieces <= tiles
    beside = not _begins_early(builder, op) and _takes_beside(builder, op)
    args = {"tiles": tiles, "everywhere": everywhere, "whole": whole, "ring": ring_role, "beside": beside}
    args |= {"direct": direct, "lanes": in_registers(op, schedule), "ahead": len(vectors(op))}
    yield Instr(Verb.WAIT, "hold_tiles", op.name, op.span, sites[""], (ring,), (held,), f"min({tiles}, own_groups * pieces)", args=args)


def _takes_beside(builder: Builder, op: Linear) -> bool:
    """Whether a linear takes its tiles while the first polls of its input are under way: of one value, by one round of dense polls."""
    values = prologue_values(op)
    if not builder.held(op) or len(values) != 1 or in_registers(op, builder.schedule):
        return False
    polls = _polls(builder, op, values[0][1])
    return bool(polls["dense"]) and polls["rounds"] == 1


def _copies(op: Linear, ring_role: str, sites: dict[str, int]) -> Iterator[Instr]:
    """Vectors that move from the ring to a place of their own."""
    for arg, _ in vectors(op):
        reads, copy = Region("ring", ring_role, Level.BLOCK), Region("smem", copy_name(op, arg), Level.BLOCK)
        args = {"linear": op, "arg": arg, "record": vector_name(op, arg), "ring": ring_role}
        yield Instr(Verb.WAIT, "copy_vector", op.name, op.span, sites[arg], (reads,), (copy,), args=args)


def _linear(builder: Builder, op: Linear, role: str) -> Iterator[Instr]:
    if not _begins_early(builder, op):
        yield from _begin(builder, op, role)
    if _meets_first(builder, op):
        yield Instr(Verb.BARRIER, "meet_finisher", op.name, op.span, syncs=("input",))
    for index, (name, ref) in enumerate(kept_values(op)):
        if is_local(op, ref, builder.graph, builder.schedule):
            continue
        yield gather(builder, op, role, "gather_kept", ref, "kept", arg=name, index=index, own=op.out)
    ring_role = builder.schedule.op(op.name).loader
    ring = Region("ring", ring_role, Level.BLOCK)
    prologue, site, held = tuple(_prologue(builder, op, role, ring_role)), builder.site_of(role, op), builder.held(op)
    direct, lanes = is_direct(op, builder.schedule, builder.graph.tokens), in_registers(op, builder.schedule)
    input_ = () if lanes else (Region("smem", "activations", Level.BLOCK),)
    reads = (ring, *input_, *((Region("registers", op.name, Level.WARP),) if held else ()))
    split = builder.schedule.op(op.name).ways > 1
    parts = _parts(builder, op) if split else {}
    reads += () if split else bias_regions(op)
    writes = (Region("exchange", str(parts["parts"]), Level.GPU, str(parts["parts_round"])),) if split else results_of(builder, op)
    yield Instr(
        Verb.COMPUTE, "matrix", op.name, op.span, site, reads, writes,
        "own_groups * pieces", prologue, _meetings(builder, op),
        {
            "linear": op, "ring": ring_role, "rope": _rotated(op), "held": held, "direct": direct, "lanes": lanes, "parts": "",
            "pause": builder.schedule.op(op.name).pause, "met": _meets_first(builder, op), **parts,
        },
    )  # fmt: skip
    if not split:
        yield from _results(builder, op, role)


def _meets_first(builder: Builder, op: Linear) -> bool:
    """Whether a finisher meets the others before it does anything for the op: they pause before they poll, and need not be stopped."""
    return finishers(builder.schedule) > 0 and builder.schedule.op(op.name).pause > 0


def _results(builder: Builder, op: Linear, role: str) -> Iterator[Instr]:
    """What becomes of an op's staged results, or of its logits."""
    if op.out is not None:
        yield publish(builder, op, role, op.out)
        yield from keep(builder, op, op.out)
    if op.sink == "argmax":
        yield _argmax(builder, op, role)


def _rotated(op: Linear) -> Rope | None:
    return next((p.turned for p in op.parts if p.turned is not None), None)


def _parts(builder: Builder, op: Linear) -> dict[str, object]:
    parts = builder.exchange(f"{op.name}.parts")
    return {"parts": parts.name, "parts_wire": parts.wire, "parts_round": sequence(builder, parts.name, op.name)}


def _add_parts(builder: Builder, op: Linear, role: str) -> Iterator[Instr]:
    parts = builder.exchange(f"{op.name}.parts")
    round_ = sequence(builder, parts.name, op.name)
    site = builder.site(role, op.name, "exchange", f"tag of {parts.name} in round {round_}", op.span)
    region = Region("exchange", parts.name, parts.level, round_)
    args = {"parts": parts.name, "wire": parts.wire, "round": round_, "linear": op, "rope": _rotated(op)}
    reads = (region, *bias_regions(op))
    yield Instr(Verb.COMPUTE, "add_parts", op.name, op.span, site, reads, (staged(),), syncs=end_meetings(builder, op), args=args)
    yield from _results(builder, op, role)


def _meetings(builder: Builder, op: Linear) -> tuple[str, ...]:
    """Barriers of mk::run_tiles."""
    ways = builder.schedule.op(op.name).ways
    if ways == 1:
        ends = end_meetings(builder, op)
    else:
        ends = ("end",) if builder.exchange(f"{op.name}.parts").wire == "Flag" else ()
    gathered = () if in_registers(op, builder.schedule) else ("gathered",)
    if finishers(builder.schedule):
        gathered = ("input", *gathered)
    return (*gathered, "partials", *ends)


def _prologue(builder: Builder, op: Linear, role: str, ring_role: str) -> Iterator[Instr]:
    """Gathers, and what makes the operand of them. A factored operand is final when it arrives, so that its vectors come first."""
    taken = builder.copies(op) or is_direct(op, builder.schedule, builder.graph.tokens)
    waits = [] if taken else list(_wait_vectors(builder, op, role, ring_role))
    gathers = list(_gathers(builder, op, role))
    if op.factored is not None:
        yield from (*waits, *gathers)
    else:
        yield from (*gathers, *waits)
        yield from _rows(op)
    for _ in waits:
        yield Instr(Verb.SIGNAL, "release_vector", op.name, op.span, args={"ring": ring_role})


def _gathers(builder: Builder, op: Linear, role: str) -> Iterator[Instr]:
    buffers = ("activations", "second")
    beside = not _begins_early(builder, op) and _takes_beside(builder, op)
    hold = {"holds": beside, "ring": builder.schedule.op(op.name).loader, "hold_site": builder.site_of(role, op) if beside else None}
    for index, (name, ref) in enumerate(prologue_values(op)):
        polls, into = _polls(builder, op, ref), "registers" if in_registers(op, builder.schedule) else buffers[index]
        yield gather(builder, op, role, "gather", ref, into, arg=name, whole=_whole(builder, op, ref), **polls, **hold)


def _whole(builder: Builder, op: Linear, ref: ValueRef) -> bool:
    """Gathered in column chunks, a value is never whole: idle blocks are then waited for at another of its readers."""
    features = builder.graph.value(ref.value).features
    return ref.begin == 0 and ref.features == features and builder.chunks[op.name] == tiling(op).pieces


def _polls(builder: Builder, op: Linear, ref: ValueRef) -> dict[str, int]:
    return builder.polls(_at_once(builder, op, ref), _whole(builder, op, ref))


def _wait_vectors(builder: Builder, op: Linear, role: str, ring_role: str) -> Iterator[Instr]:
    for index, (arg, _) in enumerate(vectors(op)):
        site = builder.site_of(role, op, arg)
        ring = Region("ring", ring_role, Level.BLOCK)
        yield Instr(Verb.WAIT, "wait_vector", op.name, op.span, site, (ring,), args={"arg": arg, "ahead": index, "ring": ring_role})


def _rows(op: Linear) -> Iterator[Instr]:
    """Row reductions of what has been gathered, then the prologue in place."""
    rows = Region("smem", "activations", Level.BLOCK)
    found = reductions(op.prologue.expr)
    for index, reduce in enumerate(found):
        yield Instr(Verb.BARRIER, "sync", op.name, op.span)
        scalars = Region("smem", "scalars", Level.BLOCK)
        args = {"reduce": reduce, "index": index, "linear": op}
        yield Instr(Verb.COMPUTE, "reduce", op.name, op.span, None, (rows,), (scalars,), args=args)
    if len(op.prologue.args) > 1 or found or not _is_plain(op):
        yield Instr(Verb.BARRIER, "sync", op.name, op.span)
        yield Instr(Verb.COMPUTE, "apply", op.name, op.span, None, (rows,), (rows,), args={"linear": op, "reductions": found})


def _at_once(builder: Builder, op: Linear, ref: ValueRef) -> ValueRef:
    """As many features as one gather brings: a part of the columns, or a chunk of them."""
    return replace(ref, features=min(ref.features, builder.chunks[op.name] * tiling(op).tile_columns))


def _is_plain(op: Linear) -> bool:
    from_value = op.prologue.args[0][0]
    return getattr(op.prologue.expr, "name", None) == from_value


def _argmax(builder: Builder, op: Linear, role: str) -> Instr:
    best = f"{op.name}.best"
    site = builder.site(role, op.name, "exchange", "round of the best candidates", op.span)
    region = Region("exchange", best, Level.GPU, "epoch")
    control = Region("control", "next_ids", Level.GPU)
    between = ("token",) if feeds_itself(builder.graph, builder.schedule) else ()
    alone = finishers(builder.schedule) > 0  # one warp meets itself
    syncs, args = between if alone else ("candidates", "winners", *between, "choice"), {"value": best, "round": "epoch"}
    return Instr(Verb.SIGNAL, "argmax", op.name, op.span, site, (region,), (region, control), syncs=syncs, args=args)


def _attention(builder: Builder, op: Attention, role: str) -> Iterator[Instr]:
    if builder.gated(op):
        yield Instr(Verb.SIGNAL, "open_gate", op.name, op.span, writes=(Region("smem", f"gates.{op.name}", Level.BLOCK),))
    how, schedule = builder.schedule.op(op.name), builder.schedule
    parts, qkv = builder.exchange(f"{op.name}.parts"), builder.exchange(op.q.value)
    gather = builder.site(role, op.name, "exchange", f"tag of {op.q.value}", op.span)
    full = builder.site(role, op.name, "ring.full", "parity of the stage's round", op.span)
    maps = tuple(Region("weights", head_vector_name(op, which, arg), Level.GPU) for which, arg, _ in head_vectors(op))
    inputs = (Region("exchange", op.q.value, qkv.level), Region("ring", how.loader, Level.BLOCK))
    reads = (*inputs, Region("control", "ancestors", Level.GPU), *maps)
    syncs = tuple(_unit_meetings(builder, op, parts))
    writes = (Region("exchange", parts.name, parts.level), Region("kv", op.cache, Level.GPU, "rows from kv_len"))
    args = {
        "attention": op, "ring": how.loader, "gather_site": gather, "qkv": op.q.value, "qkv_wire": qkv.wire, "parts": parts.name,
        **builder.polls(_unit_features(op), False), "parts_wire": parts.wire,
        "qkv_round": sequence(builder, op.q.value, op.name), "parts_round": sequence(builder, parts.name, op.name),
        "cluster": merges_in_cluster(op, builder.schedule), "holds": builder.held(op) > 0, "direct": in_registers(op, builder.schedule),
        "pause": how.pause, "halves": in_halves(op, builder.graph.tokens, schedule.consumer.warps, schedule.sequences),
    }  # fmt: skip
    yield Instr(Verb.COMPUTE, "attention", op.name, op.span, full, reads, writes, "kv_stages(kv_len)", syncs=syncs, args=args)


def _unit_meetings(builder: Builder, op: Attention, parts: Exchange) -> Iterator[str]:
    """Barriers of mk::run_attention."""
    finished = finishers(builder.schedule) > 0
    if finished:
        yield "input"
    units, blocks, tiles = op.kv_heads * builder.schedule.op(op.name).splits, builder.schedule.blocks, query_tiles(op, builder.graph.tokens)
    if units > blocks:
        yield "again"
    if not in_registers(op, builder.schedule):
        yield "gathered"
    if op.maps and not in_registers(op, builder.schedule):
        yield "mapped"
    if tiles > builder.schedule.consumer.warps or builder.schedule.sequences > 1:
        yield "next"
    yield "parts"
    if parts.wire == "Flag":
        yield "published"
    if finished:
        yield "merge"
    elif units < blocks:
        yield "idle"


def _unit_features(op: Attention) -> ValueRef:
    """As many features as one unit gathers: the queries of a KV head, its key and its value."""
    return ValueRef(op.q.value, 0, (op.heads // op.kv_heads + 2) * op.head_dim)


def _merge(builder: Builder, op: Attention, role: str) -> Iterator[Instr]:
    parts = builder.exchange(f"{op.name}.parts")
    round_ = sequence(builder, parts.name, op.name)
    cluster = merges_in_cluster(op, builder.schedule)
    expects = f"parity of the round of {parts.name}" if cluster else f"tag of {parts.name}"
    site = builder.site(role, op.name, "exchange", expects, op.span)
    region = Region("exchange", parts.name, parts.level, round_)
    lanes, at_once = merge_lanes(op, builder.graph.tokens, builder.schedule)
    args = {"parts": parts.name, "wire": parts.wire, "round": round_, "lanes": lanes, "at_once": at_once, "cluster": cluster}
    syncs = end_meetings(builder, op)
    yield Instr(Verb.COMPUTE, "merge", op.name, op.span, site, (region,), results_of(builder, op), syncs=syncs, args=args)
    yield publish(builder, op, role, op.out)
    yield from keep(builder, op, op.out)


def instructions(items: Iterable[Item]) -> Iterator[Instr]:
    """Every instruction of a program, nested ones after the one they belong to."""

    def walk(instr: Instr) -> Iterator[Instr]:
        yield instr
        for inner in instr.body:
            yield from walk(inner)

    for item in items:
        for phase in item.body if isinstance(item, LayerLoop) else (item,):
            for instr in phase.body:
                yield from walk(instr)
