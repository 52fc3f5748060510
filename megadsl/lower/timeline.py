"""How much room a role's timeline needs, in a build that leaves one (templates/include/megadsl/trace.h)."""

from __future__ import annotations

from megadsl.ir.graph import Attention, Custom, Embed, Graph, Op, RowMap
from megadsl.ir.schedule import Schedule
from megadsl.lower.columns import largest_share, part_shares
from megadsl.lower.operands import vectors
from megadsl.lower.tiling import tiling
from megadsl.types import all_layers, ceil_div

CHUNK_ROWS = 16
MOST_RECORDS = 1 << 16  # of 16 bytes, per role and block; what does not fit is counted and lost
_PER_STAGE = 2  # a loader's copy; at most two slots of the consumers, even where each tile has an input of its own
_PER_OP = 8  # what the consumers did, split and merged, a gate
_PER_LAUNCH = 8


def timeline_records(graph: Graph, schedule: Schedule) -> int:
    """Records of 16 bytes that hold all that any role of any block leaves in one launch, at most MOST_RECORDS."""
    total = _PER_LAUNCH
    for op in graph.ops:
        times = graph.layers if op.loop is not None else 1
        total += times * (_PER_OP + _PER_STAGE * _stages(op, graph, schedule))
    return min(total, MOST_RECORDS)


def _stages(op: Op, graph: Graph, schedule: Schedule) -> int:
    """Ring stages that the busiest block takes for one execution of the op."""
    if isinstance(op, Embed | RowMap):
        return 0
    if isinstance(op, Custom):
        return len(op.weights)
    how = schedule.op(op.name)
    stage = schedule.ring(how.loader).stage_bytes
    if isinstance(op, Attention):
        rows = max(schedule.max_kv if w is None else min(schedule.max_kv, w + CHUNK_ROWS) for w in all_layers(op.window))
        chunks = ceil_div(ceil_div(rows, CHUNK_ROWS), how.splits)
        tiles = ceil_div(op.heads // op.kv_heads * graph.tokens, CHUNK_ROWS)
        units = ceil_div(op.kv_heads * how.splits, schedule.blocks)
        if schedule.sequences > 1:  # a unit may have part of each
            chunks = ceil_div(ceil_div(rows, CHUNK_ROWS) * schedule.sequences, how.splits)
            tiles, units = 2 * tiles, units * schedule.sequences
        return units * ceil_div(tiles, schedule.consumer.warps) * (1 + ceil_div(chunks, stage // (CHUNK_ROWS * op.cache_dim * 4)))
    tiles_of = tiling(op)
    shares, offset = part_shares(op, schedule)
    rows = largest_share(shares, schedule.blocks, offset) * tiles_of.fold
    return rows * tiles_of.pieces // how.ways + len(vectors(op)) * ceil_div(2 * op.columns, stage)
