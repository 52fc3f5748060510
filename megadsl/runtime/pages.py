"""The pages of a KV arena: which of them each sequence has, and the table that says so to the kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megadsl.diagnostics import declare, error
from megadsl.types import ceil_div

NO_PAGE = -1  # entry of a row that has none: the kernel writes nothing there

OUT_OF_PAGES = declare(
    "MK469",
    "out of KV pages: sequence {sequence} needs {pages} for {rows} rows, {have} are its own and {free} of the pool's {count} are free",
    "end or shorten other sequences first, or compile with a larger kv_pages",
)


class Pages:
    """Who has which pages of a pool. ``table`` is the kernel's table, int32 (sequences, entries), where it reads it.

    Sequences have pages for their first rows on, without gaps; no page belongs to two. Pages that a launch appends to have to be there
    before it is enqueued: those of all its steps. ``free`` has the pages that nobody has; the next one taken is its last. Changes of
    the table are made inside ``turn()``, behind the launches so far.
    """

    def __init__(
        self, manifest: Mapping[str, Any], table: torch.Tensor, turn: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self.rows: int = manifest["kv_page"]
        self.count: int = manifest["kv_pages"]
        self.table = table
        self._turn = turn
        self.clear()

    def clear(self) -> None:
        """All pages are free again."""
        self.free = list(reversed(range(self.count)))
        self._own: list[list[int]] = [[] for _ in range(self.table.shape[0])]
        with self._turn():
            self.table.fill_(NO_PAGE)

    def of(self, sequence: int) -> tuple[int, ...]:
        """The pages of a sequence, in the order of its rows."""
        return tuple(self._own[sequence])

    def needed(self, rows: int) -> int:
        """How many pages so many rows take."""
        return ceil_div(rows, self.rows)

    def hold(self, rows: Mapping[int, int]) -> None:
        """Give each of these sequences as many pages as its rows need, and take back what it has beyond. Raises MK469, and then changes
        nothing."""
        own, free = {i: list(self._own[i]) for i in rows}, list(self.free)
        for sequence, count in rows.items():
            while len(own[sequence]) > self.needed(count):
                free.append(own[sequence].pop())
        for sequence, count in rows.items():
            need, have = self.needed(count), len(own[sequence])
            if need - have > len(free):
                raise error(OUT_OF_PAGES, sequence=sequence, pages=need, rows=count, have=have, free=len(free), count=self.count)
            own[sequence] += [free.pop() for _ in range(need - have)]
        changed = [i for i in rows if own[i] != self._own[i]]
        self.free = free
        for sequence in changed:
            self._own[sequence] = own[sequence]
        self._write(changed)

    def grow(self, rows: Mapping[int, int]) -> None:
        """As hold, but a sequence that has more keeps it."""
        self.hold({i: max(count, len(self._own[i]) * self.rows) for i, count in rows.items()})

    def _write(self, sequences: list[int]) -> None:
        entries = self.table.shape[1]
        with self._turn():
            for sequence in sequences:
                own = self._own[sequence]
                self.table[sequence].copy_(torch.tensor(own + [NO_PAGE] * (entries - len(own)), dtype=torch.int32))


def page_table(manifest: Mapping[str, Any], words: torch.Tensor) -> torch.Tensor:
    """The bytes of a table as int32 (sequences, entries)."""
    return words.view(torch.int32).view(manifest["sequences"], -1)
