"""The KV arena and the rope table, as the host sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from megadsl.diagnostics import declare, error
from megadsl.ir.graph import LongRope, Rope, RopeScaling
from megadsl.runtime.pack import pair_order
from megadsl.types import PerLayer, ceil_div

NO_PAGE = declare(
    "MK478",
    "row {row} of sequence {sequence} has no page: the table says {page}, the pool has {count}",
    "give the sequence pages for its rows first, as Program.reserve and Pages.hold do",
)

_ROWS = 16  # rows of a chunk
_ELEMENT = 2  # bytes of bf16
_PANEL = 32  # features: a head takes room for whole panels


class KvCache:
    """Plain views of one sequence's KV caches in an arena: (kv_heads, rows, head_dim) bf16, rows by position in the cache.

    The arena's own order (chunks in mma-fragment order, K in rope pair order) is the kernel's business; :meth:`write` and
    :meth:`read` translate.
    """

    def __init__(self, manifest: Mapping[str, Any], arena: torch.Tensor, sequence: int = 0) -> None:
        kv = manifest["kv"]
        self.kv_heads: int = kv["kv_heads"]
        self.head_dim: int = kv["head_dim"]
        self.max_kv: int = manifest["max_kv"]
        self._panels = ceil_div(self.head_dim, _PANEL)
        self._chunks = self._layout(manifest, arena, sequence, _ROWS * self._panels * _PANEL)
        rope = manifest["rope"]
        self._paired = 0 if rope is None else rope_of(rope).paired

    def _layout(self, manifest: Mapping[str, Any], arena: torch.Tensor, sequence: int, part: int) -> torch.Tensor:
        """All chunks of the arena, the sequence's own alone: (layers, heads, chunks, K or V, ``part``)."""
        kv, own = manifest["kv"], sequence_arena(manifest, arena, sequence)
        strides = (kv["layer_stride"] // _ELEMENT, kv["head_stride"] // _ELEMENT, 2 * part, part, 1)
        shape = (manifest["layers"], self.kv_heads, ceil_div(self.max_kv, _ROWS), 2, part)
        return own.view(torch.bfloat16).as_strided(shape, strides)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int = 0) -> None:
        """Put k and v, each (kv_heads, n, head_dim), at rows [start, start + n). K is rotated already, features in model order."""
        end = start + k.shape[1]
        keys, values = self._natural(layer, start // _ROWS, ceil_div(end, _ROWS))
        first = start - start % _ROWS
        keys[:, start - first : end - first] = self._order(k.to(keys), inverse=False)
        values[:, start - first : end - first] = v.to(values)
        self._store(layer, start // _ROWS, keys, values)

    def read(self, layer: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of k and v of rows [0, rows), each (kv_heads, rows, head_dim) bf16, features in model order."""
        keys, values = self._natural(layer, 0, ceil_div(rows, _ROWS))
        return self._order(keys[:, :rows], inverse=True), values[:, :rows]

    def _order(self, k: torch.Tensor, inverse: bool) -> torch.Tensor:
        if not self._paired:
            return k
        return k[..., pair_order(self.head_dim, self.head_dim, inverse, self._paired).to(k.device)]

    def _views(self, layer: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Chunks [begin, end) as k (heads, chunk, half, row, dim/32, 32) and v (heads, chunk, half, q, e, pair, jj, g)."""
        return self._split(self._chunks[layer, :, begin:end])

    def _split(self, span: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Chunks (heads, chunk, 2, part) as those of k and of v."""
        k = span[:, :, 0].unflatten(-1, (2, self._panels, 8, _PANEL)).permute(0, 1, 2, 4, 3, 5)
        v = span[:, :, 1].unflatten(-1, (2 * self._panels, 8, 4, 2, 2, 2)).permute(0, 1, 6, 4, 7, 2, 5, 3)
        return k, v

    def _natural(self, layer: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (self.kv_heads, (end - begin) * _ROWS, self._panels * _PANEL)
        k, v = (view.reshape(shape)[..., : self.head_dim] for view in self._views(layer, begin, end))
        return k.clone(), v.clone()

    def _store(self, layer: int, begin: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        for view, plain in zip(self._views(layer, begin, begin + keys.shape[1] // _ROWS), (keys, values), strict=True):
            view.copy_(functional.pad(plain, (0, self._panels * _PANEL - self.head_dim)).view(view.shape))


class PagedCache(KvCache):
    """The same of a sequence whose rows lie in pages: those that ``table``, int32 (sequences, entries), gives it when rows are read or
    written. Raises MK478 for rows without a page."""

    def __init__(self, manifest: Mapping[str, Any], arena: torch.Tensor, table: torch.Tensor, sequence: int = 0) -> None:
        self._page_chunks: int = manifest["kv_page"] // _ROWS
        self._pages: int = manifest["kv_pages"]
        self._table, self._sequence = table, sequence
        super().__init__(manifest, arena)

    def _layout(self, manifest: Mapping[str, Any], arena: torch.Tensor, sequence: int, part: int) -> torch.Tensor:
        """(layers, pages, heads, chunks of a page, K or V, ``part``)."""
        shape = (manifest["layers"], self._pages, self.kv_heads, self._page_chunks, 2, part)
        return arena.view(torch.bfloat16).view(shape)

    def _views(self, layer: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies: pages lie anywhere."""
        pages, inside = self._places(begin, end)
        return self._split(self._chunks[layer, pages, :, inside].transpose(0, 1))

    def _store(self, layer: int, begin: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        end = begin + keys.shape[1] // _ROWS
        pages, inside = self._places(begin, end)
        # of the sequence's own layout, so that its views can be written
        chunks = self._chunks[layer, pages, :, inside].transpose(0, 1).contiguous()
        for view, plain in zip(self._split(chunks), (keys, values), strict=True):
            view.copy_(functional.pad(plain, (0, self._panels * _PANEL - self.head_dim)).view(view.shape))
        self._chunks[layer, pages, :, inside] = chunks.transpose(0, 1)

    def _places(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Page, and chunk of it, of each of the chunks [begin, end)."""
        chunks = torch.arange(begin, end, device=self._table.device)
        pages = self._table[self._sequence, chunks // self._page_chunks].to(torch.int64)
        if bool(((pages < 0) | (pages >= self._pages)).any()):
            at = int(((pages < 0) | (pages >= self._pages)).nonzero()[0]) + begin
            raise error(NO_PAGE, row=at * _ROWS, sequence=self._sequence, page=int(pages[at - begin]), count=self._pages)
        return pages.to(self._chunks.device), (chunks % self._page_chunks).to(self._chunks.device)


def sequence_arena(manifest: Mapping[str, Any], arena: torch.Tensor, sequence: int) -> torch.Tensor:
    """The bytes of one sequence in the KV arena of a batch: in the layout of a kernel of one sequence."""
    size = arena.numel() // manifest["sequences"]
    return arena[sequence * size : (sequence + 1) * size]


def rope_of(record: Mapping[str, Any]) -> Rope:
    """The rotation in a manifest."""

    def each(value: Any, of: Callable[[Any], Any]) -> Any:  # a PerLayer is a record of its values
        return PerLayer(tuple(map(of, value["values"]))) if isinstance(value, Mapping) and "values" in value else of(value)

    theta = each(record["theta"], float)

    def scaled(fields: Mapping[str, Any] | None) -> RopeScaling | None:
        return None if fields is None else LongRope(**fields) if "divisors" in fields else RopeScaling(**fields)

    scaling = each(record["scaling"], scaled)
    return Rope(record["head_dim"], theta, record["style"], scaling, record["rotary_dim"])


def rope_table(rope: Rope, rows: int) -> torch.Tensor:
    """Cosines and sines, fp32 (rows, head_dim / 2, 2): entry [p, i] is of the angle p * frequencies[i], times the amplitude, from fp64.
    Pairs that are not rotated have the angle 0, so that the kernel knows of whole heads only."""
    frequencies = torch.zeros(rope.head_dim // 2, dtype=torch.float64)
    frequencies[: rope.rotary_dim // 2] = torch.tensor(rope.frequencies, dtype=torch.float64)
    angle = torch.arange(rows, dtype=torch.float64)[:, None] * frequencies
    amplitude = torch.ones(rope.head_dim // 2, dtype=torch.float64)
    amplitude[: rope.rotary_dim // 2] = rope.amplitude
    return torch.stack((amplitude * angle.cos(), amplitude * angle.sin()), -1).to(torch.float32)
