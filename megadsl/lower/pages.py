"""Cached rows in pages: how large a page is, how many a pool has, and what is refused.

A page is 16, 32 or 64 rows of one sequence, in all layers and of K and V. Its KV heads follow each other, each a run of whole chunks, so
that one bulk copy brings what a unit needs of it. A layer has a pool of pages, which all sequences share; a table in device memory has
per sequence the numbers of its pages, the same for all layers.
"""

from __future__ import annotations

from dataclasses import replace

from megadsl.diagnostics import Collector, declare
from megadsl.ir.graph import Attention, Graph
from megadsl.ir.schedule import Schedule
from megadsl.types import ceil_div

PAGE_ROWS = (16, 32, 64)
ENTRY_BYTES = 4  # of a page's number in the table

KV_PAGE = declare("MK282", "KV pages of {rows} rows", "use pages of 16, 32 or 64 rows, or 0: then the rows of a sequence follow each other")
KV_PAGES = declare("MK283", "a pool of {pages} KV pages, {why}", "{mend}")


def table_pages(schedule: Schedule) -> int:
    """Entries of a sequence in the table: pages that its rows take at most; 0 without pages."""
    return ceil_div(schedule.max_kv, schedule.page_rows) if schedule.page_rows else 0


def table_bytes(schedule: Schedule) -> int:
    """Bytes of the table of all sequences."""
    return schedule.sequences * table_pages(schedule) * ENTRY_BYTES


def check_pages(schedule: Schedule, graph: Graph, found: Collector) -> None:
    """MK282 and MK283."""
    rows, pages = schedule.page_rows, schedule.pool_pages
    least = schedule.sequences * ceil_div(graph.tokens, rows) if rows > 0 else 0
    if rows not in (0, *PAGE_ROWS):
        found.add(KV_PAGE, graph.span, rows=rows)
    elif not rows and pages:
        why, mend = "but cached rows are not in pages", "say how many rows a page has as well, or leave it out"
        found.add(KV_PAGES, graph.span, pages=pages, why=why, mend=mend)
    elif rows and not any(isinstance(op, Attention) for op in graph.ops):
        why, mend = f"but {graph.name!r} has no KV cache", "compile it without pages"
        found.add(KV_PAGES, graph.span, pages=pages or "some", why=why, mend=mend)
    elif pages and pages < least:
        why = f"of which a step of {graph.tokens} tokens of {schedule.sequences} sequences may need {least}"
        mend = f"use at least {least}, or leave it out: then there are pages for all rows of all sequences"
        found.add(KV_PAGES, graph.span, pages=pages, why=why, mend=mend)


def with_pool(schedule: Schedule) -> Schedule:
    """By default the pool has a page for each row that there may be."""
    return replace(schedule, pool_pages=schedule.pool_pages or schedule.sequences * table_pages(schedule))
