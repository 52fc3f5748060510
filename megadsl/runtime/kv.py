"""The KV arena and the rope table, as the host sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from megadsl.ir.graph import LongRope, Rope, RopeScaling
from megadsl.runtime.pack import pair_order
from megadsl.types import PerLayer, ceil_div

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
        arena = sequence_arena(manifest, arena, sequence)
        self.kv_heads: int = kv["kv_heads"]
        self.head_dim: int = kv["head_dim"]
        self.max_kv: int = manifest["max_kv"]
        self._panels = ceil_div(self.head_dim, _PANEL)
        part = _ROWS * self._panels * _PANEL
        chunks = ceil_div(self.max_kv, _ROWS)
        strides = (kv["layer_stride"] // _ELEMENT, kv["head_stride"] // _ELEMENT, 2 * part, part, 1)
        shape = (manifest["layers"], self.kv_heads, chunks, 2, part)
        self._chunks = arena.view(torch.bfloat16).as_strided(shape, strides)
        rope = manifest["rope"]
        self._paired = 0 if rope is None else rope_of(rope).paired

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
        span = self._chunks[layer, :, begin:end]
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
