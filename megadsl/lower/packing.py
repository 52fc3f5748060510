"""Pass ``pack``: where each weight lies in the packed arena, and in which row order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megadsl.ir.formats import FORMATS, PLAIN
from megadsl.ir.graph import Attention, Custom, Embed, Graph, Linear, Op, Part, Rope, RowMap, WeightRef
from megadsl.ir.plan import PackRecord, PackSource, Region
from megadsl.lower.operands import head_vectors, vectors
from megadsl.lower.tiling import GROUP_ROWS, PANEL, tiling
from megadsl.types import Level, round_up

ALIGN = 128  # bulk copies want 16; a whole cache line keeps neighbours apart
OFFSET_UNIT = 16  # device offsets count 16-byte units, so that 32 bits reach 64 GB


@dataclass
class Packed:
    """All records, by (op name, weight name), and the arena's size in bytes."""

    records: list[PackRecord] = field(default_factory=list)
    bytes: int = 0

    def find(self, name: str) -> PackRecord:
        return next(r for r in self.records if r.name == name)


def vector_name(op: Linear | Custom | RowMap, arg: str) -> str:
    """Pack record name of a vector operand of a prologue or of a map of rows, or of a custom op's weight."""
    return f"{op.name}.{arg}"


def head_vector_name(op: Attention, which: str, arg: str) -> str:
    """Pack record name of a vector operand of a map over heads of q or k."""
    return f"{op.name}.{which}.{arg}"


def bias_name(op: Linear) -> str:
    """Pack record name of a linear's bias."""
    return f"{op.name}.bias"


def scale_name(op: Linear) -> str:
    """Pack record name of the scales of a linear's rows, where its format has them."""
    return f"{op.name}.scale"


def bias_regions(op: Linear) -> tuple[Region, ...]:
    """What finishes an op's own rows, read from memory as it is: their scales, and their biases."""
    names = [*([scale_name(op)] if FORMATS[op.format].row_scale else []), *([bias_name(op)] if op.biased else [])]
    return tuple(Region("weights", name, Level.GPU) for name in names)


def plan_packing(graph: Graph) -> Packed:
    """Tables and out-of-loop weights first, then one stretch per layer with everything a layer reads, in reading order."""
    packed = Packed()
    for op in graph.ops:
        if op.loop is None:
            for record in _records(op):
                packed.records.append(_placed(record, packed.bytes, 0))
                packed.bytes += round_up(record.bytes, ALIGN)
    layer = [record for op in graph.ops if op.loop is not None for record in _records(op)]
    stride = sum(round_up(record.bytes, ALIGN) for record in layer)
    at = packed.bytes
    for record in layer:
        packed.records.append(_placed(record, at, stride))
        at += round_up(record.bytes, ALIGN)
    packed.bytes += stride * graph.layers
    return packed


def _placed(record: PackRecord, offset: int, stride: int) -> PackRecord:
    return PackRecord(**{**vars(record), "offset": offset, "layer_stride": stride if record.per_layer else 0})


def _records(op: Op) -> list[PackRecord]:
    if isinstance(op, Embed):
        rows, columns = op.table.shape
        source = PackSource(op.table.name, rows, "natural", 0, 0)
        return [_record(op.name, "table", [source], op.table.per_layer, rows, columns, 0, columns, rows * columns * 2)]
    if isinstance(op, Attention):
        return [_vector(head_vector_name(op, which, arg), ref) for which, arg, ref in head_vectors(op)]
    if isinstance(op, Custom):
        return [_natural(vector_name(op, arg), ref) for arg, ref in op.weights]
    found = [_vector(vector_name(op, arg), ref) for arg, ref in vectors(op)]
    if isinstance(op, RowMap):
        return found
    tiles = tiling(op)
    sources = [PackSource(p.weight.name, p.rows, *_order(p)) for p in op.parts]
    matrix = _record(
        op.name, "matrix", sources, op.parts[0].weight.per_layer, tiles.groups * GROUP_ROWS, op.columns, tiles.columns_padded,
        tiles.tile_columns, tiles.bytes, interleave=op.epilogue is not None and len(op.parts) > 1, weights=op.format,
    )  # fmt: skip
    if FORMATS[op.format].row_scale:
        found.append(replace(matrix, name=scale_name(op), kind="scale", bytes=matrix.rows * 4))
    return [*found, matrix, *([_bias(op, matrix)] if op.biased else [])]


def _bias(op: Linear, matrix: PackRecord) -> PackRecord:
    """One element for each row of the matrix, in its order."""
    sources = [PackSource(p.bias.name, p.rows, *_order(p)) for p in op.parts if p.bias is not None]
    return _record(bias_name(op), "bias", sources, matrix.per_layer, matrix.rows, 1, 1, 1, matrix.rows * 2, interleave=matrix.interleave)


def _vector(name: str, ref: WeightRef) -> PackRecord:
    columns = ref.shape[0]
    length = round_up(columns, PANEL)
    source = PackSource(ref.name, columns, "natural", 0, 0)
    return _record(name, "vector", [source], ref.per_layer, 1, columns, length, length, length * 2)


def _natural(name: str, ref: WeightRef) -> PackRecord:
    """A weight of one or two dimensions as the checkpoint has it, in whole vectors of 16 bytes."""
    if len(ref.shape) == 1:
        return _vector(name, ref)
    rows, columns = ref.shape
    source = PackSource(ref.name, rows, "natural", 0, 0)
    return _record(name, "table", [source], ref.per_layer, rows, columns, columns, columns, round_up(rows * columns * 2, OFFSET_UNIT))


def natural_bytes(ref: WeightRef) -> int:
    """Bytes of such a weight in the arena, and of a stage that it comes in."""
    return _natural("", ref).bytes


def _order(part: Part) -> tuple[str, int, int]:
    rope: Rope | None = part.rope
    if rope is None:
        return "natural", 0, 0
    return ("pairs_half" if rope.paired else "natural"), rope.head_dim, rope.paired


def _record(
    name: str, kind: str, sources: list[PackSource], per_layer: bool, rows: int, columns: int, padded: int, tile_columns: int, size: int,
    interleave: bool = False, weights: str = PLAIN,
) -> PackRecord:  # fmt: skip
    return PackRecord(
        name, kind, 0, 0, per_layer, tuple(sources), interleave, rows, columns, padded or columns, tile_columns, size, weights
    )
