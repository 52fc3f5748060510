"""Pass ``schedule``: a complete Schedule for a graph on a machine. The user's overrides are applied on top of it."""

from __future__ import annotations

from dataclasses import replace

from megadsl.diagnostics import Collector, declare
from megadsl.dsl.overrides import Overrides
from megadsl.ir.formats import PLAIN
from megadsl.ir.graph import Attention, Custom, Embed, Graph, Linear, Op, RowMap, kept_values
from megadsl.ir.schedule import INSTRUCTION, EdgeSchedule, OpSchedule, Prefetch, Ring, Role, Schedule, Sentinel, Tagged
from megadsl.lower.columns import chunk_budget, default_ways, part_shares, share_begin, why_whole
from megadsl.lower.factor import factored
from megadsl.lower.finish import finishers, why_block
from megadsl.lower.heads import unit_bytes
from megadsl.lower.operands import takes_chunks
from megadsl.lower.packing import natural_bytes
from megadsl.lower.pages import check_pages
from megadsl.lower.scope import LAUNCHES
from megadsl.lower.threads import MIN_REGISTERS, MOVES, WARP_THREADS, why_stay
from megadsl.lower.tiling import GROUP_ROWS, tile_bytes, tiling
from megadsl.machine import MACHINES, Machine
from megadsl.source import Span
from megadsl.types import KIB, MIB, PerLayer, ceil_div, round_up

LOADER = "loader"
CONSUMER = "consumer"
CONSUMER_WARPS = 8
FEWER_WARPS = 4  # where what they leave of an attention would take more than PARTS_SHARE of a block's shared memory
PARTS_SHARE = 0.6
LEAST_RING = 48 * KIB  # or where less would be left beside it for the ring
LEAST_STAGE = 8 * KIB  # smaller copies do not keep HBM busy
STAGE_BYTES = 16 * KIB  # 240 ns of one lane's time per copy: 16 KB keeps the loader off the critical path
SMALL_STAGE = 28 * KIB  # three tiles of 576 columns: a copy each would keep the loader on it
LEAST_SMALL = 4  # of them find room in a block's shared memory; else stages are the usual ones
WINDOW_BYTES = 64 * KIB  # in flight: enough for HBM
MEETING_BYTES = 32 * KIB  # around meetings, whose loads queue behind what is in flight; half of it starves HBM
MAX_SPLITS = 16
PART_ROWS = 512  # of a KV head's partial results, all splits together: to send and add more costs more than a split saves
LONGEST_PAUSE = 1_000_000  # ns: nanosleep's
FEW_TOKENS = 4  # residuals of more are too many vectors to poll
BATCH = 3  # more would cost a ring stage where shared memory is short
MOST_BATCH = 8  # row groups of one token that the block's first warp finishes alone
FEWEST_BLOCKS = 0.9  # of the SMs: fewer could not keep HBM busy
SMALL_LAYER = 16 * MIB  # of weights: they stream in less time than its hand-offs take
FEWEST_OF_SMALL = 0.5  # of the SMs: they read 4.2 TB/s of 4.5
BLOCKS_SLACK = 1.01

TOO_MANY_WARPS = declare(
    "MK161", "the schedule asks for {warps} warps, {arch} has room for {limit} per block", "use fewer consumer or loader warps"
)
REGISTERS = declare(
    "MK162",
    "{warps} warps leave {registers} registers per thread; the consumer role needs at least {need}",
    "use fewer warps",
)
NOT_MOVED = declare(
    "MK245",
    "registers cannot move from loaders to consumers: {why}",
    'leave s.registers("moved") out, or use 4, 8 or 12 consumer warps{alone}',
)
NOT_FINISHED = declare("MK246", "one warp of a block cannot finish what the others multiply: {why}", 'leave s.finish("warp") out')
BAD_BLOCKS = declare("MK163", "the schedule asks for {blocks} blocks, {arch} runs at most {limit} at once", "choose 1 to {limit} blocks")
BAD_STAGE = declare(
    "MK164",
    "ring {ring!r} has stages of {stage} bytes, but {what} needs {need} in multiples of {unit}",
    "use stage_bytes={need} or a larger multiple of {unit}",
)
BAD_SLOTS = declare(
    "MK165",
    "{kind} on {value!r} has {slots} slots",
    "use a power of two that is at least {least} and at most {most}, as in mk.{kind}(slots=4)",
)
BAD_COUNT = declare("MK166", "{what} is {value}", "choose a value from {low} to {high}")
LACKS = declare("MK167", "{what} needs {feature!r}, which {arch} does not have", "compile for one of: {having}{alone}")
_ALONE = "; mk.schedule(kernel, arch=...) decides for one architecture alone"  # in mends of what a schedule asks
BAD_HINT = declare("MK168", "unknown cache hint {hint!r} for {op!r}", "use evict_first, evict_normal or evict_last")
BARRIERS = declare(
    "MK169", "ring {ring!r} has {stages} stages, which is more than the {limit} a ring may have", "use at most {limit} stages"
)

BAD_CHUNK = declare(
    "MK160",
    "chunk of {op!r} is {chunk} tiles, a row group of it has {pieces}{why}",
    "choose a divisor of {pieces}, or 0 to let the compiler choose",
)
BAD_WAYS = declare(
    "MK242",
    "the columns of {op!r} cannot be split in {ways} parts: {why}",
    "split a linear without a norm in front, in whole tiles: here {choices} parts are possible",
)

NO_RING = declare("MK178", "loader {role!r} has no ring", "give it one: s.ring({role!r}, stages=..., stage_bytes=..., window=...)")
BAD_ROLES = declare(
    "MK179",
    "a block needs one consumer role and loaders of one warp each; the roles are {roles}",
    'keep one role of kind "consumer" and use warps=1 for loaders',
)
L2_UNIT = declare("MK188", "l2 prefetch of {op!r} is {bytes} bytes", "use a multiple of 16")

L2_NOTHING = declare(
    "MK240",
    "l2 prefetch of {op!r}, {why}",
    "prefetch linears, or the cached rows of attention",
)

NOT_FACTORED = declare(
    "MK241",
    "{op!r} cannot be scaled after its products",
    'use .scale("before"): "after" is for linears whose input is elementwise(one value) times an expression of its row reductions',
)

SEQUENCES = declare(
    "MK259",
    "a batch of {sequences} sequences in steps of {tokens} tokens",
    "use 1 to {most} sequences, and at least as many tokens as sequences",
)
NO_BATCH = declare("MK257", "{kernel!r} cannot serve {sequences} sequences: {why}", "{mend}")

HINTS = ("evict_first", "evict_normal", "evict_last")
MAX_STAGES = 64
MAX_SLOTS = 64  # two to four serve; each is a copy of the whole value in L2
MAX_BATCH = 32
MAX_KV = 1 << 24  # rows
MOST_SEQUENCES = 8  # mk::kMaxSequences
STAGE_UNIT = 128  # bytes
KV_CHUNK = 64  # bytes of a chunk per dimension of a head: 16 rows of K and V
L2_BYTES = 16  # the bulk prefetch's granule


def default_schedule(graph: Graph, machine: Machine, *, blocks: int | None, max_kv: int, sequences: int = 1) -> Schedule:
    """What the machine model suggests. ``blocks`` defaults to :func:`best_blocks`; ring stages of 0 mean "as many as fit"."""
    count = blocks if blocks is not None else best_blocks(graph, machine)
    few = FEWEST_OF_SMALL * machine.sms <= count < FEWEST_BLOCKS * machine.sms
    window = min(WINDOW_BYTES * machine.sms // count // KIB * KIB if few else WINDOW_BYTES, machine.smem_per_block)
    meeting = window if few else MEETING_BYTES
    stage = SMALL_STAGE if few and machine.smem_per_block >= LEAST_SMALL * SMALL_STAGE else _stage_bytes(graph)
    small = _loop_bytes(graph) <= SMALL_LAYER
    residual = "block" if small or graph.tokens > FEW_TOKENS else "exchange"
    budget = chunk_budget(machine.arch)
    ops = tuple(_default_op(op, count, graph.tokens, residual, budget) for op in graph.ops)
    edges = tuple(EdgeSchedule(v.name, v.producer, Tagged()) for v in graph.values)
    split = [op for op, how in zip(graph.ops, ops, strict=True) if isinstance(op, Attention) or how.ways > 1]
    parts = tuple(EdgeSchedule(f"{op.name}.parts", op.name, Tagged()) for op in split)
    return Schedule(
        arch=machine.arch,
        blocks=count,
        roles=(Role(LOADER, "loader", 1), Role(CONSUMER, "consumer", _consumer_warps(graph, machine, sequences))),
        rings=((LOADER, Ring("weights", 0, stage, window, meeting)),),
        ops=ops,
        edges=edges + parts,
        batch=_batch(graph, count),
        max_kv=max_kv,
        sequences=sequences,
    )


def _consumer_warps(graph: Graph, machine: Machine, sequences: int) -> int:
    units = [unit_bytes(op, graph.tokens, CONSUMER_WARPS, sequences) for op in graph.ops if isinstance(op, Attention)]
    fits = all(parts <= PARTS_SHARE * machine.smem_per_block for _, _, parts in units)
    return CONSUMER_WARPS if fits and all(sum(unit) <= machine.smem_per_block - LEAST_RING for unit in units) else FEWER_WARPS


def best_blocks(graph: Graph, machine: Machine) -> int:
    """Fewest blocks whose largest shares cost at most BLOCKS_SLACK more than the best count's, down to FEWEST_BLOCKS of the SMs.

    A step takes as long as its largest shares. Where 132 blocks leave some a row group more than others, 128 may do with the
    same largest share; fewer blocks then mean fewer vectors to poll at every exchange. A small model's layers take as long as their
    hand-offs: as many blocks as have a share of every linear then, if those still keep HBM busy.
    """
    linears = [op for op in graph.ops if isinstance(op, Linear)]
    looped = [op for op in linears if op.loop]
    if looped and _loop_bytes(graph) <= SMALL_LAYER:
        shared = min(tiling(op).shares for op in looped)
        if FEWEST_OF_SMALL * machine.sms <= shared <= machine.sms:
            return shared
    counts = range(max(1, round(FEWEST_BLOCKS * machine.sms)), machine.sms + 1)
    cost = {b: sum(_largest_bytes(op, b) * (graph.layers if op.loop else 1) for op in graph.ops if isinstance(op, Linear)) for b in counts}
    return min(b for b in counts if cost[b] <= BLOCKS_SLACK * min(cost.values()))


def _loop_bytes(graph: Graph) -> int:
    """Of one layer's weights."""
    return sum(tiling(op).bytes for op in graph.ops if isinstance(op, Linear) and op.loop)


def _batch(graph: Graph, blocks: int) -> int:
    """All row groups that a block has of any linear in the loop, where one warp can finish them, so that the block meets once."""
    looped = [tiling(op) for op in graph.ops if isinstance(op, Linear) and op.loop]
    most = max((ceil_div(t.shares, blocks) * t.fold for t in looped), default=BATCH)
    return most if BATCH < most <= MOST_BATCH // graph.tokens else BATCH


def _largest_bytes(op: Linear, blocks: int) -> int:
    tiles = tiling(op)
    return ceil_div(tiles.shares, blocks) * tiles.share_bytes


def _default_op(op: Op, blocks: int, tokens: int, residual: str, budget: int) -> OpSchedule:
    """``residual``: polling those of few tokens costs less than the barrier behind which a block keeps them. A small model's layers, whose
    blocks have little else to do, and many tokens keep them."""
    name = op.name
    if isinstance(op, Attention):
        return OpSchedule(name, LOADER, Prefetch(hint="evict_normal"), splits=_splits(op, blocks, tokens))
    ways = default_ways(op, blocks, tokens, BATCH, budget) if isinstance(op, Linear) else 1
    after = isinstance(op, Linear) and factored(op) is not None
    if not isinstance(op, Linear | RowMap) or not kept_values(op):
        residual = "block"
    return OpSchedule(name, LOADER, ways=ways, scale="after" if after else "before", residual=residual)


def _splits(op: Attention, blocks: int, tokens: int) -> int:
    """A unit for each block, but few enough that their partial results are not what takes the time."""
    most = max(1, PART_ROWS // (op.heads // op.kv_heads * tokens))
    return max(1, min(MAX_SPLITS, 1 << most.bit_length() - 1, blocks // op.kv_heads))


def balance(graph: Graph, schedule: Schedule) -> Schedule:
    """Choose each linear's ``share_offset`` (``part_offset`` where its columns are split) so that the blocks' cumulative bytes
    stay level from op to op.

    Splitting n row groups over B blocks leaves some with one group more; rotating who that is keeps every block within
    about one row group of the mean at each meeting. Greedy over ops in program order; ops the user set are kept.
    """
    blocks = schedule.blocks
    load = [0] * blocks
    done: set[str] = set()
    ops = {o.op: o for o in schedule.ops}
    for op in graph.ops:
        if isinstance(op, RowMap):
            ops[op.name] = _beside(ops[op.name], [ops[p] for p in _kept_from(op, graph) if p in done], graph)
            done.add(op.name)
        if not isinstance(op, Linear):
            continue
        tiles = tiling(op)
        chosen = ops[op.name]
        kept = [ops[p] for p in _kept_from(op, graph) if p in done]
        if chosen.share_offset == 0 and kept and _shares(graph, kept[0].op) == tiles.shares:
            ops[op.name] = chosen = replace(chosen, share_offset=kept[0].share_offset)  # the residual stays in the block
        elif chosen.share_offset == 0 and chosen.ways == 1:
            ops[op.name] = chosen = replace(chosen, share_offset=_level(load, tiles.shares, tiles.share_bytes))
        if chosen.ways > 1:
            part = _level(load, tiles.shares * chosen.ways, tiles.share_bytes // chosen.ways)
            ops[op.name] = chosen = replace(chosen, part_offset=part)
        shares, offset = part_shares(op, replace(schedule, ops=tuple(ops.values())))
        load = _added(load, shares, offset, tiles.share_bytes // chosen.ways)
        done.add(op.name)
    return replace(schedule, ops=tuple(ops[o.op] for o in schedule.ops))


def _beside(how: OpSchedule, kept: list[OpSchedule], graph: Graph) -> OpSchedule:
    """``how`` of a map of rows with its features shared out as those it is made of, so that they stay in the block."""
    alike = [k for k in kept if _shares(graph, k.op) == _shares(graph, how.op)]
    return replace(how, share_offset=alike[0].share_offset) if alike and how.share_offset == 0 else how


def _shares(graph: Graph, name: str) -> int:
    op = graph.op(name)
    return tiling(op).shares if isinstance(op, Linear) else ceil_div(op.features, GROUP_ROWS) if isinstance(op, RowMap) else 0


def _kept_from(op: Linear | RowMap, graph: Graph) -> list[str]:
    """Linears and maps of rows whose results ``op`` adds to its own rows, or whose results are added to its rows behind a norm."""
    behind = [m for m in graph.ops if isinstance(m, RowMap) and op.out in {ref.value for _, ref in kept_values(m)}]
    refs = [ref for one in (op, *behind) for _, ref in kept_values(one) if ref.value != op.out]
    producers = [graph.op(graph.value(ref.value).producer) for ref in refs]
    return [p.name for p in producers if isinstance(p, Linear | RowMap)]


def _added(load: list[int], shares: int, offset: int, share_bytes: int) -> list[int]:
    blocks = len(load)
    return [
        have + (share_begin(shares, blocks, offset, i + 1) - share_begin(shares, blocks, offset, i)) * share_bytes
        for i, have in enumerate(load)
    ]


def _level(load: list[int], shares: int, share_bytes: int) -> int:
    """The offset that keeps the busiest block's load least."""
    offsets = range(len(load)) if shares % len(load) else range(1)
    return min(offsets, key=lambda o: max(_added(load, shares, o, share_bytes)))


def verify_schedule(graph: Graph, schedule: Schedule, machine: Machine, asked: Overrides, found: Collector) -> None:
    """Add to ``found`` what the machine or the kernel cannot do, at the line of ``asked`` that decides it.

    Raises ``found`` when the roles are wrong: what comes after relies on the consumer role and on a ring per loader.
    """
    if not _check_roles(schedule, graph, asked, found):
        found.raise_if_any()
    if schedule.scope != "step" and "dependent_launch" not in machine.features:
        _lack(f"one {schedule.scope} a launch", "dependent_launch", machine, asked.said(graph.span, "scope"), found, _ALONE)
    _check_batch(schedule, graph, asked, found)
    check_pages(schedule, graph, found)
    _check_warps(schedule, machine, graph, asked, found)
    _check_rings(graph, schedule, machine, asked, found)
    _check_edges(schedule, graph, asked, found)
    _check_ops(schedule, graph, machine, asked, found)


def _check_batch(schedule: Schedule, graph: Graph, asked: Overrides, found: Collector) -> None:
    sequences = schedule.sequences
    if not 1 <= sequences <= min(MOST_SEQUENCES, max(1, graph.tokens)):
        found.add(SEQUENCES, graph.span, sequences=sequences, tokens=graph.tokens, most=MOST_SEQUENCES)
    if sequences == 1:
        return
    if schedule.scope != "step":
        why, mend = f"a launch is {LAUNCHES[schedule.scope]}", "use launch scope 'step', or one sequence"
        found.add(NO_BATCH, asked.said(graph.span, "scope"), kernel=graph.name, sequences=sequences, why=why, mend=mend)
    if not any(isinstance(op, Attention) for op in graph.ops):
        why, mend = "it has no KV cache", "use one sequence: its tokens do not see each other"
        found.add(NO_BATCH, graph.span, kernel=graph.name, sequences=sequences, why=why, mend=mend)
    for op in graph.ops:
        if isinstance(op, Attention) and isinstance(op.window, PerLayer):
            why, mend = f"layers of {op.name!r} have windows of their own", "use one sequence, or a cache that all windows hold"
            found.add(NO_BATCH, op.span, kernel=graph.name, sequences=sequences, why=why, mend=mend)


def _check_roles(schedule: Schedule, graph: Graph, asked: Overrides, found: Collector) -> bool:
    before = len(found.found)
    rings = dict(schedule.rings)
    consumers = [r.name for r in schedule.roles if r.kind == "consumer"]
    wide = [r.name for r in schedule.roles if r.kind == "loader" and r.warps != 1]
    if len(consumers) != 1 or wide:
        roles = ", ".join(f"{r.name} ({r.kind}, {r.warps} warps)" for r in schedule.roles)
        found.add(BAD_ROLES, asked.said(graph.span, ("kind", "warps"), *(wide or consumers)), roles=roles)
    for role in schedule.roles:
        if role.kind == "loader" and role.name not in rings and consumers:
            found.add(NO_RING, asked.said(graph.span, "kind", role.name), role=role.name)
    return len(found.found) == before


def _check_ops(schedule: Schedule, graph: Graph, machine: Machine, asked: Overrides, found: Collector) -> None:
    blocks = schedule.blocks
    for op in schedule.ops if blocks > 0 else ():
        default = graph.op(op.op).span
        span = asked.said(default, "l2_bytes", op.op)
        if op.prefetch.hint not in HINTS:
            found.add(BAD_HINT, asked.said(default, "hint", op.op), hint=op.prefetch.hint, op=op.op)
        _check_l2(graph, op, schedule, machine, span, found)
        if not 0 <= op.share_offset < blocks:
            where = asked.said(default, "share_offset", op.op)
            found.add(BAD_COUNT, where, what=f"share_offset of {op.op!r}", value=op.share_offset, low=0, high=blocks - 1)
        if not 1 <= op.splits <= blocks:
            where = asked.said(default, "splits", op.op)
            found.add(BAD_COUNT, where, what=f"kv split of {op.op!r}", value=op.splits, low=1, high=blocks)
        if not 0 <= op.pause <= LONGEST_PAUSE:
            where = asked.said(default, "pause", op.op)
            found.add(BAD_COUNT, where, what=f"pause of {op.op!r}, in nanoseconds,", value=op.pause, low=0, high=LONGEST_PAUSE)
        if not 0 <= op.meeting_window <= machine.smem_per_block:
            where, most = asked.said(default, "meeting_window", op.op), machine.smem_per_block
            what = f"meeting_window of {op.op!r}, in bytes,"
            found.add(BAD_COUNT, where, what=what, value=op.meeting_window, low=0, high=most)
        if _check_ways(graph, op, asked, found):
            _check_chunk(graph, schedule, op, asked, found)
        linear = graph.op(op.op)
        if op.scale == "after" and not (isinstance(linear, Linear) and factored(linear)):
            found.add(NOT_FACTORED, asked.said(default, "scale", op.op), op=op.op)


def _check_l2(graph: Graph, how: OpSchedule, schedule: Schedule, machine: Machine, span: Span, found: Collector) -> None:
    wanted, most = how.prefetch.l2_bytes, machine.l2_bytes
    if wanted and how.prefetch.l2_by == INSTRUCTION and "l2_bulk_prefetch" not in machine.features:
        _lack("l2 prefetch by an instruction", "l2_bulk_prefetch", machine, span, found, f'; or use .prefetch(l2_by="load"){_ALONE}')
    if wanted and isinstance(graph.op(how.op), Embed | Custom):
        found.add(L2_NOTHING, span, op=how.op, why="which streams nothing")
    if wanted and isinstance(graph.op(how.op), Attention) and schedule.scope != "step":
        found.add(L2_NOTHING, span, op=how.op, why=f"whose rows a launch of one {schedule.scope} cannot find before it has joined")
    if wanted and isinstance(graph.op(how.op), Attention) and schedule.sequences > 1:
        found.add(L2_NOTHING, span, op=how.op, why="whose rows are those of several sequences")
    if wanted > most:
        found.add(BAD_COUNT, span, what=f"l2 prefetch of {how.op!r}, in bytes,", value=wanted, low=0, high=most)
    elif wanted % L2_BYTES:
        found.add(L2_UNIT, span, op=how.op, bytes=wanted)


def _check_ways(graph: Graph, how: OpSchedule, asked: Overrides, found: Collector) -> bool:
    """Whether the columns can be split as the schedule says."""
    op = graph.op(how.op)
    why = why_whole(op) if isinstance(op, Linear) else "it is no linear"
    pieces = tiling(op).pieces if isinstance(op, Linear) and not why else 1
    if how.ways == 1 or (how.ways > 0 and pieces % how.ways == 0):
        return True
    choices = ", ".join(str(w) for w in range(1, pieces + 1) if pieces % w == 0)
    where = asked.said(op.span, "ways", how.op)
    found.add(BAD_WAYS, where, op=op.name, ways=how.ways, why=why or f"they are {pieces} tiles", choices=choices)
    return False


def _check_chunk(graph: Graph, schedule: Schedule, how: OpSchedule, asked: Overrides, found: Collector) -> None:
    op = graph.op(how.op)
    if how.chunk == 0:
        return
    pieces = tiling(op).pieces // how.ways if isinstance(op, Linear) else 0
    whole = isinstance(op, Linear) and not takes_chunks(op, schedule) and how.chunk != pieces
    if not pieces or how.chunk < 0 or pieces % how.chunk or whole:
        parts = f" in each of the {how.ways} parts of its columns" if how.ways > 1 else ""
        why = " and its prologue must see whole rows" if whole else parts
        where = asked.said(op.span, "chunk", how.op)
        found.add(BAD_CHUNK, where, op=how.op, chunk=how.chunk, pieces=pieces or 1, why=why)


def _lack(what: str, feature: str, machine: Machine, span: Span, found: Collector, alone: str = "") -> None:
    having = ", ".join(arch for arch, m in MACHINES.items() if feature in m.features) or "none yet"
    found.add(LACKS, span, what=what, feature=feature, arch=machine.arch, having=having, alone=alone)


def _check_warps(schedule: Schedule, machine: Machine, graph: Graph, asked: Overrides, found: Collector) -> None:
    warps = sum(r.warps for r in schedule.roles) + finishers(schedule)
    span = asked.said(graph.span, "warps")
    if warps > machine.max_warps_per_block:
        found.add(TOO_MANY_WARPS, span, warps=warps, arch=machine.arch, limit=machine.max_warps_per_block)
    else:
        registers = machine.registers_per_sm // (warps * WARP_THREADS)
        if registers < MIN_REGISTERS:
            found.add(REGISTERS, span, warps=warps, registers=registers, need=MIN_REGISTERS)
    if schedule.block_registers == "moved" and (why := why_stay(schedule, machine)):
        alone = _ALONE if MOVES not in machine.features else ""
        found.add(NOT_MOVED, asked.said(graph.span, "block_registers"), why=why, alone=alone)
    if finishers(schedule) and (why := why_block(graph, schedule)):
        found.add(NOT_FINISHED, asked.said(graph.span, "finish"), why=why)
    if not 1 <= schedule.blocks <= machine.sms:
        found.add(BAD_BLOCKS, asked.said(graph.span, "blocks"), blocks=schedule.blocks, arch=machine.arch, limit=machine.sms)
    need = ceil_div(4 * graph.tokens, WARP_THREADS)  # one thread per (token, row pair) of a group
    if schedule.consumer.warps < need:
        most = machine.max_warps_per_block - 1
        found.add(BAD_COUNT, span, what="the number of consumer warps", value=schedule.consumer.warps, low=need, high=most)
    if not 1 <= schedule.batch <= MAX_BATCH:
        found.add(BAD_COUNT, asked.said(graph.span, "batch"), what="batch", value=schedule.batch, low=1, high=MAX_BATCH)
    if not graph.tokens <= schedule.max_kv <= MAX_KV:
        found.add(BAD_COUNT, asked.said(graph.span, "max_kv"), what="max_kv", value=schedule.max_kv, low=graph.tokens, high=MAX_KV)


def _check_rings(graph: Graph, schedule: Schedule, machine: Machine, asked: Overrides, found: Collector) -> None:
    for feature in ("async_copy", "mbarrier"):
        if feature not in machine.features:
            _lack("the ring", feature, machine, graph.span, found)
    for role, ring in schedule.rings:
        if ring.stages > MAX_STAGES:
            found.add(BARRIERS, asked.said(graph.span, "stages", ring.name, role), ring=ring.name, stages=ring.stages, limit=MAX_STAGES)
        what, need = max(_stage_needs(graph, schedule, role), key=lambda n: n[1], default=("a copy", STAGE_UNIT))
        if ring.stage_bytes < need or ring.stage_bytes % STAGE_UNIT:
            span = asked.said(graph.span, "stage_bytes", ring.name, role)
            need = round_up(need, STAGE_UNIT)
            found.add(BAD_STAGE, span, ring=ring.name, stage=ring.stage_bytes, what=what, need=need, unit=STAGE_UNIT)
        for field, value, low in (("window", ring.window, 1), ("meeting_window", ring.meeting_window, 0)):
            if not low <= value <= machine.smem_per_block:
                where = asked.said(graph.span, field, ring.name, role)
                found.add(BAD_COUNT, where, what=f"{field} of ring {ring.name!r}", value=value, low=low, high=machine.smem_per_block)


def _stage_needs(graph: Graph, schedule: Schedule, role: str) -> list[tuple[str, int]]:
    """What the ops that load through this role's ring put into one stage at least."""
    return [need for op in graph.ops if schedule.op(op.name).loader == role for need in _op_needs(op)]


def _op_needs(op: Op) -> list[tuple[str, int]]:
    match op:
        case Linear():
            vectors = [(f"vector {name!r} of {op.name}", 2 * op.columns) for name, ref in op.prologue.args if not hasattr(ref, "value")]
            return [(f"a weight tile of {op.name}", tile_bytes(op)), *vectors]
        case Attention():
            return [(f"a KV chunk of {op.name}", KV_CHUNK * op.cache_dim)]
        case Custom():
            return [(f"weight {name!r} of {op.name}", natural_bytes(ref)) for name, ref in op.weights]
    return []


def _stage_bytes(graph: Graph) -> int:
    """A stage holds one tile: where all tiles are smaller than those of bf16, so are the stages, so that the ring holds more of them."""
    if all(op.format == PLAIN for op in graph.ops if isinstance(op, Linear)):
        return STAGE_BYTES
    most = max(need for op in graph.ops for _, need in _op_needs(op))
    return min(STAGE_BYTES, max(LEAST_STAGE, round_up(most, STAGE_UNIT)))


def _check_edges(schedule: Schedule, graph: Graph, asked: Overrides, found: Collector) -> None:
    for edge in schedule.edges:
        least = 4 if isinstance(edge.sync, Sentinel) else 2
        slots = edge.sync.slots
        if not least <= slots <= MAX_SLOTS or slots & (slots - 1):
            span = asked.said(graph.op(edge.producer).span, "sync", edge.producer)
            found.add(BAD_SLOTS, span, kind=type(edge.sync).__name__, value=edge.value, slots=slots, least=least, most=MAX_SLOTS)
