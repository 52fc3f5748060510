"""Pass ``shape``: the Shape struct, the data half of the kernel. Fields are written in the order the headers declare them."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence

from megadsl.ir.formats import FORMATS
from megadsl.ir.graph import Attention, Custom, Embed, Graph, Linear, Op, RowMap, kept_values
from megadsl.ir.plan import Exchange, Record, ident
from megadsl.ir.schedule import OpSchedule, Schedule
from megadsl.lower.columns import part_shares
from megadsl.lower.exchanges import ASYNC, kept_locally, merges_in_cluster, sharing
from megadsl.lower.gathers import tiles_together
from megadsl.lower.memory import Memory, copies_vectors, copy_name, landed_name, pass_groups, received_name
from megadsl.lower.operands import head_vectors, input_area, prologue_values, scratch_area, vectors
from megadsl.lower.packing import OFFSET_UNIT, Packed, bias_name, head_vector_name, scale_name, vector_name
from megadsl.lower.pages import table_pages
from megadsl.lower.scratch import landed_area, loads_l2, scratch_record
from megadsl.lower.tiling import tiling
from megadsl.lower.warm import code_shape
from megadsl.lower.windows import meeting_records, meeting_word, own_windows
from megadsl.ops.custom import weight_elements
from megadsl.types import PerLayer, round_up

LOG2_E = math.log2(math.e)
CHUNK_ROWS = 16
ALL_ROWS = 2**31 - 1  # the window of a layer that sees all rows, where others do not
LAYERS_UNIT = 64  # a table of layers has room for a multiple of so many: the kernel's text does not depend on how many there are
PAGES = "pages"  # Shape's member for the pool of pages
WINDOWS, ROPE_TABLES = "windows", "rope_tables"  # Shape's members with a number for each layer


def begin_name(op: str, arg: str) -> str:
    """Shape's member for where in its value an operand of a linear begins; only operands that are slices have one."""
    return f"{ident(op)}_{ident(arg)}_begin"


def input_name(op: Custom, arg: str) -> str:
    """Shape's member for an input of a custom op."""
    return f"{ident(op.name)}_{ident(arg)}_rows"


def float_bits(value: float) -> int:
    """fp32 bits of ``value`` as a signed 32-bit integer."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def divisor_inverse(divisor: int) -> int:
    """mk::Divisor's multiplier as a signed 32-bit integer: 2^32 / divisor, rounded down, plus 1; 0 for 1."""
    return signed(0 if divisor == 1 else (2**32 - 1) // divisor + 1)


def signed(word: int) -> int:
    """A 32-bit word as a signed integer."""
    return word - 2**32 if word >= 2**31 else word


def kv_strides(op: Attention, schedule: Schedule) -> tuple[int, int]:
    """Bytes from one KV head to the next, of a sequence's rows or within a page, and from one layer to the next."""
    rows = schedule.page_rows or round_up(schedule.max_kv, CHUNK_ROWS)
    head = rows * op.cache_dim * 2 * 2
    return head, head * op.kv_heads * (schedule.pool_pages if schedule.page_rows else 1)


def kv_bytes(graph: Graph, schedule: Schedule) -> int:
    """Bytes of all KV caches of one sequence, or of all pools of pages."""
    return sum(kv_strides(op, schedule)[1] * (graph.layers if op.loop else 1) for op in graph.ops if isinstance(op, Attention))


def arena_bytes(graph: Graph, schedule: Schedule) -> int:
    """Bytes of the KV arena."""
    return kv_bytes(graph, schedule) * (1 if schedule.page_rows else schedule.sequences)


def build_shape(
    graph: Graph, schedule: Schedule, exchanges: tuple[Exchange, ...], packed: Packed, memory: Memory, room: int
) -> tuple[Record, ...]:
    """All members of Shape, in order. ``room``: records that the timeline of a role may have."""
    step = (
        schedule.blocks, divisor_inverse(schedule.blocks), graph.layers, memory.offset("angles"), schedule.max_kv, memory.offset("abort"),
        memory.offset("gates"), memory.offset("meeting"), room, memory.offset("progress"),
    )  # fmt: skip
    records = [Record("mk::StepShape", "step", step), Record("mk::SmemShape", "smem", _smem(memory, schedule))]
    records.extend(meeting_records(graph, schedule, memory.offset("meeting")))
    records.extend(code_shape(schedule))
    if schedule.sequences > 1:
        stride = 0 if schedule.page_rows else signed(kv_bytes(graph, schedule) // OFFSET_UNIT)
        records.append(Record("mk::BatchShape", "batch", (schedule.sequences, stride, memory.offset("sequences"))))
    if schedule.page_rows:
        records.append(Record("mk::PageShape", PAGES, (schedule.pool_pages, table_pages(schedule))))
    for role, ring in memory.rings:
        at = (memory.offset(f"{area}.{role}") for area in ("ring", "barriers", "tape"))
        words = (*at, ring.window, ring.meeting_window or ring.window)
        records.append(Record("mk::RingShape", f"ring_{ident(role)}", words))
        if loads_l2(schedule, role):
            records.append(scratch_record(role, memory.offset(f"scratch.{role}"), memory.offset(landed_area(role))))
    records.extend(_layer_tables(graph))
    records.extend(_exchange(e) for e in exchanges if e.wire != ASYNC)
    records.extend(Record("mk::i32", f"{ident(v)}_kept", (memory.offset(f"kept.{v}"),)) for v in kept_locally(graph, schedule))
    kv_at = 0
    for op in graph.ops:
        records.extend(_op(op, graph, schedule, packed, memory, kv_at, exchanges))
        if isinstance(op, Attention):
            kv_at += kv_strides(op, schedule)[1] * (graph.layers if op.loop else 1)
    return tuple(records)


def windowed(graph: Graph) -> list[Attention]:
    """Attentions whose window differs from layer to layer; an attention's number in it is its row of Shape's table."""
    return [op for op in graph.ops if isinstance(op, Attention) and isinstance(op.window, PerLayer)]


def rope_tables(graph: Graph) -> int:
    """Tables of angles: more than one where layers are rotated differently."""
    return max((len(op.rope.tables) for op in graph.ops if isinstance(op, Attention) and op.rope is not None), default=1)


def layer_room(graph: Graph) -> int:
    """Layers that a table of layers has room for."""
    return round_up(graph.layers, LAYERS_UNIT)


def _layer_tables(graph: Graph) -> Iterator[Record]:
    """What the layers of the loop do not have in common."""

    def record(name: str, rows: Sequence[Sequence[int]], comment: str) -> Record:
        room = layer_room(graph)
        words = tuple(word for row in rows for word in (*row, *(0 for _ in range(room - len(row)))))
        return Record(f"mk::LayerTable<{len(rows)}, {room}>", name, words, comment)

    windows = [[ALL_ROWS if w is None else w for w in op.window.values] for op in windowed(graph) if isinstance(op.window, PerLayer)]
    if windows:
        yield record(WINDOWS, windows, "rows that a token sees in each layer")
    if rope_tables(graph) > 1:
        rope = next(op.rope for op in graph.ops if isinstance(op, Attention) and op.rope is not None)
        yield record(ROPE_TABLES, [[rope.tables.index(rope.at(layer)) for layer in range(graph.layers)]], "each layer's table of angles")


def _smem(memory: Memory, schedule: Schedule) -> tuple[int, ...]:
    meeting = memory.offset("meeting")
    word = meeting_word(meeting, 0) if own_windows(schedule) else meeting
    areas = [memory.offset(n) for n in ("activations", "second", "partials", "staged", "kept", "scalars", "sums")]
    return (*areas[:-1], word, areas[-1])


def _exchange(e: Exchange) -> Record:
    words = (
        e.offset // OFFSET_UNIT, e.owners * e.vectors, e.slots, e.vectors, e.units, e.groups, divisor_inverse(e.groups),
        e.share_offset, e.flags_offset // OFFSET_UNIT,
    )  # fmt: skip
    return Record("mk::ExchangeShape", f"{ident(e.name)}_exchange", words, f"{e.wire}, {e.dtype}")


def _op(
    op: Op, graph: Graph, schedule: Schedule, packed: Packed, memory: Memory, kv_at: int, exchanges: tuple[Exchange, ...]
) -> list[Record]:
    match op:
        case Embed():
            return [_embed(op, packed, exchanges)]
        case RowMap():
            return _row_map(op, packed, exchanges)
        case Linear():
            return _linear(op, graph, schedule, packed, memory)
        case Attention():
            return _attention(op, graph, schedule, packed, memory, kv_at)
        case Custom():
            return _custom(op, schedule, packed, memory)


def _embed(op: Embed, packed: Packed, exchanges: tuple[Exchange, ...]) -> Record:
    # The value may be loop-carried: then its buffer is shared out the way the loop's last op does it.
    e = next(x for x in exchanges if x.name == op.out)
    words = (packed.find(op.name).offset // OFFSET_UNIT, op.table.shape[1], e.groups, e.share_offset)
    return Record("mk::EmbedShape", ident(op.name), words)


def _row_map(op: RowMap, packed: Packed, exchanges: tuple[Exchange, ...]) -> list[Record]:
    e, (_, ref) = next(x for x in exchanges if x.name == op.out), op.reduced
    found = [Record("mk::RowMapShape", ident(op.name), (op.features, ref.begin, e.groups, e.share_offset))]
    sliced = [(arg, kept.begin) for arg, kept in kept_values(op) if kept.begin]
    found.extend(Record("mk::i32", begin_name(op.name, arg), (begin,), "first feature of a slice") for arg, begin in sliced)
    return [*found, *(_vector(packed, vector_name(op, arg)) for arg, _ in vectors(op))]


def _linear(op: Linear, graph: Graph, schedule: Schedule, packed: Packed, memory: Memory) -> list[Record]:
    tiles, record, how = tiling(op), packed.find(op.name), schedule.op(op.name)
    words: tuple[int, ...] = (
        record.offset // OFFSET_UNIT, record.layer_stride // OFFSET_UNIT, tiles.groups, tiles.fold, part_shares(op, schedule)[1],
        op.rows, op.columns, tiles.tile_bytes, tiles.tile_columns, tiles.pieces, how.ways, memory.chunk(op.name),
        tiles_together(op, schedule, graph.tokens), how.prefetch.l2_bytes, pass_groups(op, graph, schedule),
    )  # fmt: skip
    found = [Record("mk::LinearShape", ident(op.name), words), *_pause(how)]
    sliced = [(arg, ref.begin) for arg, ref in (*prologue_values(op), *kept_values(op)) if ref.begin]
    found.extend(Record("mk::i32", begin_name(op.name, arg), (begin,), "first feature of a slice") for arg, begin in sliced)
    rotated = [i for i, p in enumerate(op.parts) if p.turned is not None]
    if rotated:
        begin = sum(p.rows for p in op.parts[: rotated[0]])
        rows = (begin, begin + sum(op.parts[i].rows for i in rotated))
        found.append(Record("mk::RopeShape", f"{ident(op.name)}_rope", rows))
    if op.sink == "argmax":
        found.append(Record("mk::i32", f"{ident(op.name)}_candidates", (memory.offset(f"{op.name}.candidates"),)))
    for arg, _ in vectors(op):
        found.append(_vector(packed, vector_name(op, arg)))
        if copies_vectors(op, graph, schedule):
            found.append(Record("mk::i32", f"{ident(vector_name(op, arg))}_copy", (memory.offset(copy_name(op, arg)),)))
    if FORMATS[op.format].row_scale:
        found.append(_vector(packed, scale_name(op)))
    if op.biased:
        found.append(_vector(packed, bias_name(op)))
    return found


def _vector(packed: Packed, name: str) -> Record:
    vector = packed.find(name)
    return Record("mk::VectorShape", ident(name), (vector.offset // OFFSET_UNIT, vector.layer_stride // OFFSET_UNIT, vector.bytes))


def _score_scale(op: Attention) -> float:
    """What a score is multiplied by: into the log2 domain, or as the argument of a soft cap."""
    return op.scale * LOG2_E if op.softcap is None else op.scale / op.softcap


def _attention(op: Attention, graph: Graph, schedule: Schedule, packed: Packed, memory: Memory, kv_at: int) -> list[Record]:
    how = schedule.op(op.name)
    head, layer = kv_strides(op, schedule)
    words = (
        kv_at // OFFSET_UNIT, (layer if op.loop else 0) // OFFSET_UNIT, head // OFFSET_UNIT, op.kv_heads, how.splits, op.q.begin,
        op.k.begin, op.v.begin, float_bits(_score_scale(op)), memory.offset(f"{op.name}.scratch"), memory.offset(f"{op.name}.queries"),
        memory.offset(f"{op.name}.fresh"), op.heads // op.kv_heads * graph.tokens, schedule.max_kv, divisor_inverse(how.splits),
    )  # fmt: skip
    share = sharing(op, op.heads * op.head_dim, schedule)
    merge = (share.groups, share.share_offset, op.heads // op.kv_heads, divisor_inverse(op.heads // op.kv_heads))
    found = [Record("mk::AttentionShape", ident(op.name), words), Record("mk::MergeShape", f"{ident(op.name)}_merge", merge)]
    if merges_in_cluster(op, schedule):
        place = (memory.offset(received_name(op)), memory.offset(landed_name(op)))
        found.append(Record("mk::ClusterShape", f"{ident(op.name)}_cluster", (*place, share.most, divisor_inverse(share.most))))
    if how.prefetch.l2_bytes:
        found.append(Record("mk::i32", f"{ident(op.name)}_l2", (how.prefetch.l2_bytes,), "bytes of a unit's rows to prefetch into L2"))
    return [*found, *_pause(how), *(_vector(packed, head_vector_name(op, which, arg)) for which, arg, _ in head_vectors(op))]


def _custom(op: Custom, schedule: Schedule, packed: Packed, memory: Memory) -> list[Record]:
    share = sharing(op, op.call.features, schedule)
    scratch = memory.offset(scratch_area(op))
    found = [Record("mk::CustomShape", ident(op.name), (op.call.features, scratch, share.groups, share.share_offset))]
    for arg, ref in op.inputs:
        found.append(Record("mk::RowsShape", input_name(op, arg), (ref.begin, ref.features, memory.offset(input_area(op, arg)))))
    for arg, weight in op.weights:
        name = vector_name(op, arg)
        found += [_vector(packed, name), Record("mk::i32", f"{ident(name)}_elements", (weight_elements(weight),))]
    return found


def _pause(how: OpSchedule) -> list[Record]:
    return [Record("mk::i32", f"{ident(how.op)}_pause", (how.pause,), "ns before its input is polled")] if how.pause else []
