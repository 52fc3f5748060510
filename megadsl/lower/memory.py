"""Pass ``memory``: a block's shared memory. Fixed areas, one overlay that the phases take in turn, then the rings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from megadsl.diagnostics import collecting, declare, error
from megadsl.dsl.overrides import Overrides
from megadsl.ir.expr import reductions
from megadsl.ir.graph import Attention, Custom, Embed, Graph, Linear, Op, RowMap, kept_values
from megadsl.ir.plan import Area, Exchange
from megadsl.ir.schedule import Ring, Schedule, Tagged
from megadsl.lower.columns import chunk_budget, groups_between_gathers, largest_share, part_shares, parts_of, share_begin
from megadsl.lower.exchanges import is_local, kept_locally, merges_in_cluster, received_bytes
from megadsl.lower.finish import finishers
from megadsl.lower.gathers import WIDE_REGISTERS, in_registers, is_direct, is_wide, tiles_together, wide_registers
from megadsl.lower.heads import unit_bytes
from megadsl.lower.operands import input_area, prologue_values, row_bytes, scratch_area, takes_chunks, vectors
from megadsl.lower.packing import vector_name
from megadsl.lower.schedule import MAX_STAGES, STAGE_UNIT
from megadsl.lower.scratch import BARRIER_BYTES, scratch_areas
from megadsl.lower.steps import passes_rows_on, progress_bytes
from megadsl.lower.threads import WARP_THREADS
from megadsl.lower.tiling import GROUP_ROWS, tiling
from megadsl.machine import Machine
from megadsl.source import Span
from megadsl.types import KIB, ceil_div, round_up

DOES_NOT_FIT = declare(
    "MK170",
    "shared memory: {need} bytes are needed, {arch} gives a block {have}",
    "use {how}, or fewer tokens",
)
HELD = declare(
    "MK177",
    "ring {ring!r} has {stages} stages, but {op!r} holds {need} of them at once",
    "use at least {need} stages, fewer vectors in one expression, or fewer tiles in registers",
)

TOO_WIDE = declare(
    "MK280",
    "custom op {op!r} needs {need} bytes of shared memory for {tokens} tokens, {arch} has {have} of them beside the ring",
    "give it narrower inputs (a custom op has whole rows of all tokens) or less scratch=, or compile for fewer tokens",
)

MIN_STAGES = 2
ABORT_BYTES = 16
UNIT_BYTES = 16  # 8 features of one token
TAPE_ENTRY_BYTES = 56
SEQUENCES_BYTES = 128  # mk::Sequences::kWords


@dataclass(frozen=True)
class Memory:
    """Areas by name, resolved rings, the column chunk (in tiles) of each linear, and the total in bytes."""

    areas: tuple[Area, ...]
    rings: tuple[tuple[str, Ring], ...]
    chunks: tuple[tuple[str, int], ...]
    bytes: int

    def offset(self, name: str) -> int:
        return next(a.offset for a in self.areas if a.name == name)

    def chunk(self, op: str) -> int:
        return dict(self.chunks)[op]


def plan_memory(
    graph: Graph, schedule: Schedule, machine: Machine, exchanges: tuple[Exchange, ...], overrides: Overrides | None = None
) -> Memory:
    """Lay out everything but the rings, then give the rings what is left (or what the user asked for, if it fits).

    Raises MK170 and MK177 at the line of ``overrides`` that sized the ring, else at the kernel's or the op's.
    """
    asked = overrides or Overrides(schedule.arch, ())
    chunks = {op.name: chunk_pieces(op, graph, schedule) for op in graph.ops if isinstance(op, Linear)}
    areas: list[Area] = []
    at = 0
    for name, size in _fixed(graph, schedule, exchanges, chunks):
        areas.append(Area(name, at, size))
        at += round_up(size, 16)
    overlay = at = sums = round_up(at, 128)
    others, linear = _other_phases(graph, schedule, machine), _linear_phases(graph, schedule, chunks)
    for phase in linear:
        at = max(at, _place(areas, overlay, phase))
    for op in (op for op in graph.ops if isinstance(op, Linear)):
        end = overlay + _input_bytes(op, graph, schedule, chunks)
        for arg, _ in vectors(op) if copies_vectors(op, graph, schedule) else ():
            areas.append(Area(copy_name(op, arg), end, copy_bytes(op), overlay=True))
            end += round_up(copy_bytes(op), 128)
        # A finisher may still be at an earlier op's sums when the next one's vectors are copied.
        at, sums = max(at, end), max(sums, end if pass_groups(op, graph, schedule) or finishers(schedule) else sums)
    at = max(at, _place(areas, sums, [("sums", _sums_bytes(graph, schedule))]))
    # Behind all that other warps may still read while the first leave their products.
    at = max(_place(areas, at, [("partials", _partials_bytes(graph, schedule))]), *(_place(areas, overlay, phase) for phase in others), at)
    rings, placed, total = _rings(schedule, machine, areas, at, asked.said(graph.span, ("stages", "stage_bytes")))
    _check_held(graph, schedule, rings, asked)
    return Memory(tuple(placed), rings, tuple(chunks.items()), total)


def _place(areas: list[Area], at: int, phase: list[tuple[str, int]]) -> int:
    """Add a phase's areas, one behind the other; where they end."""
    for name, size in phase:
        areas.append(Area(name, at, size, overlay=True))
        at += round_up(size, 128)
    return at


def received_name(op: Attention) -> str:
    """The area where the blocks of a cluster leave their splits for this one to add."""
    return f"{op.name}.received"


def landed_name(op: Attention) -> str:
    """The area of the barrier that counts their bytes."""
    return f"{op.name}.landed"


def copy_name(op: Linear, arg: str) -> str:
    """The area of a vector that is copied out of the ring."""
    return f"{vector_name(op, arg)}.copy"


def copy_bytes(op: Linear) -> int:
    """Bytes of that area: a prologue reads up to the padded columns."""
    return tiling(op).columns_padded * 2


def copies_fit(op: Linear, graph: Graph, schedule: Schedule) -> bool:
    """Whether the op's vectors find room behind its input, in bytes that other ops need anyway."""
    chunks = {o.name: chunk_pieces(o, graph, schedule) for o in graph.ops if isinstance(o, Linear)}
    phases = (*_linear_phases(graph, schedule, chunks), *_attention_phases(graph, schedule))
    room = max(sum(round_up(size, 128) for _, size in phase) for phase in phases)
    return _input_bytes(op, graph, schedule, chunks) + len(vectors(op)) * round_up(copy_bytes(op), 128) <= room


def _input_bytes(op: Linear, graph: Graph, schedule: Schedule, chunks: dict[str, int]) -> int:
    """Bytes from the overlay's begin to the end of the op's own input."""
    if in_registers(op, schedule):
        return 0
    own = round_up(tiling(op).tile_columns * chunks[op.name] * graph.tokens * 2, 128)
    if len(prologue_values(op)) == 1:
        return own
    activations = next(size for phase in _linear_phases(graph, schedule, chunks) for name, size in phase if name == "activations")
    return round_up(activations, 128) + own


def chunk_pieces(op: Linear, graph: Graph, schedule: Schedule) -> int:
    """Tiles of a row group whose activations are gathered at once: what the schedule says, else all of a part of the columns,
    unless they would squeeze the ring, or where they arrive in registers, the products."""
    tiles, chosen, ways = tiling(op), schedule.op(op.name).chunk, schedule.op(op.name).ways
    if chosen:
        return chosen
    if not takes_chunks(op, schedule):
        return tiles.pieces
    column_bytes = tiles.tile_columns * graph.tokens * 2 * len(prologue_values(op))
    pieces = tiles.pieces // ways
    each, most = column_bytes, chunk_budget(schedule.arch)
    if is_wide(op, schedule, graph.tokens):
        each, most = wide_registers(op, schedule, graph.tokens), WIDE_REGISTERS
    fitting = [n for n in range(1, pieces + 1) if pieces % n == 0 and n * each <= most]
    return max(fitting, default=1)


def column_chunks(op: Linear, graph: Graph, schedule: Schedule) -> int:
    """Gathers of an op's input, of each part of the columns, that follow each other."""
    return tiling(op).pieces // schedule.op(op.name).ways // chunk_pieces(op, graph, schedule)


def pass_groups(op: Linear, graph: Graph, schedule: Schedule) -> int:
    """Row groups that each of several chunks serves before the next is gathered; 0 where there is one."""
    if column_chunks(op, graph, schedule) == 1:
        return 0
    return groups_between_gathers(own_part_groups(op, schedule), graph.tokens, schedule.batch)


def copies_vectors(op: Linear, graph: Graph, schedule: Schedule) -> bool:
    """Whether an op's vectors leave the ring before its input comes: for the tiles behind them to be held, or for all chunks to read."""
    early = bool(schedule.op(op.name).prefetch.registers) or column_chunks(op, graph, schedule) > 1
    return bool(vectors(op)) and early and not is_direct(op, schedule, graph.tokens)


def _fixed(graph: Graph, schedule: Schedule, exchanges: tuple[Exchange, ...], chunks: dict[str, int]) -> Iterator[tuple[str, int]]:
    tokens, warps = graph.tokens, schedule.consumer.warps
    yield "abort", ABORT_BYTES
    yield "gates", 4 * len(graph.ops)
    yield "meeting", 4
    yield "progress", progress_bytes(graph, schedule)
    if schedule.sequences > 1:
        yield "sequences", SEQUENCES_BYTES
    for role, ring in schedule.rings:
        yield f"barriers.{role}", 2 * BARRIER_BYTES * max(ring.stages, _most_stages(ring))
        loaded = [op for op in graph.ops if schedule.op(op.name).loader == role]
        yield f"tape.{role}", TAPE_ENTRY_BYTES * sum(_entries(op, graph, schedule) for op in loaded)
    yield from scratch_areas(schedule)
    ropes = [op.rope for op in graph.ops if isinstance(op, Attention) and op.rope is not None]
    yield "angles", max((len(r.tables) * tokens * r.head_dim // 2 * 8 for r in ropes), default=0)
    rows = [op for op in graph.ops if isinstance(op, Linear | RowMap)]
    reduced = [(op, reductions(op.prologue.expr) if isinstance(op, Linear) else op.reductions) for op in rows]
    yield "scalars", max((len(found) * tokens * row_parts(op, tokens, warps) * 4 for op, found in reduced), default=0)
    yield "staged", max((e.vectors for e in exchanges if e.dtype == "bf16"), default=0) * UNIT_BYTES
    remote = [sum(not is_local(op, ref, graph, schedule) for _, ref in kept_values(op)) * own_groups(op, schedule) for op in rows]
    yield "kept", max(remote, default=0) * tokens * UNIT_BYTES
    for value in kept_locally(graph, schedule):
        e = next(x for x in exchanges if x.name == value)
        yield f"kept.{value}", e.units * UNIT_BYTES
    for op in graph.ops:  # other blocks write there while this one is anywhere: nothing else may lie there
        if isinstance(op, Attention) and merges_in_cluster(op, schedule):
            yield received_name(op), received_bytes(op, tokens, schedule)
            yield landed_name(op), BARRIER_BYTES


def _partials_bytes(graph: Graph, schedule: Schedule) -> int:
    """Partial sums of two batches, the second of which may have last elements in its place."""
    batch = schedule.batch * schedule.consumer.warps * graph.tokens * GROUP_ROWS * 4
    return batch + max(batch, *(last_bytes(op, schedule, graph.tokens) for op in graph.ops if isinstance(op, Linear | RowMap)))


def row_parts(op: Linear | RowMap, tokens: int, warps: int) -> int:
    """Parts of one row reduction: those of all warps when each has gathered some of every row, else of the warps that share it."""
    return warps if isinstance(op, RowMap) or op.factored is not None else max(1, warps // min(tokens, warps))


def last_bytes(op: Linear | RowMap, schedule: Schedule, tokens: int) -> int:
    """Last elements of the units of a factored operand, or of what a map of rows reduces, which wait for their rows' other elements where
    tags push them out."""
    if isinstance(op, RowMap):
        value = op.reduced[1].value
        return ceil_div(op.features, GROUP_ROWS) * tokens * 2 if isinstance(schedule.edge(value).sync, Tagged) else 0
    apart = any(isinstance(schedule.edge(ref.value).sync, Tagged) for _, ref in prologue_values(op))
    return ceil_div(op.columns, GROUP_ROWS) * tokens * 2 if op.factored is not None and apart else 0


def _entries(op: Op, graph: Graph, schedule: Schedule) -> int:
    """Most tape entries any block needs for an op: its runs, its vectors, a gate and a prefetch where the schedule has them."""
    if isinstance(op, Embed | RowMap):
        return 0
    prefetch = schedule.op(op.name).prefetch
    others = (not prefetch.smem) + (prefetch.l2_bytes > 0)
    if isinstance(op, Custom):
        return len(op.weights) + others
    if isinstance(op, Attention):
        return 1 + others + passes_rows_on(graph, schedule)
    return _runs(op, graph, schedule) + len(vectors(op)) + others


def _sums_bytes(graph: Graph, schedule: Schedule) -> int:
    groups = max((pass_groups(op, graph, schedule) for op in graph.ops if isinstance(op, Linear)), default=0)
    return groups * GROUP_ROWS * graph.tokens * 4


def _runs(op: Linear, graph: Graph, schedule: Schedule) -> int:
    """Most runs of tiles any block streams: one for each part of the columns; in chunks, one for each pass and chunk of it."""
    chunks, groups = column_chunks(op, graph, schedule), pass_groups(op, graph, schedule)
    each = ((last - first for _, first, last in parts) for parts in block_parts(op, schedule))
    return max(sum(min(n, 1) if chunks == 1 else ceil_div(n, groups) * chunks for n in parts) for parts in each)


def block_parts(op: Linear, schedule: Schedule) -> list[list[tuple[int, int, int]]]:
    """Per block, the parts of an op's columns that it multiplies: (part, first row group, last)."""
    tiles, blocks, (shares, offset) = tiling(op), schedule.blocks, part_shares(op, schedule)
    begins = [share_begin(shares, blocks, offset, i) * tiles.fold for i in range(blocks + 1)]
    return [parts_of(tiles.groups, schedule.op(op.name).ways, begin, end) for begin, end in pairwise(begins)]


def least_groups(op: Linear, schedule: Schedule) -> int:
    """Fewest row groups of 8 any block owns."""
    tiles = tiling(op)
    return tiles.shares // schedule.blocks * tiles.fold


def own_groups(op: Linear | RowMap, schedule: Schedule) -> int:
    """Most row groups of 8 any block owns as features of the op's value."""
    if isinstance(op, RowMap):
        return largest_share(ceil_div(op.features, GROUP_ROWS), schedule.blocks, schedule.op(op.name).share_offset)
    tiles = tiling(op)
    return largest_share(tiles.shares, schedule.blocks, schedule.op(op.name).share_offset) * tiles.fold


def own_part_groups(op: Linear, schedule: Schedule) -> int:
    """Most row groups of 8, of all parts of the columns, any block multiplies."""
    shares, offset = part_shares(op, schedule)
    return largest_share(shares, schedule.blocks, offset) * tiling(op).fold


def _most_stages(ring: Ring) -> int:
    """Barriers are few bytes: reserve for the most stages that 227 KB could ever hold when the count is left open."""
    return ring.stages or ceil_div(256 * KIB, ring.stage_bytes)


def _linear_phases(graph: Graph, schedule: Schedule, chunks: dict[str, int]) -> Iterator[list[tuple[str, int]]]:
    """What linears keep in the overlay beside their partial sums."""
    tokens, warps = graph.tokens, schedule.consumer.warps
    columns = [(op, tiling(op).tile_columns * chunks[op.name]) for op in graph.ops if isinstance(op, Linear)]
    first = max((c for op, c in columns if not in_registers(op, schedule)), default=0) * tokens * 2
    second = max((c for op, c in columns if len(prologue_values(op)) > 1), default=0) * tokens * 2
    yield [("activations", first), ("second", second)]
    # argmax: one candidate a thread, then one a token, behind the head's last product, when its input is no longer needed.
    for name in (op.name for op in graph.ops if isinstance(op, Linear) and op.sink == "argmax"):
        yield [(f"{name}.candidates", (warps * WARP_THREADS + tokens) * 8)]


def _attention_phases(graph: Graph, schedule: Schedule) -> Iterator[list[tuple[str, int]]]:
    """What attentions keep there."""
    tokens, warps = graph.tokens, schedule.consumer.warps
    for op in graph.ops:
        if not isinstance(op, Attention):
            continue
        queries, fresh, scratch = unit_bytes(op, tokens, warps, schedule.sequences)
        yield [
            (f"{op.name}.queries", 0 if in_registers(op, schedule) else queries),
            (f"{op.name}.fresh", fresh),
            (f"{op.name}.scratch", scratch),
        ]


def _other_phases(graph: Graph, schedule: Schedule, machine: Machine) -> Iterator[list[tuple[str, int]]]:
    """What attentions and custom ops keep there. MK280 for an op whose rows leave the ring no room."""
    yield from _attention_phases(graph, schedule)
    most = machine.smem_for(schedule.resident) - MIN_STAGES * max((ring.stage_bytes for _, ring in schedule.rings), default=0)
    for op in (op for op in graph.ops if isinstance(op, Custom)):
        phase = [(input_area(op, arg), row_bytes(ref) * graph.tokens) for arg, ref in op.inputs] + [(scratch_area(op), op.call.scratch)]
        if (need := sum(size for _, size in phase)) > most:
            table = "\n".join(f"    {name:<24} {size:>8} bytes" for name, size in phase)
            raise error(TOO_WIDE, op.span, table, op=op.name, tokens=graph.tokens, need=need, arch=machine.arch, have=most)
        yield phase


def _rings(
    schedule: Schedule, machine: Machine, areas: list[Area], used: int, span: Span
) -> tuple[tuple[tuple[str, Ring], ...], list[Area], int]:
    """Rings the user sized come first; one ring may be left open and takes all the rest."""
    at = round_up(used, 128)
    sized = {role: ring for role, ring in schedule.rings if ring.stages}
    left = machine.smem_for(schedule.resident) - at - sum(r.stages * r.stage_bytes for r in sized.values())
    open_rings = [(role, ring) for role, ring in schedule.rings if not ring.stages]
    rings: list[tuple[str, Ring]] = []
    placed = list(areas)
    for role, ring in schedule.rings:
        stages = ring.stages or min(MAX_STAGES, max(0, left) // len(open_rings) // ring.stage_bytes)
        rings.append((role, replace(ring, stages=stages)))
        placed.append(Area(f"ring.{role}", at, stages * ring.stage_bytes))
        at += stages * ring.stage_bytes
    short = any(r.stages < MIN_STAGES for role, r in rings if role not in sized)
    if at > machine.smem_for(schedule.resident) or short:
        need = at + (MIN_STAGES * max(r.stage_bytes for _, r in rings) if short else 0)
        ring_bytes = sum(r.stages * r.stage_bytes for r in sized.values())
        stage = max(r.stage_bytes for _, r in rings)
        room = max(0, machine.smem_for(schedule.resident) - (at - ring_bytes))
        # a unit less: stages have barriers of their own, which are not among the areas where no stage found room
        fit, smaller = room // stage, max(0, room - STAGE_UNIT) // MIN_STAGES // STAGE_UNIT * STAGE_UNIT
        how = f"at most {fit} ring stages" if fit >= MIN_STAGES else f"stages of at most {smaller} bytes"
        table = "\n".join(f"    {a.name:<24} {a.bytes:>8} bytes{' (overlay)' if a.overlay else ''}" for a in placed)
        raise error(DOES_NOT_FIT, span, table, need=need, arch=machine.arch, have=machine.smem_for(schedule.resident), how=how)
    return tuple(rings), placed, at


def _held_stages(op: Linear | Custom, schedule: Schedule, tokens: int) -> int:
    """Stages that an op lets go of only when it has read them all: those of its vectors, unless they are copied one by one; where the
    input of few tokens arrives in registers, those of its held tiles as well."""
    if isinstance(op, Custom):
        return len(op.weights)
    held = schedule.op(op.name).prefetch.registers or 0
    if is_direct(op, schedule, tokens):
        return len(vectors(op)) + ceil_div(held, tiles_together(op, schedule, tokens))
    return 0 if held else len(vectors(op))


def _check_held(graph: Graph, schedule: Schedule, rings: tuple[tuple[str, Ring], ...], asked: Overrides) -> None:
    """What an op lets go of only when it has read all of it: a shorter ring would wait for itself."""
    by_role = dict(rings)
    with collecting() as found:
        for op in graph.ops:
            need = _held_stages(op, schedule, graph.tokens) if isinstance(op, Linear | Custom) else 0
            role = schedule.op(op.name).loader
            ring = by_role[role]
            if ring.stages < need:
                found.add(HELD, asked.said(op.span, "stages", ring.name, role), ring=ring.name, stages=ring.stages, op=op.name, need=need)
