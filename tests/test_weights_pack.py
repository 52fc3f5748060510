"""Packing: tiles, orders, the arena, its cache; KV chunks; the rope table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megadsl.ir.graph import Rope
from megadsl.runtime.kv import KvCache, rope_table
from megadsl.runtime.pack import cache_key, pack_record, pack_weights, pair_order, unpack_record
from megadsl.runtime.weights import TensorSource, random_weights
from megadsl.types import round_up


def matrix(
    name: str, weights: dict[str, int], columns: int, tile: int, *, order: str = "natural", rotary: int = 0, interleave: bool = False
) -> dict[str, Any]:
    """A pack record at offset 0; ``weights`` maps names to rows."""
    rows, padded = round_up(sum(weights.values()), 8), round_up(columns, tile)
    sources = [{"weight": w, "rows": n, "order": order, "head_dim": 16, "rotary_dim": rotary} for w, n in weights.items()]
    shape = {"rows": rows, "columns": columns, "columns_padded": padded, "tile_columns": tile, "bytes": rows * padded * 2}
    return {
        **{"name": name, "kind": "matrix", "offset": 0, "layer_stride": 0, "per_layer": False, "format": "bf16"},
        **{"sources": sources, "interleave": interleave},
        **shape,
    }


def plain(kind: str, weight: str, rows: int, columns: int) -> dict[str, Any]:
    """A vector (rows 1) or table record at offset 0."""
    size = round_up(columns, 32) * 2 if kind == "vector" else rows * columns * 2
    record = matrix(kind, {weight: rows}, columns, 32)
    return record | {"name": weight, "kind": kind, "rows": rows, "bytes": size}


def manifest_of(records: list[dict[str, Any]], layers: int = 1) -> dict[str, Any]:
    """A manifest with the records laid out one after the other; per-layer records have ``{layer}`` in their names."""
    offset, placed = 0, []
    for record in records:
        per_layer = "{layer}" in record["sources"][0]["weight"]
        stride = round_up(record["bytes"], 128) if per_layer else 0
        placed.append(record | {"offset": offset, "layer_stride": stride, "per_layer": per_layer})
        offset += round_up(record["bytes"], 128) * (layers if per_layer else 1)
    return {"layers": layers, "pack": placed, "buffers": {"weights": offset}, "sites": [], "random": {}}


def numbered(*shape: int) -> torch.Tensor:
    """Distinct integers that bf16 holds exactly as bit patterns."""
    size = torch.Size(shape).numel()
    return torch.arange(size, dtype=torch.int32).remainder(30000).to(torch.int16).view(torch.bfloat16).reshape(shape)


@pytest.mark.parametrize("rows", [1000, 80, 176, 8, 3])
@pytest.mark.parametrize(("columns", "tile"), [(80, 32), (80, 96), (176, 64), (576, 192), (576, 576)])
def test_matrix_round_trip(rows: int, columns: int, tile: int) -> None:
    record = matrix("op", {"w": rows}, columns, tile)
    weight = numbered(rows, columns)
    packed = pack_record(record, [weight])
    assert packed.numel() == record["bytes"]
    (back,) = unpack_record(manifest_of([record]), record, packed)
    assert back.view(torch.int16).equal(weight.view(torch.int16))


def test_tile_layout_element_by_element() -> None:
    record = matrix("op", {"w": 20}, 80, 64)
    weight = torch.arange(20 * 80).remainder(251).to(torch.bfloat16).view(20, 80)
    flat = pack_record(record, [weight]).view(torch.bfloat16)
    tile, parts = 8 * 64, 2
    for row in range(24):
        for column in range(128):
            inside = column % 64
            at = (row // 8 * parts + column // 64) * tile + (inside // 32 * 8 + row % 8) * 32 + inside % 32
            want = float(weight[row, column]) if row < 20 and column < 80 else 0.0
            assert float(flat[at]) == want


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize(("order", "rotary"), [("natural", 0), ("pairs_half", 16), ("pairs_half", 8)])
def test_orders_round_trip(order: str, rotary: int, interleave: bool) -> None:
    rows = {"a": 80, "b": 80} if interleave else {"a": 48, "b": 16, "c": 16}
    record = matrix("op", rows, 176, 96, order=order, rotary=rotary, interleave=interleave)
    weights = [numbered(n, 176) + i for i, n in enumerate(rows.values())]
    packed = pack_record(record, weights)
    for back, weight in zip(unpack_record(manifest_of([record]), record, packed), weights, strict=True):
        assert back.equal(weight)


def test_pairs_and_interleave_put_rows_where_the_kernel_reads_them() -> None:
    assert pair_order(8, 8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert pair_order(16, 8, rotary_dim=4).tolist() == [0, 2, 1, 3, 4, 5, 6, 7, 8, 10, 9, 11, 12, 13, 14, 15]
    assert pair_order(32, 16)[pair_order(32, 16, inverse=True)].equal(torch.arange(32))
    weights = [torch.full((4, 32), float(10 * i)) + torch.arange(4.0)[:, None] for i in (1, 2)]
    record = matrix("op", {"a": 4, "b": 4}, 32, 32, interleave=True)
    first_column = pack_record(record, [w.bfloat16() for w in weights]).view(torch.bfloat16).view(8, 32)[:, 0]
    assert first_column.tolist() == [10, 20, 11, 21, 12, 22, 13, 23]


def test_vector_and_table() -> None:
    vector, table = plain("vector", "v", 1, 80), plain("table", "t", 5, 80)
    packed = pack_record(vector, [numbered(80)])
    assert packed.numel() == 192 and not packed[160:].any()
    assert unpack_record(manifest_of([vector]), vector, packed)[0].equal(numbered(80))
    assert unpack_record(manifest_of([table]), table, pack_record(table, [numbered(5, 80)]))[0].equal(numbered(5, 80))


def layered() -> dict[str, Any]:
    records = [
        plain("table", "embed", 100, 80),
        plain("vector", "l.{layer}.norm", 1, 80),
        matrix("qk", {"l.{layer}.q": 32, "l.{layer}.k": 16}, 80, 96, order="pairs_half", rotary=16),
        matrix("head", {"embed": 100}, 80, 96),
    ]
    return manifest_of(records, layers=3)


def test_arena_holds_every_layer() -> None:
    manifest = layered()
    source = random_weights(manifest, seed=5)
    arena = pack_weights(manifest, source, "cpu", progress=False)
    assert arena.numel() == manifest["buffers"]["weights"]
    for record in manifest["pack"]:
        for layer in range(3 if record["per_layer"] else 1):
            names = [s["weight"].format(layer=layer) for s in record["sources"]]
            for name, back in zip(names, unpack_record(manifest, record, arena, layer), strict=True):
                assert back.equal(source.load(name)), name


class Counting(TensorSource):
    """A source with an identity that counts its loads."""

    loads = 0

    @property
    def identity(self) -> str:
        return "weights-of-this-test"

    def load(self, name: str) -> torch.Tensor:
        Counting.loads += 1
        return super().load(name)


def test_cache_is_read_back_and_keyed_by_layout_alone(fresh_cache: Path) -> None:
    manifest = layered()
    random = random_weights(manifest)
    source = Counting({name: random.load(name) for name in random.shapes()})
    first = pack_weights(manifest, source, "cpu", progress=False)
    loads = Counting.loads
    again = pack_weights(manifest, source, "cpu", progress=False)
    assert Counting.loads == loads and again.equal(first) and list(fresh_cache.rglob("*.pack"))
    renamed = manifest | {"blocks": 7, "pack": [record | {"name": "other"} for record in manifest["pack"]]}
    assert cache_key(renamed, "x") == cache_key(manifest, "x") != cache_key(manifest, "y")
    wider = manifest | {"pack": [record | {"tile_columns": 32} for record in manifest["pack"]]}
    assert cache_key(wider, "x") != cache_key(manifest, "x")


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kv_round_trip(head_dim: int, style: str) -> None:
    manifest, arena = kv_arena(head_dim, style)
    cache = KvCache(manifest, arena)
    k, v = numbered(2, 40, head_dim), numbered(2, 40, head_dim) + 1
    cache.write(1, k[:, :21], v[:, :21])
    cache.write(1, k[:, 21:], v[:, 21:], start=21)
    for got, want in zip(cache.read(1, 40), (k, v), strict=True):
        assert got.equal(want)
    assert not any(part.any() for part in cache.read(0, 48)), "another layer was written"
    assert cache.read(1, 0)[0].shape == (2, 0, head_dim)


def test_kv_layout_element_by_element() -> None:
    manifest, arena = kv_arena(64, "half")
    k, v = torch.rand(2, 20, 64).bfloat16(), torch.rand(2, 20, 64).bfloat16()
    KvCache(manifest, arena).write(1, k, v)
    flat, chunk = arena.view(torch.bfloat16), 16 * 64 * 2
    paired = k[..., pair_order(64, 64)]
    for head, row, dim in [(0, 0, 0), (1, 19, 63), (0, 9, 33), (1, 7, 40), (1, 14, 17)]:
        base = (manifest["kv"]["layer_stride"] + head * manifest["kv"]["head_stride"]) // 2 + row // 16 * chunk
        r = row % 16
        at_k = base + ((r // 8 * 2 + dim // 32) * 8 + r % 8) * 32 + dim % 32
        assert flat[at_k] == paired[head, row, dim]
        pair, jj, g = dim // 16, dim // 8 % 2, dim % 8
        half, q, e = r // 8, r % 8 // 2, r % 2
        at_v = base + 16 * 64 + ((((pair * 8 + g) * 4 + q) * 2 + jj) * 2 + half) * 2 + e
        assert flat[at_v] == v[head, row, dim]


def kv_arena(head_dim: int, style: str) -> tuple[dict[str, Any], torch.Tensor]:
    head_stride = 3 * 16 * head_dim * 2 * 2
    kv = {"kv_heads": 2, "head_dim": head_dim, "layer_stride": 2 * head_stride, "head_stride": head_stride, "chunk_rows": 16}
    rope = {"head_dim": head_dim, "theta": 1e4, "style": style, "scaling": None, "rotary_dim": head_dim}
    manifest = {"kv": kv, "max_kv": 40, "sequences": 1, "layers": 2, "rope": rope}
    return manifest, torch.zeros(2 * 2 * head_stride, dtype=torch.uint8)


def test_rope_table() -> None:
    table = rope_table(Rope(64, 1e5, "half"), 300)
    assert table.shape == (300, 32, 2) and table.dtype == torch.float32
    assert table[0].tolist() == [[1.0, 0.0]] * 32
    angle = torch.tensor(299 * 1e5 ** (-2 * 5 / 64), dtype=torch.float64)
    assert table[299, 5].tolist() == [float(angle.cos().float()), float(angle.sin().float())]
