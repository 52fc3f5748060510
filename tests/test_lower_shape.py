"""Pass ``shape`` against the headers: every word stands where the struct that the device reads declares its field.

The structs are parsed from templates/include/megadsl/, and each field is compared by its name with a value worked out here.
"""

from __future__ import annotations

import math
import re
import struct
from functools import cache

import pytest
from lower_tools import GPU, lowered, model, with_op

from megadsl.driver import compile_model
from megadsl.dsl.overrides import Overrides, SetKernel, SetPrefetch
from megadsl.ir.graph import Attention, Embed, Linear
from megadsl.ir.plan import Plan, Record, ident
from megadsl.lower.columns import share_begin, share_owner
from megadsl.lower.exchanges import kept_locally, merge_lanes
from megadsl.lower.memory import ABORT_BYTES, TAPE_ENTRY_BYTES
from megadsl.lower.pipeline import Lowering
from megadsl.lower.schedule import MEETING_BYTES, WINDOW_BYTES
from megadsl.lower.shape import ALL_ROWS, divisor_inverse, float_bits, kv_strides
from megadsl.lower.tiling import tiling
from megadsl.resources import include
from megadsl.source import UNKNOWN

HEADERS = include() / "megadsl"
UNIT = 16  # bytes: what offsets into arenas count in
CUSTOM = {"mk::CustomShape", "mk::RowsShape"}  # of ops that no model of ours has: tests/test_custom_ops.py
WARM_UP = SetKernel((("warm_up", "loader"), ("warm_blocks", 2), ("warm_part", "whole"), ("warm_every", 5)), UNKNOWN)
WARM = Overrides("sm_90a", (WARM_UP, SetPrefetch("o_proj", (("l2_bytes", 4096), ("l2_by", "load")), UNKNOWN)))
TAKEN = ("llama-tiny-odd", 5, 3)  # model, tokens, blocks: sizes that no tile divides, so that fields that change places are noticed


@cache
def structs() -> dict[str, tuple[str, ...]]:
    """Field names of every struct of only i32 fields, by its name."""
    found = {}
    for header in sorted(HEADERS.glob("*.h")):
        text = re.sub(r"//[^\n]*", "", header.read_text())
        for name, body in re.findall(r"struct (\w+Shape) \{([^}]*)\}", text):
            fields = re.findall(r"i32 (\w+);", body)
            assert len(fields) == body.count(";"), f"{name} in {header.name} has fields that are no i32"
            found[f"mk::{name}"] = tuple(fields)
    return found


@cache
def state(name: str = TAKEN[0], tokens: int = TAKEN[1], blocks: int = TAKEN[2]) -> Lowering:
    return model(name, tokens, blocks=blocks, max_kv=100)


def fields(type_: str, name: str, lowering: Lowering | None = None) -> dict[str, int]:
    """A record's words by the header's field names."""
    record = next(r for r in (lowering or state()).shape if r.name == name)
    assert record.type == type_
    return dict(zip(structs()[type_], record.words, strict=True))


@cache
def clustered_plan() -> Plan:
    return compile_model("smollm2-135m", check=False).plan  # by its stored schedule


def test_what_a_block_of_a_cluster_adds() -> None:
    made = clustered_plan()
    (record,) = (r for r in made.shape if r.type == "mk::ClusterShape")
    words = dict(zip(structs()[record.type], record.words, strict=True))
    areas = {a.name: a.offset for a in made.areas}
    assert words == {
        "received": areas["attention.received"],
        "landed": areas["attention.landed"],
        "groups": 9 * 64 // 8 // (3 * 8),  # of all heads, by KV heads and splits
        "groups_inverse": divisor_inverse(3),
    }


@pytest.mark.parametrize("name", ["llama-tiny-odd", "llama-tiny-wide", "llama-3.2-1b"])
def test_every_record_has_as_many_words_as_its_struct_has_fields(name: str) -> None:
    shape = state(name).shape
    assert {r.type: len(r.words) for r in shape} == {r.type: 1 if r.type == "mk::i32" else len(structs()[r.type]) for r in shape}
    others = (
        *state("gemma2-tiny").shape,
        *clustered_plan().shape,
        *compile_model("llama-tiny", tokens=2, sequences=2, kv_page=16, blocks=3).plan.shape,
        *compile_model("llama-tiny", blocks=3, schedule=WARM).plan.shape,
    )
    filled = {r.type for r in (*shape, *others) if not r.type.startswith("mk::LayerTable")}
    assert filled - {"mk::i32"} == structs().keys() - CUSTOM, "a struct nobody fills, or a header that is not read"
    assert len({r.name for r in shape}) == len(shape)
    assert all(-(2**31) <= word < 2**31 for r in shape for word in r.words)


def test_code_that_is_read_ahead() -> None:
    made = compile_model("llama-tiny", blocks=3, schedule=WARM).plan
    (record,) = (r for r in made.shape if r.type == "mk::CodeShape")
    assert dict(zip(structs()[record.type], record.words, strict=True)) == {"bytes": 0, "blocks": 2, "whole": 1, "every": 5}
    (record,) = (r for r in made.shape if r.type == "mk::ScratchShape")
    areas = {a.name: a.offset for a in made.areas}
    wanted = {"at": areas["scratch.loader"], "landed": areas["scratch_barriers.loader"]}
    assert dict(zip(structs()[record.type], record.words, strict=True)) == wanted


def test_layers_that_differ_and_maps_of_rows() -> None:
    s = state("gemma2-tiny")
    table = next(r for r in s.shape if r.name == "windows")
    assert table.type == "mk::LayerTable<1, 64>" and table.words == (24, ALL_ROWS, *[0] * 62)
    groups, offset = 10, s.schedule.op("post_attention_layernorm").share_offset
    assert fields("mk::RowMapShape", "post_attention_layernorm", s) == {
        "features": 80,
        "begin": 0,
        "groups": groups,
        "share_offset": offset,
    }


def test_pages() -> None:
    """A page has a run for each KV head, a layer a pool of pages, and the table entries for max_kv rows of each sequence."""
    s = model("llama-tiny-odd", 5, blocks=3, max_kv=100, sequences=2, page_rows=32, pool_pages=9)
    op = s.graph.op("attention")
    assert isinstance(op, Attention)
    assert fields("mk::PageShape", "pages", s) == {"pages": 9, "stride": 4} and fields("mk::BatchShape", "batch", s)["stride"] == 0
    head = 32 * op.cache_dim * 2 * 2
    words = fields("mk::AttentionShape", "attention", s)
    assert (words["head_stride"] * UNIT, words["layer_stride"] * UNIT) == (head, 9 * op.kv_heads * head)
    buffers = s.plan.buffers
    assert buffers["kv"] == s.graph.layers * 9 * op.kv_heads * head and buffers["pages"] == 2 * 4 * 4
    full = model("llama-tiny-odd", 5, blocks=3, max_kv=100, sequences=2, page_rows=32)
    assert full.schedule.pool_pages == 8 and kv_strides(op, full.schedule) == (head, 8 * op.kv_heads * head)


def test_step() -> None:
    s = state()
    area = s.memory.offset
    assert fields("mk::StepShape", "step") == {
        "blocks": 3,
        "blocks_inverse": divisor_inverse(3),
        "layers": 2,
        "angles": area("angles"),
        "angle_rows": 100,
        "abort_word": area("abort"),
        "gates": area("gates"),
        "meeting": area("meeting"),
        "records": s.plan.records,
        "progress": area("progress"),
    }


def test_shared_memory_and_rings() -> None:
    s = state()
    area = s.memory.offset
    names = structs()["mk::SmemShape"]
    assert fields("mk::SmemShape", "smem") == {name: area(name) for name in names}
    ring = {"stages": area("ring.loader"), "barriers": area("barriers.loader"), "tape": area("tape.loader"), "window": WINDOW_BYTES}
    ring["meeting_window"] = MEETING_BYTES
    assert fields("mk::RingShape", "ring_loader") == ring


@pytest.mark.parametrize("value", ["x", "qkv_proj", "gate_up_proj", "attention.parts", "lm_head.best"])
def test_exchanges(value: str) -> None:
    e = state().plan.exchange(value)
    assert fields("mk::ExchangeShape", f"{ident(value)}_exchange") == {
        "offset": e.offset // UNIT,
        "slot_stride": e.owners * e.vectors,
        "slots": e.slots,
        "vectors": e.vectors,
        "units": e.units,
        "groups": e.groups,
        "groups_inverse": divisor_inverse(e.groups),
        "share_offset": e.share_offset,
        "flags": e.flags_offset // UNIT,
    }


@pytest.mark.parametrize("name", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"])
def test_linears(name: str) -> None:
    s = state()
    op = s.graph.op(name)
    assert isinstance(op, Linear)
    tiles, record, how = tiling(op), s.packed.find(name), s.schedule.op(name)
    assert fields("mk::LinearShape", name) == {
        "weights": record.offset // UNIT,
        "layer_stride": record.layer_stride // UNIT,
        "groups": tiles.groups,
        "fold": 2 if name == "gate_up_proj" else 1,
        "share_offset": how.share_offset,
        "rows": op.rows,
        "columns": op.columns,
        "tile_bytes": tiles.tile_bytes,
        "tile_columns": tiles.tile_columns,
        "pieces": tiles.pieces,
        "ways": how.ways,
        "chunk_pieces": s.memory.chunk(name),
        "together": 1,
        "l2_bytes": 0,
        "pass_groups": 0,
    }
    if op.loop:
        assert record.layer_stride > 0


def test_own_results_that_a_later_op_adds() -> None:
    s = state()
    for value in kept_locally(s.graph, s.schedule):
        (word,) = next(r.words for r in s.shape if r.name == f"{ident(value)}_kept")
        assert word == s.memory.offset(f"kept.{value}")


def test_l2_bytes_reach_the_shape() -> None:
    decided = lowered(decide=lambda s: s["o_proj"].prefetch(l2=4096) and None, blocks=2)
    assert fields("mk::LinearShape", "o_proj", decided)["l2_bytes"] == 4096


def test_rotated_rows_and_vectors() -> None:
    s = state()
    op = s.graph.op("qkv_proj")
    assert isinstance(op, Linear)
    assert fields("mk::RopeShape", "qkv_proj_rope") == {"begin": 0, "end": op.parts[0].rows + op.parts[1].rows}
    record = s.packed.find("qkv_proj.input_layernorm")
    want = {"weights": record.offset // UNIT, "layer_stride": record.layer_stride // UNIT, "bytes": record.bytes}
    assert fields("mk::VectorShape", "qkv_proj_input_layernorm") == want
    assert record.bytes == 2 * 96  # 80 columns, padded to a panel


def test_embedding() -> None:
    s = state()
    op = s.graph.op("embed_tokens")
    assert isinstance(op, Embed)
    e = s.plan.exchange(op.out)
    assert fields("mk::EmbedShape", "embed_tokens") == {
        "table": s.packed.find("embed_tokens").offset // UNIT,
        "features": 80,
        "groups": e.groups,
        "share_offset": e.share_offset,
    }


def test_attention_and_merge() -> None:
    s = state()
    op = s.graph.op("attention")
    assert isinstance(op, Attention)
    head, layer = kv_strides(op, s.schedule)
    area = s.memory.offset
    assert fields("mk::AttentionShape", "attention") == {
        "kv": 0,
        "layer_stride": layer // UNIT,
        "head_stride": head // UNIT,
        "kv_heads": 1,
        "splits": 3,
        "q_begin": 0,
        "k_begin": 5 * 64,
        "v_begin": 6 * 64,
        "scale_log2": float_bits(op.scale * math.log2(math.e)),
        "scratch": area("attention.scratch"),
        "queries": area("attention.queries"),
        "fresh": area("attention.fresh"),
        "rows": 5 * 5,  # five query heads read the one KV head, five tokens each
        "max_rows": 100,
        "splits_inverse": divisor_inverse(3),
    }
    assert head == 7 * 16 * 64 * 2 * 2 and layer == head  # 100 rows are 7 chunks of 16
    share = s.plan.exchange("attention")
    merge = {"groups": share.groups, "share_offset": share.share_offset, "heads": 5, "heads_inverse": divisor_inverse(5)}
    assert fields("mk::MergeShape", "attention_merge") == merge


def test_tape_entries_and_the_abort_area_are_as_large_as_the_headers_say() -> None:
    tape = (HEADERS / "tape.h").read_text()
    (size,) = re.findall(r"static_assert\(sizeof\(TapeEntry\) == (\d+)", tape)
    assert int(size) == TAPE_ENTRY_BYTES
    body = re.search(r"struct TapeEntry \{([^}]*)\}", tape)
    assert body is not None
    types = re.findall(r"^\s*(\w+) \w+;", body[1], re.MULTILINE)
    assert sum({"u64": 8}.get(t, 4) for t in types) == TAPE_ENTRY_BYTES
    assert ABORT_BYTES >= 16  # the abort word, then the launch's deadline


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 132, 147, 4095, 65535])
def test_divisor_inverse_divides(divisor: int) -> None:
    """mk::Divisor: n * inverse >> 32, exact while n * divisor stays below 2^32."""
    inverse = divisor_inverse(divisor) % 2**32
    limit = 2**32 // divisor
    for n in {0, 1, divisor - 1, divisor, divisor + 1, limit - 1, limit // 2, *(k * divisor - 1 for k in range(1, 20))}:
        if 0 <= n < limit:
            assert (n if inverse == 0 else n * inverse >> 32) == n // divisor


def test_the_device_shares_as_python_does() -> None:
    """share_begin and share_owner through the Divisor, for the split of every value of the largest model."""
    blocks = GPU.sms
    s = model("llama-3.2-1b", 16, blocks=blocks)
    inverse = divisor_inverse(blocks) % 2**32
    for e in s.exchanges:
        for i in range(blocks + 1):
            assert (e.groups * i + e.share_offset) * inverse >> 32 == share_begin(e.groups, blocks, e.share_offset, i)
        of_groups = divisor_inverse(e.groups) % 2**32
        for item in range(e.groups):
            owner = (item + 1) * blocks - e.share_offset - 1
            assert (owner * of_groups >> 32 if of_groups else owner) == share_owner(e.groups, blocks, e.share_offset, item)


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 0.18033688, 1e-30])
def test_float_bits(value: float) -> None:
    assert struct.unpack("<f", struct.pack("<i", float_bits(value)))[0] == struct.unpack("<f", struct.pack("<f", value))[0]


LANES = [(1, 1, (1, 1)), (1, 3, (4, 1)), (1, 16, (16, 1)), (1, 40, (32, 2)), (5, 16, (16, 1)), (16, 16, (8, 2)), (16, 3, (4, 1))]


@pytest.mark.parametrize(("tokens", "splits", "lanes"), [*LANES, (16, 9, (8, 2))])
def test_merge_lanes(tokens: int, splits: int, lanes: tuple[int, int]) -> None:
    """16 tokens of 2 groups of features are 32 items: for 256 threads, 8 lanes each."""
    s = model("llama-3.2-1b", tokens)
    op = s.graph.op("attention")
    assert isinstance(op, Attention)
    assert merge_lanes(op, tokens, with_op(s.schedule, "attention", splits=splits)) == lanes


def test_records_are_frozen() -> None:
    with pytest.raises(AttributeError):
        state().shape[0].words = ()  # type: ignore[misc]
    assert all(isinstance(r, Record) for r in state().shape)
