"""Passes ``exchange`` and ``pack``, and the tiling below both: sizes and places of what blocks read and hand on."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from dsl_tools import graph_of
from lower_tools import GPU, linears, lowered, model, model_graph, step_kernel

from megadsl.ir.graph import Attention, Graph, Linear
from megadsl.ir.plan import Exchange
from megadsl.ir.schedule import Flag, Schedule, Sentinel, Sync, Tagged
from megadsl.lower.columns import largest_share
from megadsl.lower.exchanges import FLAG_BYTES, plan_exchanges, vectors_for
from megadsl.lower.packing import ALIGN, OFFSET_UNIT, plan_packing
from megadsl.lower.schedule import default_schedule
from megadsl.lower.tiling import GROUP_ROWS, MAX_TILE_COLUMNS, PANEL, tiling

ODD = [(1000, 80), (80, 176), (176, 80), (8, 1), (7, 33), (1, 1024), (9, 1025), (2048, 8192), (49152, 576)]


def matrix(rows: int, columns: int) -> Linear:
    op = linears(model_graph("llama-tiny"))[0]
    return replace(op, parts=(replace(op.parts[0], rows=rows, rope=None),), columns=columns)


@pytest.mark.parametrize(("rows", "columns"), ODD)
def test_tiles_cover_any_matrix(rows: int, columns: int) -> None:
    tiles = tiling(matrix(rows, columns))
    assert tiles.tile_columns % PANEL == 0 and tiles.tile_columns <= MAX_TILE_COLUMNS
    assert columns <= tiles.columns_padded < columns + tiles.pieces * PANEL
    assert rows <= tiles.groups * GROUP_ROWS < rows + GROUP_ROWS
    assert tiles.tile_bytes <= 16 * 1024 and tiles.tile_bytes % 128 == 0
    assert tiles.bytes == tiles.groups * GROUP_ROWS * tiles.columns_padded * 2
    assert tiles.pieces == -(-columns // MAX_TILE_COLUMNS)  # no more copies than needed


def with_syncs(graph: Graph, sync: Sync, blocks: int = 5) -> Schedule:
    schedule = default_schedule(graph, GPU, blocks=blocks, max_kv=64)
    return replace(schedule, edges=tuple(replace(e, sync=sync) for e in schedule.edges))


def arena_end(e: Exchange) -> int:
    flags = e.owners * FLAG_BYTES if e.wire == "Flag" else 0
    return max(e.offset + e.slots * e.slot_bytes, e.flags_offset + flags)


@pytest.mark.parametrize("sync", [Tagged(), Tagged(slots=8), Sentinel(), Flag()])
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_every_value_has_room_for_the_largest_share(sync: Sync, tokens: int) -> None:
    graph = model_graph("llama-tiny-odd", tokens)
    schedule = with_syncs(graph, sync)
    exchanges, total, _ = plan_exchanges(graph, schedule)
    by_name = {e.name: e for e in exchanges}
    assert by_name.keys() == {*(v.name for v in graph.values), "attention.parts", "lm_head.best"}
    for value in graph.values:
        e = by_name[value.name]
        assert e.groups * GROUP_ROWS >= value.features > (e.groups - 1) * GROUP_ROWS
        assert e.units == largest_share(e.groups, e.owners, e.share_offset) * tokens
        assert e.vectors == vectors_for(sync, e.units)
        assert e.owners == 5 and e.slots == sync.slots and e.wire == type(sync).__name__
    for before, after in pairwise(exchanges):
        assert arena_end(before) <= after.offset
    assert arena_end(exchanges[-1]) <= total
    assert all(e.offset % 128 == 0 and e.flags_offset % OFFSET_UNIT == 0 for e in exchanges)


@pytest.mark.parametrize(("units", "tagged"), [(1, 2), (7, 8), (8, 10), (14, 16), (15, 18)])
def test_tags_push_out_the_last_elements(units: int, tagged: int) -> None:
    """A tagged unit of 8 bf16 carries seven and its tag; the eighths of seven units make one more vector."""
    assert [vectors_for(s, units) for s in (Tagged(), Sentinel(), Flag())] == [tagged, units, units]


def test_only_sentinels_are_filled() -> None:
    graph = model_graph("llama-tiny")
    for sync, filled in ((Tagged(), 0), (Flag(), 0), (Sentinel(), len(graph.values) + 1)):
        exchanges, _, fills = plan_exchanges(graph, with_syncs(graph, sync))
        assert len(fills) == filled
        places = {e.offset: e for e in exchanges}
        for offset, size, byte in fills:
            assert byte == 0xFF and size >= places[offset].slots * places[offset].slot_bytes


def test_parts_of_an_attention() -> None:
    """One owner per (KV head, split): for each query row head_dim fp32 and {maximum, sum}, four words to a vector."""
    state = model("llama-tiny-wide", 3, blocks=8)
    op = state.graph.op("attention")
    assert isinstance(op, Attention)
    e = state.plan.exchange("attention.parts")
    assert e.dtype == "f32" and e.owners == 2 * state.schedule.op("attention").splits == 8
    assert e.vectors == 3 * (op.heads // op.kv_heads) * (128 // 4 + 1)


def test_a_folded_pair_of_rows_is_one_feature() -> None:
    """Gate and up rows alternate: two row groups of 8 make one group of 8 features, and a block owns both or neither."""
    state = model("llama-tiny", blocks=4)
    (op,) = [op for op in linears(state.graph) if op.name == "gate_up_proj"]
    assert tiling(op).fold == 2 and tiling(op).groups == 2 * 192 // GROUP_ROWS
    assert state.plan.exchange("gate_up_proj").groups == tiling(op).shares == 192 // GROUP_ROWS


def test_a_loop_carried_value_is_shared_as_the_loop_does_it() -> None:
    state = model("smollm2-135m")
    x, down = state.plan.exchange("x"), state.schedule.op("down_proj")
    assert x.share_offset == down.share_offset and x.uses == "layers + 1"
    assert state.plan.exchange("qkv_proj").uses == "layers" and state.plan.exchange("lm_head.best").uses == "1"


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-tiny-odd", "llama-tiny-wide", "llama-tiny-interleaved"])
def test_weights_lie_apart_and_aligned(name: str) -> None:
    graph = model_graph(name)
    packed = plan_packing(graph)
    places = []
    for r in packed.records:
        assert r.offset % ALIGN == 0 and r.bytes % OFFSET_UNIT == 0 and r.offset // OFFSET_UNIT < 2**31
        assert r.per_layer == (r.layer_stride > 0)
        places += [(r.offset + layer * r.layer_stride, r.bytes) for layer in range(graph.layers if r.per_layer else 1)]
    places.sort()
    assert all(a + size <= b for (a, size), (b, _) in pairwise(places))
    assert places[-1][0] + places[-1][1] <= packed.bytes
    assert {r.layer_stride for r in packed.records if r.per_layer} == {max(r.layer_stride for r in packed.records)}


def test_records_of_a_matrix_of_several_weights() -> None:
    packed = plan_packing(model_graph("llama-tiny-odd"))
    qkv, gate_up, table, norm = (packed.find(n) for n in ("qkv_proj", "gate_up_proj", "embed_tokens", "qkv_proj.input_layernorm"))
    assert [(s.rows, s.order) for s in qkv.sources] == [(320, "pairs_half"), (64, "pairs_half"), (64, "natural")]
    assert qkv.sources[0].weight == "model.layers.{layer}.self_attn.q_proj.weight" and qkv.sources[0].head_dim == 64
    assert not qkv.interleave and gate_up.interleave
    assert (qkv.rows, qkv.columns, qkv.columns_padded, qkv.tile_columns) == (448, 80, 96, 96)
    assert (table.kind, table.rows, table.columns, table.bytes, table.per_layer) == ("table", 1000, 80, 160000, False)
    assert (norm.kind, norm.columns, norm.bytes) == ("vector", 80, 2 * 96)


def test_interleaved_rope_needs_no_other_row_order() -> None:
    packed = plan_packing(model_graph("llama-tiny-interleaved"))
    assert {s.order for s in packed.find("qkv_proj").sources} == {"natural"}


def test_packing_does_not_depend_on_the_schedule() -> None:
    kernel = step_kernel()
    graph = graph_of(kernel)
    decided = lowered(kernel, lambda s: s.blocks(3) or (s["o_proj"].prefetch(l2=4096, hint="evict_last") and None))
    assert decided.packed == plan_packing(graph)


def test_a_vocabulary_that_no_tile_divides() -> None:
    """1001 rows: the last group has one row that means something, the manifest says how many rows do."""
    graph = model_graph("llama-tiny-odd")
    head = next(op for op in linears(graph) if op.sink)
    odd = replace(head, parts=(replace(head.parts[0], rows=1001),))
    assert tiling(odd).groups == 126 and tiling(odd).bytes == 126 * 8 * 96 * 2
