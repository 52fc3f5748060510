"""Which rows of which sequence each unit of a batch's attention takes: twin of templates/include/megadsl/sequences.h; and the batches
that proofs play."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from megadsl.lower.shape import CHUNK_ROWS
from megadsl.types import ceil_div

Batch: TypeAlias = tuple[tuple[int, int], ...]  # per sequence: cached rows, new tokens


@dataclass(frozen=True)
class Segment:
    """Part of one sequence that one unit takes; mk::Segment."""

    sequence: int
    first: int  # of its new tokens, among those of the step
    tokens: int
    begin: int  # chunks of cached rows
    end: int
    fresh: bool  # also takes this step's rows


def skipped_chunks(kv_len: int, window: int) -> int:
    """Chunks before the one in which the first new token's window begins."""
    return max(kv_len + 1 - window, 0) // CHUNK_ROWS if window else 0


def items_of(kv_len: int, tokens: int, window: int) -> int:
    """What is shared out of a sequence; mk::Sequence::items."""
    return 0 if tokens == 0 else max(ceil_div(kv_len, CHUNK_ROWS) - skipped_chunks(kv_len, window), 1)


def segments(splits: int, split: int, batch: Batch, window: int = 0) -> Iterator[Segment]:
    """mk::Sequences::for_each_segment."""
    items = [items_of(*sequence, window) for sequence in batch]
    begin, end = (sum(items) * at // splits for at in (split, split + 1))
    before = first = 0
    for index, ((kv_len, tokens), own) in enumerate(zip(batch, items, strict=True)):
        if own and begin < end and before < end and before + own > begin:
            skipped, fresh = skipped_chunks(kv_len, window), before + own <= end
            last = ceil_div(kv_len, CHUNK_ROWS) if fresh else skipped + end - before
            yield Segment(index, first, tokens, skipped + max(begin, before) - before, last, fresh)
        before, first = before + own, first + tokens


def after(batch: Batch, turn: int) -> Batch:
    """What the sequences have in a later step of the same launch: one token each, where the first step had any."""
    return batch if turn == 0 else tuple((kv + n + turn - 1, 1) if n else (kv, 0) for kv, n in batch)


def batches(sequences: int, tokens: int, lengths: Sequence[int], most: int) -> list[Batch]:
    """Batches that show what there is: nobody, one alone, all with none, unequal lengths in several orders, and all new tokens with one.
    ``lengths``: of caches, ``most`` the rows that each holds."""
    shown = [min(kv, most - tokens) for kv in lengths]

    def of(counts: Iterable[int], at: int, step: int) -> Batch:
        return tuple((shown[(at + i * step) % len(shown)], n) for i, n in enumerate(counts))

    one_each = [1] * sequences
    first_alone = [tokens] + [0] * (sequences - 1)
    uneven = [tokens - sequences + 1, *one_each[1:]]
    some = [i % 2 for i in range(sequences)]
    found: list[Batch] = [of([0] * sequences, 0, 1)]
    for at, (counts, step) in product(range(len(shown)), ((one_each, 0), (one_each, 1), (uneven, 1), (first_alone, 1), (some, 3))):
        found.append(of(counts, at, step))
        found.append(tuple(reversed(found[-1])))
    return list(dict.fromkeys(found))
