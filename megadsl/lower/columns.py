"""How work is shared out over blocks, and how a linear's columns are split into parts that different blocks multiply.

With ``ways`` parts, what is shared out are the feature groups of part 0, behind them those of part 1, and so on.
"""

from __future__ import annotations

from megadsl.ir.graph import Linear
from megadsl.ir.schedule import Schedule
from megadsl.lower.operands import needs_whole_rows, prologue_values
from megadsl.lower.tiling import GROUP_ROWS, tiling
from megadsl.machine import machine
from megadsl.types import KIB, ceil_div

CHUNK_BUDGET = 64 * KIB  # activations beyond this are gathered in parts or column chunks rather than squeezing the ring
CHUNK_SHARE = 0.3  # or beyond this much of a block's shared memory, where it is less
PART_BYTES = 4  # of a part of a product: fp32
SUMS_BUDGET = 16 * KIB  # of products with some chunks of the columns, while the next chunk is gathered


def chunk_budget(arch: str) -> int:
    """Bytes of activations that a block of the architecture gathers at once."""
    return min(CHUNK_BUDGET, int(CHUNK_SHARE * machine(arch).smem_per_block))


def share_begin(n: int, parts: int, offset: int, i: int) -> int:
    """First of ``n`` items owned by part ``i``; the device code's mk::share_begin."""
    return (n * i + offset) // parts


def share_owner(n: int, parts: int, offset: int, item: int) -> int:
    """The part that owns ``item``; the device code's mk::share_owner."""
    return ((item + 1) * parts - offset - 1) // n


def largest_share(n: int, parts: int, offset: int) -> int:
    """Most items any part owns."""
    return max(share_begin(n, parts, offset, i + 1) - share_begin(n, parts, offset, i) for i in range(parts))


def parts_of(groups: int, ways: int, begin: int, end: int) -> list[tuple[int, int, int]]:
    """(part, first, last) for each part of the columns that row groups [begin, end) of all parts fall into, ``first`` and
    ``last`` counted within it; one without row groups for a block that owns none. The device code's mk::for_each_part."""
    part = min(begin // groups, ways - 1)
    found = [(part, begin - part * groups, min(end - part * groups, groups))]
    while (part := part + 1) < ways and part * groups < end:
        found.append((part, 0, min(end - part * groups, groups)))
    return found


def part_shares(op: Linear, schedule: Schedule) -> tuple[int, int]:
    """What is shared out of an op's multiplications: feature groups of all parts of its columns, and their offset."""
    how, shares = schedule.op(op.name), tiling(op).shares
    return (shares, how.share_offset) if how.ways == 1 else (shares * how.ways, how.part_offset)


def why_whole(op: Linear) -> str:
    """Why an op's columns cannot be split, or nothing."""
    if op.sink is not None:
        return "its products leave as logits"
    if needs_whole_rows(op):
        return "its prologue must see whole rows"
    return "" if tiling(op).pieces > 1 else "they are one tile"


def default_ways(op: Linear, blocks: int, tokens: int, batch: int, budget: int) -> int:
    """Parts for the columns of ``op``: 1 where its input fits ``budget`` bytes of a block's shared memory at once, else what makes
    blocks poll least.

    A split costs a hop between blocks more, so it must spare many bytes.
    """
    tiles = tiling(op)
    if why_whole(op) or tiles.columns_padded * tokens * 2 * len(prologue_values(op)) <= budget:
        return 1
    ways = [w for w in range(1, tiles.pieces + 1) if tiles.pieces % w == 0]
    return min(ways, key=lambda w: polled_bytes(op, w, blocks, tokens, batch, budget))


def groups_between_gathers(own: int, tokens: int, batch: int) -> int:
    """Row groups that one gather of a chunk serves, in a block that has ``own``: as many as keep their sums, in whole batches."""
    most = max(1, SUMS_BUDGET // (GROUP_ROWS * tokens * PART_BYTES))
    return min(max(own, 1), most if most < batch else most // batch * batch)


def polled_bytes(op: Linear, ways: int, blocks: int, tokens: int, batch: int, budget: int) -> int:
    """About what the busiest block polls of the op's input and of its parts."""
    tiles, operands = tiling(op), len(prologue_values(op))
    own = ceil_div(tiles.shares * ways, blocks) * tiles.fold
    part = tiles.columns_padded // ways * tokens * 2 * operands
    times = 1 if part <= budget else ceil_div(min(own, tiles.groups), groups_between_gathers(own, tokens, batch))
    added = ceil_div(tiles.shares, blocks) * tiles.fold * GROUP_ROWS * tokens * PART_BYTES * ways if ways > 1 else 0
    return part * times * min(ways, ceil_div(own, tiles.groups)) + added
