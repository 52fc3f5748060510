"""Pass ``exchange``: give every materialised value its buffers, wire format and share of the blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megadsl.ir.graph import Attention, Embed, Graph, Linear, Op, RowMap, ValueRef, kept_values
from megadsl.ir.plan import Exchange
from megadsl.ir.schedule import MERGE_CLUSTER, REGISTERS, Schedule, Sync, Tagged
from megadsl.lower.columns import largest_share, part_shares
from megadsl.lower.scope import crosses_launches
from megadsl.lower.threads import WARP_THREADS
from megadsl.lower.tiling import GROUP_ROWS, tiling
from megadsl.types import Level, ceil_div, round_up

FLAG_BYTES = 64  # one flag word per owner, each in its own 64 bytes
SENTINEL_EMPTY = 0xFF
LASTS_PER_VECTOR = 7
MERGE_AT_ONCE = 2  # splits that a lane polls together, three vectors each
PART_BYTES = 48  # of a group of a token, as a cluster's blocks send it: mk::kPartVectors
ASYNC = "Async"  # in place of a wire: parts that a cluster's blocks send each other


@dataclass(frozen=True)
class Sharing:
    """Who produces a value's features: groups of 8 that the first ``blocks`` blocks share, rotated by ``share_offset``."""

    groups: int
    share_offset: int
    blocks: int

    @property
    def most(self) -> int:
        """Groups that any block owns, at most."""
        return largest_share(self.groups, self.blocks, self.share_offset)


def sharing(op: Op, features: int, schedule: Schedule) -> Sharing:
    """How the producing op shares out the features of its value."""
    offset, groups, blocks = schedule.op(op.name).share_offset, ceil_div(features, GROUP_ROWS), schedule.blocks
    if isinstance(op, Linear):
        return Sharing(tiling(op).shares, offset, blocks)
    if isinstance(op, Attention) and merges_in_cluster(op, schedule):
        return Sharing(groups, 0, op.kv_heads * schedule.op(op.name).splits)
    return Sharing(groups, offset, blocks)


def merges_in_cluster(op: Attention, schedule: Schedule) -> bool:
    """Whether the splits of an attention are added within a cluster of blocks."""
    return schedule.op(op.name).merge == MERGE_CLUSTER


def received_bytes(op: Attention, tokens: int, schedule: Schedule) -> int:
    """What each block of a cluster is sent of all splits; 0 where splits travel otherwise."""
    splits = schedule.op(op.name).splits
    return sharing(op, op.heads * op.head_dim, schedule).most * tokens * splits * PART_BYTES if merges_in_cluster(op, schedule) else 0


def merge_lanes(op: Attention, tokens: int, schedule: Schedule) -> tuple[int, int]:
    """Lanes that share an item of a merge (a group of features of a token), and splits that a lane polls together.

    A lane a split, but half as many with two each where all items would not find lanes in one turn: a turn more is one more
    trip to the other blocks' parts.
    """
    share, splits = sharing(op, op.heads * op.head_dim, schedule), schedule.op(op.name).splits
    if merges_in_cluster(op, schedule):
        return splits, 1
    items = share.most * tokens
    lanes = min(WARP_THREADS, 1 << (splits - 1).bit_length())
    if lanes > 1 and items * lanes > schedule.consumer.warps * WARP_THREADS:
        lanes //= 2
    return lanes, min(MERGE_AT_ONCE, ceil_div(splits, lanes))


def is_local(op: Linear | RowMap, ref: ValueRef, graph: Graph, schedule: Schedule) -> bool:
    """Whether a block computes exactly those rows of ``ref`` itself that it combines with its rows of ``op``."""
    if ref.begin or op.out is None or schedule.op(op.name).residual == "exchange":
        return False
    value = graph.value(ref.value)
    if crosses_launches(graph.op(value.producer), op, graph, schedule):  # shared memory does not outlive a launch
        return False
    mine = sharing(op, op.out_features if isinstance(op, Linear) else op.features, schedule)
    return value.features == ref.features and mine == sharing(graph.op(value.producer), value.features, schedule)


def kept_locally(graph: Graph, schedule: Schedule) -> tuple[str, ...]:
    """Values that blocks keep their own share of, each once, in program order of the first use."""
    adding = [op for op in graph.ops if isinstance(op, Linear | RowMap)]
    return tuple({ref.value: None for op in adding for _, ref in kept_values(op) if is_local(op, ref, graph, schedule)})


def vectors_for(sync: Sync, units: int) -> int:
    """16-byte vectors that carry ``units`` units of 8 bf16: tags push out each unit's last element, seven to an extra vector."""
    return units + (ceil_div(units, LASTS_PER_VECTOR) if isinstance(sync, Tagged) else 0)


def plan_exchanges(graph: Graph, schedule: Schedule) -> tuple[tuple[Exchange, ...], int, tuple[tuple[int, int, int], ...]]:
    """All exchanges, the arena's bytes, and its initial contents as (offset, bytes, byte value) where not zero."""
    arena = _Arena()
    found: list[Exchange] = []
    for value in graph.values:
        op = graph.op(value.producer)
        share = sharing(op, value.features, schedule)
        if value.initial is not None:
            _same_share(graph.op(value.initial), share, value.features, schedule)
        sync = schedule.edge(value.name).sync
        units = share.most * graph.tokens
        uses = "1" if op.loop is None else ("layers + 1" if value.initial is not None else "layers")
        placed = arena.place(value.name, sync, "bf16", share.blocks, units, share, uses, op)
        found.append(replace(placed, words=schedule.op(op.name).publish == REGISTERS))
    for op in graph.ops:
        if isinstance(op, Attention):
            found.append(_parts(arena, op, graph, schedule))
        if isinstance(op, Linear) and schedule.op(op.name).ways > 1:
            found.append(_column_parts(arena, op, graph, schedule))
        if isinstance(op, Linear) and op.sink == "argmax":
            share = Sharing(schedule.blocks, 0, schedule.blocks)
            found.append(arena.place(f"{op.name}.best", Tagged(), "u32", schedule.blocks, graph.tokens, share, "1", op))
    return tuple(found), arena.bytes, tuple(arena.fills)


def _parts(arena: _Arena, op: Attention, graph: Graph, schedule: Schedule) -> Exchange:
    """An attention's partial results: fp32 rows of head_dim values and {max, sum} per unit (KV head, split)."""
    name = f"{op.name}.parts"
    units = op.kv_heads * schedule.op(op.name).splits
    rows = op.heads // op.kv_heads * graph.tokens
    uses, sync = "1" if op.loop is None else "layers", schedule.edge(name).sync
    if merges_in_cluster(op, schedule):
        sent = rows * op.head_dim // GROUP_ROWS * PART_BYTES // 16
        return Exchange(name, Level.CLUSTER, sync, ASYNC, "f32", 0, units, sent, sent, 1, units, 0, 0, uses, op.span)
    return arena.place(name, sync, "f32", units, rows * row_vectors(op.head_dim), Sharing(units, 0, units), uses, op)


def _column_parts(arena: _Arena, op: Linear, graph: Graph, schedule: Schedule) -> Exchange:
    """A linear's products with parts of its columns: fp32, two vectors for a row group of a token."""
    shares, offset = part_shares(op, schedule)
    vectors = largest_share(shares, schedule.blocks, offset) * tiling(op).fold * graph.tokens * 2
    name, uses = f"{op.name}.parts", "1" if op.loop is None else "layers"
    return arena.place(name, schedule.edge(name).sync, "f32", schedule.blocks, vectors, Sharing(shares, offset, schedule.blocks), uses, op)


def row_vectors(head_dim: int) -> int:
    """16-byte vectors of one query row of a partial result: fp32 values, then {maximum, sum}; AttentionTiling::kVectors."""
    return head_dim // 4 + 1


def _same_share(initial: Op, share: Sharing, features: int, schedule: Schedule) -> None:
    """A loop-carried value has one buffer, so its first producer must share it out like its later one."""
    if not isinstance(initial, Embed):
        raise AssertionError(f"loop-carried value begins with {initial.name}, which is no embedding")
    if GROUP_ROWS * share.groups < features:
        raise AssertionError(f"{initial.name} has more features than the loop's last op produces")


class _Arena:
    def __init__(self) -> None:
        self.bytes = 0
        self.fills: list[tuple[int, int, int]] = []

    def place(self, name: str, sync: Sync, dtype: str, owners: int, units: int, share: Sharing, uses: str, op: Op) -> Exchange:
        wire = type(sync).__name__
        vectors = vectors_for(sync, units) if dtype == "bf16" else units
        offset = self.bytes
        size = round_up(owners * vectors * 16 * sync.slots, 128)
        self.bytes += size
        if wire == "Sentinel":
            self.fills.append((offset, size, SENTINEL_EMPTY))
        flags_offset = self.bytes
        if wire == "Flag":
            self.bytes += round_up(owners * FLAG_BYTES, 128)
        return Exchange(
            name, Level.GPU, sync, wire, dtype, offset, owners, vectors, units, sync.slots, share.groups,
            share.share_offset, flags_offset, uses, op.span,
        )  # fmt: skip
