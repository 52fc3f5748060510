"""How the query rows of an attention's KV head are shared out over a block's warps."""

from __future__ import annotations

from megadsl.ir.graph import Attention
from megadsl.types import ceil_div, round_up

FEW_ROWS = 8  # mk::FewRows: the N of an mma
CHUNK_ROWS = 16  # of a cache
QUERY_ROWS = 16  # of a tile: the M of an mma
PART_BYTES = 4  # of what a warp leaves: fp32
HALVED = 32  # columns: a half of each is two groups of eight


def query_tiles(op: Attention, tokens: int) -> int:
    """m16 tiles of query rows that share a KV head; a warp takes one at a time."""
    return ceil_div(op.heads // op.kv_heads * tokens, QUERY_ROWS)


def few_rows(op: Attention, tokens: int) -> bool:
    """Whether a KV head's query rows fit half a tile (templates/include/megadsl/few_rows.h, heads.h)."""
    return op.heads // op.kv_heads * tokens <= FEW_ROWS


def in_halves(op: Attention, tokens: int, warps: int, sequences: int = 1) -> bool:
    """Whether two warps have each tile: each adds and publishes half of its columns (templates/include/megadsl/halves.h), whose groups of
    eight it takes in pairs. Tiles of a batch are of eight rows, as many as a sequence's tokens fill."""
    return sequences == 1 and warps // query_tiles(op, tokens) == 2 and not few_rows(op, tokens) and op.head_dim % HALVED == 0


def unit_bytes(op: Attention, tokens: int, warps: int, sequences: int = 1) -> tuple[int, int, int]:
    """Shared memory of an attention's unit: its queries, this step's keys and values as a chunk of rows, and what the warps leave."""
    rows = round_up(op.heads // op.kv_heads * tokens, QUERY_ROWS)
    return rows * op.cache_dim * 2, CHUNK_ROWS * op.cache_dim * 2 * 2, parts_bytes(op, tokens, warps, sequences)


def parts_bytes(op: Attention, tokens: int, warps: int, sequences: int = 1) -> int:
    """Shared memory for what the warps leave of a unit's rows: all columns, or a half of them, each row with its maximum and sum."""
    if sequences > 1:
        return warps * min(FEW_ROWS, op.heads // op.kv_heads * tokens) * (op.head_dim + 4) * PART_BYTES
    if in_halves(op, tokens, warps):
        return 2 * query_tiles(op, tokens) * QUERY_ROWS * (op.head_dim // 2 + 8) * PART_BYTES
    return warps * min(QUERY_ROWS, op.heads // op.kv_heads * tokens) * (op.head_dim + 4) * PART_BYTES
