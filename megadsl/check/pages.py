"""Cached rows in pages: a stage that is put together from pages is the very stage of rows that follow each other, what is appended goes
where it is looked for, and no two places of a pool are one. Twin of templates/include/megadsl/pages.h.

The table is run-time data: its entries are any numbers, those of different sequences and rows different ones, for which the host answers
(megadsl/runtime/pages.py). What is read or written through an entry that is no page of the pool stays within the pool, or is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from megadsl.check.batch import batches, segments
from megadsl.check.model import Device, attention_unit
from megadsl.check.report import Findings
from megadsl.diagnostics import declare
from megadsl.ir.graph import Attention
from megadsl.ir.plan import ident
from megadsl.lower.pages import ENTRY_BYTES
from megadsl.lower.shape import CHUNK_ROWS, PAGES
from megadsl.types import ceil_div

PAGE_ROWS = declare(
    "MK536",
    "KV pages of {op!r}: {wrong}",
    "let kernel, table and pool take rows of a page, pages and strides from one place",
)
UNIT = 16  # bytes: strides are counted in it
KV_CHUNK = 64  # bytes of a chunk per feature of a head: 16 rows of K and V
SHOWN_PAGES = 3  # whole pages that show what longer runs of them would


@dataclass(frozen=True)
class Part:
    """Chunks of one page that one copy brings: mk::Pages::for_each_part."""

    at: int  # in the stage, in chunks
    entry: int  # of the sequence's in the table
    inside: int  # first chunk of the page
    chunks: int


def stages(begin: int, end: int, per_stage: int, page_chunks: int) -> Iterator[list[Part]]:
    """The parts of each stage of chunks [begin, end); mk::Tape::stream_pages."""
    for first in range(begin, end, per_stage):
        last, at, found = min(first + per_stage, end), first, list[Part]()
        while at < last:
            inside = at % page_chunks
            chunks = min(page_chunks - inside, last - at)
            found.append(Part(at - first, at // page_chunks, inside, chunks))
            at += chunks
        yield found


def place(chunk: int, page_chunks: int) -> tuple[int, int]:
    """(entry, chunk of the page) that a chunk is appended to; mk::Pages::find."""
    return chunk // page_chunks, chunk % page_chunks


@dataclass(frozen=True)
class Pool:
    """The words that loaders and consumers find pages by, in bytes: of one attention."""

    pages: int
    entries: int  # of a sequence in the table
    base: int
    layer: int
    head: int
    kv_heads: int
    chunk: int  # bytes of 16 rows of K and V

    @property
    def page(self) -> int:
        return self.head * self.kv_heads

    @staticmethod
    def of(device: Device, op: Attention) -> Pool:
        w, (pages, entries) = device.records[ident(op.name)], device.records[PAGES]
        return Pool(pages, entries, w[0] % 2**32 * UNIT, w[1] * UNIT, w[2] * UNIT, w[3], op.cache_dim * KV_CHUNK)


def check_pages(device: Device, findings: Findings) -> list[str]:
    """Layout, table, stages and appends of every attention; nothing to prove where rows lie in stretches."""
    rows = device.plan.schedule.page_rows
    if not rows:
        return []
    if rows % CHUNK_ROWS:
        for op in device.ops[1]:
            _wrong(op, f"pages of {rows} rows are no whole chunks of {CHUNK_ROWS}", findings, Pool.of(device, op))
        return []
    shown = sum(_stages(device, op, findings) for op in device.ops[1])
    ends = list[tuple[int, int, Attention]]()
    for op in device.ops[1]:
        pool = Pool.of(device, op)
        _pool(device, op, pool, findings)
        ends.append((pool.base, pool.base + pool.layer * (device.plan.graph.layers if op.loop else 1), op))
    _apart(device, sorted(ends, key=lambda end: end[:2]), findings)
    pages, entries = device.records[PAGES]
    return [
        f"KV pages of {rows} rows: each stage of {shown} runs of cached rows has, page by page, the chunks that it has where rows follow"
        " each other, and new rows go to the places that are read",
        f"KV pages: heads, pages, layers and caches of a pool of {pages} lie apart and within the arena, {entries} entries a sequence reach"
        " every row",
    ]


def _wrong(op: Attention, wrong: str, findings: Findings, pool: Pool) -> None:
    findings.add(PAGE_ROWS, op.span, [("kernel", [str(pool)])], op=op.name, wrong=wrong)


def _pool(device: Device, op: Attention, pool: Pool, findings: Findings) -> None:
    """Places (layer, page, head, chunk) are bytes of their own: each stride holds what lies within it."""
    plan = device.plan
    chunks = plan.schedule.page_rows // CHUNK_ROWS
    layers = plan.graph.layers if op.loop else 1
    if pool.head < chunks * pool.chunk:
        _wrong(op, f"a head has {pool.head} bytes of a page, its {plan.schedule.page_rows} rows take {chunks * pool.chunk}", findings, pool)
    if pool.kv_heads != op.kv_heads:
        _wrong(op, f"pages are of {pool.kv_heads} KV heads, there are {op.kv_heads}", findings, pool)
    if pool.layer < pool.pages * pool.page and layers > 1:
        _wrong(op, f"a layer has {pool.layer} bytes, {pool.pages} pages take {pool.pages * pool.page}", findings, pool)
    if (end := pool.base + (layers - 1) * pool.layer + pool.pages * pool.page) > plan.buffers["kv"]:
        _wrong(op, f"the last page ends at byte {end}, the arena has {plan.buffers['kv']}", findings, pool)
    if pool.entries * plan.schedule.page_rows < plan.schedule.max_kv:
        _wrong(op, f"{pool.entries} entries of a sequence reach {pool.entries * plan.schedule.page_rows} rows", findings, pool)
    if (need := device.sequences * pool.entries * ENTRY_BYTES) > plan.buffers["pages"]:
        _wrong(op, f"the table has {plan.buffers['pages']} bytes, {device.sequences} sequences read {need}", findings, pool)


def _apart(device: Device, caches: list[tuple[int, int, Attention]], findings: Findings) -> None:
    for (_, end, _), (begin, _, op) in pairwise(caches):
        if begin < end:
            _wrong(op, f"they begin at byte {begin}, those of the cache before end at {end}", findings, Pool.of(device, op))


def _runs(device: Device, op: Attention, per_stage: int, page_chunks: int) -> set[tuple[int, int]]:
    """Runs of chunks that units take, for lengths about the borders of pages, stages, windows and splits; what comes after some whole
    pages and stages is as before."""
    heads, most = device.heads(op.name), device.plan.schedule.max_kv
    step = max(per_stage, page_chunks) * CHUNK_ROWS
    chunks = (0, 1, page_chunks, per_stage, SHOWN_PAGES * step // CHUNK_ROWS, heads.splits * step // CHUNK_ROWS, ceil_div(most, CHUNK_ROWS))
    near = {at + more for at in (*(n * CHUNK_ROWS for n in chunks), *heads.windows) for more in (-1, 0, 1)}
    lengths = sorted(kv for kv in near if 0 <= kv <= most)
    if device.sequences == 1:
        units = (attention_unit(heads.splits, split, kv, w) for split in range(heads.splits) for kv in lengths for w in set(heads.windows))
        return {(begin, end) for _, begin, end, _ in units}
    some = ((batch, split) for batch in batches(device.sequences, device.tokens, lengths, most) for split in range(heads.splits))
    return {(s.begin, s.end) for batch, split in some for s in segments(heads.splits, split, batch, heads.window(0))}


def _stages(device: Device, op: Attention, findings: Findings) -> int:
    """Runs checked: every chunk of a stage is the one that would be there without pages, and comes from where it is appended to."""
    schedule = device.plan.schedule
    page_chunks, pool = schedule.page_rows // CHUNK_ROWS, Pool.of(device, op)
    per_stage = max(1, schedule.ring(schedule.op(op.name).loader).stage_bytes // pool.chunk)
    runs = _runs(device, op, per_stage, page_chunks)
    for begin, end in runs:
        parts = ((n * per_stage, part) for n, stage in enumerate(stages(begin, end, per_stage, page_chunks)) for part in stage)
        found = [(first + p.at + i, (p.entry, p.inside + i)) for first, p in parts for i in range(p.chunks)]
        wanted = [(at - begin, place(at, page_chunks)) for at in range(begin, end)]
        if found != wanted:
            _wrong(op, f"chunks {begin} to {end} are copied as {found[:4]}, not as {wanted[:4]}", findings, pool)
            break
    return len(runs)
