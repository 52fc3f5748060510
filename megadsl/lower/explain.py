"""What a compiled kernel will do, as two tables: one line per op, one per edge. What ``megadsl explain`` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

from megadsl.ir.graph import Attention, Custom, Embed, Linear, Op, RowMap, ValueRef, kept_values
from megadsl.ir.plan import Exchange, Plan
from megadsl.ir.schedule import LOAD, OpSchedule
from megadsl.ir.verify_graph import reads
from megadsl.lower.columns import largest_share, share_begin, share_owner
from megadsl.lower.custom import loads
from megadsl.lower.exchanges import is_local, sharing
from megadsl.lower.memory import block_parts, chunk_pieces, own_groups, own_part_groups, pass_groups
from megadsl.lower.operands import prologue_values
from megadsl.lower.tiling import GROUP_ROWS, tiling
from megadsl.machine import machine
from megadsl.ops.attention import kv_row_bytes
from megadsl.ops.cost import cost, runs, total_cost
from megadsl.types import ceil_div

Table: TypeAlias = tuple[Sequence[str], Sequence[Sequence[str]]]

OP_COLUMNS = ("op", "spec", "runs", "tiles", "bytes per run", "roles", "placement", "hint", "largest share", "floor us")
EDGE_COLUMNS = ("value", "producer -> readers", "sync", "level", "slots", "vectors", "polled bytes per block")
VECTOR_BYTES = 16
MERGE_VECTORS = 3  # per token, split and group of 8 features: eight fp32 and {maximum, sum}
PART_VECTORS = 2  # per token and row group of a part of the columns: eight fp32
MICRO = 1e6


class Lowered(Protocol):
    """Anything with a plan: driver.Compiled, or the state of lowering."""

    @property
    def plan(self) -> Plan: ...


def rows(compiled: Lowered) -> list[Table]:
    """Two tables of text, (columns, lines): the ops in program order with totals, then the exchanges between blocks.

    Bytes are what the op must read of weights (once per run); an attention's are per cached row, and its floor and the
    first total's are at an empty cache. Floors are bytes over the machine's measured bandwidth, in us per launch. Polled
    bytes are what the busiest block polls, all readers of one round together, when everything has arrived at the first try.
    """
    plan = compiled.plan
    ops = [*(_op(plan, op) for op in plan.graph.ops), *_totals(plan)]
    return [(OP_COLUMNS, ops), (EDGE_COLUMNS, [_edge(plan, e) for e in plan.exchanges])]


def _op(plan: Plan, op: Op) -> list[str]:
    graph, how = plan.graph, plan.schedule.op(op.name)
    spent = cost(op, graph.tokens, 0)  # of an empty cache: the same in all layers
    times = runs(graph, op)
    loaded = loads(op)
    return [
        op.name,
        op.span.short,
        f"{times:,}",
        _tiles(op, how),
        f"{kv_row_bytes(op):,} per row" if isinstance(op, Attention) else f"{spent.weight_bytes:,}",
        f"{how.loader} -> {plan.schedule.consumer.name}" if loaded else plan.schedule.consumer.name,
        _placement(how) if loaded else "",
        how.prefetch.hint if loaded else "",
        _share(plan, op, how),
        _floor_us(plan, spent.times(times).hbm_bytes),
    ]


def _tiles(op: Op, how: OpSchedule) -> str:
    match op:
        case Embed() | RowMap():
            return ""
        case Linear():
            tiles = tiling(op)
            return f"{tiles.groups * tiles.pieces:,} x {GROUP_ROWS}x{tiles.tile_columns}"
        case Attention():
            return f"{op.kv_heads * how.splits:,} units: {op.kv_heads} KV heads x {how.splits} splits"
        case Custom():
            return f"{op.call.function} of {op.call.header.name}"


def _placement(how: OpSchedule) -> str:
    prefetch = how.prefetch
    ring = "ring" if prefetch.smem else "ring, once the op has begun"
    if prefetch.registers:
        ring += f"; {prefetch.registers} tiles into registers"
    if not prefetch.l2_bytes:
        return ring
    by = " by loads" if prefetch.l2_by == LOAD else ""
    return f"{ring}; {prefetch.l2_bytes:,} B into L2{by} ahead of {prefetch.ahead_of or how.op}"


def _share(plan: Plan, op: Op, how: OpSchedule) -> str:
    """The most that one block owns, of the whole."""
    blocks = plan.schedule.blocks
    match op:
        case Embed() | Custom():
            e = plan.exchange(op.out)
            most = largest_share(e.groups, blocks, e.share_offset) * GROUP_ROWS
            return f"{most} of {plan.graph.value(op.out).features:,} features"
        case RowMap():
            return f"{own_groups(op, plan.schedule) * GROUP_ROWS} of {op.features:,} features"
        case Linear():
            first = how.part_offset if how.ways > 1 else how.share_offset
            offset = f", from block {first}" if first else ""
            parts = f" of {how.ways} column parts" if how.ways > 1 else ""
            return f"{own_part_groups(op, plan.schedule)} of {tiling(op).groups * how.ways:,} row groups{parts}{offset}"
        case Attention():
            units = op.kv_heads * how.splits
            return f"{ceil_div(units, blocks)} of {units:,} units"


def _floor_us(plan: Plan, hbm_bytes: int) -> str:
    return f"{hbm_bytes / machine(plan.schedule.arch).bandwidth * MICRO:,.3f}"


def _totals(plan: Plan) -> Iterator[list[str]]:
    for kv_len in (0, plan.schedule.max_kv - plan.graph.tokens):
        total = total_cost(plan.graph, plan.graph.tokens, kv_len).hbm_bytes
        at = f"total at KV {kv_len:,}"
        yield [at, "", "", "", f"{total:,}", "", "", "", f"{plan.schedule.blocks} blocks", _floor_us(plan, total)]


def _edge(plan: Plan, e: Exchange) -> list[str]:
    graph = plan.graph
    value = next((v for v in graph.values if v.name == e.name), None)
    producer = value.producer if value else e.name.rsplit(".", 1)[0]
    first = f"{value.initial}, then " if value and value.initial else ""
    readers = [op for op in graph.ops if e.name in {ref.value for ref in reads(op)}] if value else [graph.op(producer)]
    inside, after = ([op for op in readers if (op.loop is None) is outside] for outside in (False, True))
    polled = max(sum(_polled_vectors(plan, e, op) for op in group) for group in (inside, after))  # they read different rounds
    return [
        e.name,
        f"{first}{producer} -> {', '.join(op.name for op in readers)}",
        e.wire,
        e.level.value,
        str(e.slots),
        f"{e.owners} x {e.vectors}",
        f"{polled * VECTOR_BYTES:,}",
    ]


def _polled_vectors(plan: Plan, e: Exchange, op: Op) -> int:
    """Vectors that the busiest block polls of one round of ``e`` for ``op``."""
    schedule, graph = plan.schedule, plan.graph
    if e.name.endswith(".best"):
        return e.owners * e.vectors  # block 0 alone
    if isinstance(op, Attention):
        if e.name == f"{op.name}.parts":
            share = sharing(op, op.heads * op.head_dim, schedule)
            items = share.most * graph.tokens
            return items * schedule.op(op.name).splits * MERGE_VECTORS
        return _unit(plan, e, op)
    if isinstance(op, Custom):
        return sum(_rows(plan, e, ref) for _, ref in op.inputs if ref.value == e.name)
    if isinstance(op, Embed):
        return 0
    remote = [ref for _, ref in kept_values(op) if ref.value == e.name and not is_local(op, ref, graph, schedule)]
    kept = sum(_kept(plan, e, op, ref) for ref in remote)
    if isinstance(op, RowMap):
        return kept + (_rows(plan, e, op.reduced[1]) if op.reduced[1].value == e.name else 0)
    if e.name == f"{op.name}.parts":
        return own_groups(op, schedule) * graph.tokens * PART_VECTORS * schedule.op(op.name).ways
    gathers = sum(_gathered(plan, e, op, ref) for _, ref in prologue_values(op) if ref.value == e.name)
    return gathers + kept


def _spanned(plan: Plan, e: Exchange, begin: int, end: int) -> int:
    """The units that the features [begin, end) touch, and the extra vectors of all blocks from the first owner to the last."""
    first, last = begin // GROUP_ROWS, (end - 1) // GROUP_ROWS
    owners = share_owner(e.groups, e.owners, e.share_offset, last) - share_owner(e.groups, e.owners, e.share_offset, first) + 1
    return (last - first + 1) * plan.graph.tokens + owners * (e.vectors - e.units)


def _whole(plan: Plan, e: Exchange) -> int:
    """All units and all extra vectors; where there are none of these, an idle block is asked for one vector, to be sure of it."""
    extras = e.owners * (e.vectors - e.units)
    asked = extras or (e.owners if e.groups < e.owners else 0)
    return e.groups * plan.graph.tokens + asked


def _rows(plan: Plan, e: Exchange, ref: ValueRef) -> int:
    """An operand whose features are gathered at once."""
    whole = ref.features == plan.graph.value(ref.value).features
    return _whole(plan, e) if whole else _spanned(plan, e, ref.begin, ref.begin + ref.features)


def _gathered(plan: Plan, e: Exchange, op: Linear, ref: ValueRef) -> int:
    """A prologue's operand: at once, or those parts of its columns that a block multiplies, each at once or in chunks that
    every pass of row groups gathers anew."""
    tiles, chunk, ways = tiling(op), chunk_pieces(op, plan.graph, plan.schedule), plan.schedule.op(op.name).ways
    if chunk == tiles.pieces:
        return _rows(plan, e, ref)
    width, pieces = chunk * tiles.tile_columns, tiles.pieces // ways
    once = []
    for part in range(ways):
        starts = range(part * pieces * tiles.tile_columns, min((part + 1) * pieces * tiles.tile_columns, ref.features), width)
        once.append(sum(_spanned(plan, e, ref.begin + at, ref.begin + min(at + width, ref.features)) for at in starts))
    again = pass_groups(op, plan.graph, plan.schedule) or tiles.groups
    found = [[(part, max(1, ceil_div(last - first, again))) for part, first, last in parts] for parts in block_parts(op, plan.schedule)]
    return max(sum(once[part] * times for part, times in parts) for parts in found)


def _kept(plan: Plan, e: Exchange, op: Linear | RowMap, ref: ValueRef) -> int:
    """An operand of an epilogue, or of a map of rows, that other blocks own: the features that the block's own rows become."""
    blocks, shares = plan.schedule.blocks, tiling(op).shares if isinstance(op, Linear) else ceil_div(op.features, GROUP_ROWS)
    offset = plan.schedule.op(op.name).share_offset
    most = 0
    for block in range(blocks):
        begin = share_begin(shares, blocks, offset, block) * GROUP_ROWS
        end = min(share_begin(shares, blocks, offset, block + 1) * GROUP_ROWS, ref.features)
        if begin < end:
            most = max(most, _spanned(plan, e, ref.begin + begin, ref.begin + end))
    return most


def _unit(plan: Plan, e: Exchange, op: Attention) -> int:
    """Queries of one KV head, and this step's keys and values where the unit has the last split; times units per block."""
    heads = op.heads // op.kv_heads
    most = 0
    for head in range(op.kv_heads):
        wanted = ((op.q, heads * op.head_dim), (op.k, op.head_dim), (op.v, op.head_dim))
        ranges = [(ref.begin + head * width, width) for ref, width in wanted if ref.value == e.name]
        most = max(most, sum(_spanned(plan, e, begin, begin + width) for begin, width in ranges))
    return most * ceil_div(op.kv_heads * plan.schedule.op(op.name).splits, plan.schedule.blocks)
