"""Weights into the arena that the kernel streams: tiles in mma-fragment order, each one contiguous bulk copy.

The layout is that of the manifest's pack records and of nothing else, so a cached arena outlives every change of schedule.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from megadsl.build.cache import cached
from megadsl.diagnostics import declare, warn
from megadsl.ir.formats import DEVICE_SCALE, FORMATS, PANEL_COLUMNS, PANEL_ROWS, PLAIN
from megadsl.reference.formats import Quantised, quantised, row_scales
from megadsl.runtime.readahead import read_ahead
from megadsl.runtime.weights import Manifest, WeightSource, source_shape, validate
from megadsl.types import round_up

PACK_UNCACHED = declare(
    "MK430",
    "the packed weights could not be cached ({reason}); the next start packs them again",
    "free space in the cache folder, or set MEGADSL_CACHE_DIR to one with room",
)

_FORMAT = "pack-2"  # raise it whenever the bytes below change for equal records
_COPY_UNIT = 16  # bytes

Record = Mapping[str, Any]


def pack_weights(manifest: Manifest, source: WeightSource, device: str, *, progress: bool = True, cache: bool = True) -> torch.Tensor:
    """The weights arena: uint8, ``manifest["buffers"]["weights"]`` bytes, on ``device``.

    Validates first (MK420 to MK423, all findings at once). A source with an identity is packed once and cached; MK430 warns
    when the cache has no room. ``progress`` shows a bar on stderr while packing, when that is a terminal.
    """
    validate(source, manifest)
    identity = source.identity
    if identity is None or not cache:
        return _packed(manifest, source, device, progress)
    made: list[torch.Tensor] = []

    def build(path: Path) -> None:
        made.append(_packed(manifest, source, device, progress))
        made[0].cpu().numpy().tofile(path)

    try:
        entry = cached(cache_key(manifest, identity), ".pack", build)
    except OSError as reason:
        warn(PACK_UNCACHED, reason=reason.strerror or str(reason))
        return made[0] if made else _packed(manifest, source, device, progress)
    if made:
        return made[0]
    size = int(manifest["buffers"]["weights"])
    return torch.from_file(str(entry), shared=False, size=size, dtype=torch.uint8).to(device)


def cache_key(manifest: Manifest, identity: str) -> list[str]:
    """What a packed arena depends on: the weights and the tile layout."""
    layout = [{k: v for k, v in record.items() if k != "name"} for record in manifest["pack"]]
    return [_FORMAT, identity, str(manifest["buffers"]["weights"]), str(manifest["layers"]), json.dumps(layout, sort_keys=True)]


def pack_record(record: Record, sources: list[torch.Tensor]) -> torch.Tensor:
    """The packed bytes (uint8, one dimension) of one record in one layer, from its sources' bf16 tensors, on their device."""
    return _PACK[record["kind"]](record, sources).contiguous().view(-1).view(torch.uint8)


def unpack_record(manifest: Manifest, record: Record, arena: torch.Tensor, layer: int = 0) -> list[torch.Tensor]:
    """The inverse of packing: the bf16 sources of one record, in checkpoint order and shape, read from an arena."""
    begin = _offset(record, layer)
    flat = arena[begin : begin + record["bytes"]].view(torch.bfloat16)
    shapes = [source_shape(record, s) for s in record["sources"]]
    if record["kind"] == "vector":
        return [flat[: shapes[0][0]].clone()]
    if record["kind"] == "table":
        rows, columns = shapes[0]
        return [flat[: rows * columns].view(shapes[0]).clone()]
    return _unstacked(record, flat if record["kind"] == "bias" else _untiled(record, flat), [shape[0] for shape in shapes])


def _packed(manifest: Manifest, source: WeightSource, device: str, progress: bool) -> torch.Tensor:
    arena = torch.zeros(int(manifest["buffers"]["weights"]), dtype=torch.uint8, device=device)
    pack_into(arena, manifest, source, progress=progress)
    return arena


def pack_into(arena: torch.Tensor, manifest: Manifest, source: WeightSource, *, progress: bool = False) -> None:
    """Pack into an arena of zeros, uint8, ``manifest["buffers"]["weights"]`` bytes, on whatever device it lies. Does not validate."""
    units = [(record, layer, [s["weight"].format(layer=layer) for s in record["sources"]]) for record, layer in _units(manifest)]
    with _bar(progress) as bar, closing(_in_turn(source, [names for _, _, names in units], arena.device)) as loaded:
        task = bar.add_task("packing weights", total=sum(record["bytes"] for record, _, _ in units))
        for (record, layer, _), tensors in zip(units, loaded, strict=True):
            data = pack_record(record, tensors)
            begin = _offset(record, layer)
            arena[begin : begin + data.numel()] = data
            bar.advance(task, record["bytes"])


def _in_turn(source: WeightSource, units: Sequence[Sequence[str]], device: torch.device) -> Generator[list[torch.Tensor]]:
    """The bf16 tensors of each unit on ``device``; read ahead of their use where they lie in files as they are. A tensor of several units
    (a tied output head) is then read once, and kept from the first to the last of them."""
    left = Counter(name for names in units for name in names)
    places = [source.stored(name) for name in left]
    if None in places:
        yield from ([source.load(name).to(device) for name in names] for names in units)
        return
    kept: dict[str, torch.Tensor] = {}
    with closing(read_ahead([place for place in places if place is not None], device)) as tensors:
        for names in units:
            for name in names:
                if name not in kept:
                    kept[name] = next(tensors).to(torch.bfloat16)
            left.subtract(names)
            yield [kept[name] if left[name] else kept.pop(name) for name in names]


def _units(manifest: Manifest) -> Iterator[tuple[Record, int]]:
    """(record, layer), what exists once first, then layer by layer, so that a checkpoint is read about front to back."""
    for record in manifest["pack"]:
        if not record["per_layer"]:
            yield record, 0
    for layer in range(manifest["layers"]):
        for record in manifest["pack"]:
            if record["per_layer"]:
                yield record, layer


def _offset(record: Record, layer: int) -> int:
    return int(record["offset"]) + layer * int(record["layer_stride"])


def _bar(shown: bool) -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal))


def _matrix(record: Record, sources: list[torch.Tensor]) -> torch.Tensor:
    if record["format"] == PLAIN:
        padded = _padded(record, _stacked(record, sources), record["columns_padded"])
        return _tiles(record, padded, PANEL_COLUMNS).permute(0, 2, 3, 1, 4)
    return arranged(record, [quantised(record["format"], w) for w in sources])


def arranged(record: Record, made: list[Quantised]) -> torch.Tensor:
    """The tiles (row group, part, bytes) of a matrix: panel by panel the codes of eight rows, then their scales; filled up to whole
    units of a bulk copy."""
    found = FORMATS[record["format"]]
    codes = _padded(record, _stacked(record, [q.codes for q in made]), record["columns_padded"])
    words = WORDS[record["format"]](codes)
    panels = [_tiles(record, words, PANEL_COLUMNS * found.bits // 8).permute(0, 2, 3, 1, 4).flatten(3)]
    if found.block:
        each = PANEL_COLUMNS // found.block * found.scale_bytes
        rows = [q.scales.contiguous().view(torch.uint8) for q in made if q.scales is not None]
        scales = _padded(record, _stacked(record, rows), record["columns_padded"] // PANEL_COLUMNS * each)
        panels.append(_tiles(record, scales, each).permute(0, 2, 3, 1, 4).flatten(3))
    tiles = torch.cat(panels, 3).flatten(2)
    filled = tiles.new_zeros(*tiles.shape[:2], round_up(tiles.shape[2], _COPY_UNIT))
    filled[..., : tiles.shape[2]] = tiles
    return filled


def _placed(codes: torch.Tensor, places: Sequence[tuple[tuple[int, int, int], ...]]) -> torch.Tensor:
    """Codes (rows, columns) as bytes of 32-bit words. ``places`` has for each pair of columns of a word from where to where in a half
    of it the bits of a code go, as (first bit of the code, how many, first bit of the half); the even column's half is the low one."""
    pairs = codes.int().unflatten(1, (-1, len(places), 2))  # word, pair, half
    halves = sum(
        ((pairs[:, :, pair] >> first & (1 << count) - 1) << at for pair, moved in enumerate(places) for first, count, at in moved),
        torch.zeros_like(pairs[:, :, 0]),
    )
    return halves.to(torch.int16).flatten(1).view(torch.uint8)


# Where bits of codes lie, so that formats.h brings them to their place in two bf16 with few shifts (most of them to the left).
_E4M3 = (((7, 1, 15), (0, 7, 0)), ((7, 1, 14), (0, 7, 7)))
_E2M1 = (((3, 1, 15), (0, 3, 6)), ((3, 1, 12), (0, 3, 3)), ((3, 1, 14), (0, 3, 9)), ((3, 1, 13), (0, 3, 0)))
_BYTES = (((0, 8, 0),), ((0, 8, 8),))
_NIBBLES = tuple(((0, 4, 4 * pair),) for pair in range(4))
WORDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    name: partial(_placed, places=places)
    for name, places in {"fp8": _E4M3, "int8": _BYTES, "nvfp4": _E2M1, "mxfp4": _E2M1, "int4": _NIBBLES}.items()
}


def _scale(record: Record, sources: list[torch.Tensor]) -> torch.Tensor:
    """fp32. What a format's blocks are scaled by on the device is divided out of it."""
    rows = [scales[:, None] for w in sources if (scales := row_scales(record["format"], w)) is not None]
    return _padded(record, _stacked(record, rows), 1) * DEVICE_SCALE.get(record["format"], 1.0)


def _padded(record: Record, stacked: torch.Tensor, columns: int) -> torch.Tensor:
    padded = stacked.new_zeros(record["rows"], columns)
    padded[: stacked.shape[0], : min(columns, stacked.shape[1])] = stacked[:, :columns]
    return padded


def _bias(record: Record, sources: list[torch.Tensor]) -> torch.Tensor:
    stacked = _stacked(record, sources)
    padded = stacked.new_zeros(record["rows"])
    padded[: stacked.shape[0]] = stacked
    return padded


def _stacked(record: Record, sources: list[torch.Tensor]) -> torch.Tensor:
    """The rows of all sources in their packed order."""
    ordered = [_in_order(w, spec) for w, spec in zip(sources, record["sources"], strict=True)]
    return torch.stack(ordered, 1).flatten(0, 1) if record["interleave"] else torch.cat(ordered)


def _tiles(record: Record, padded: torch.Tensor, width: int) -> torch.Tensor:
    """(rows, elements) seen as (row group, row, part, panel, element), ``width`` elements of a row to a panel."""
    parts = record["columns_padded"] // record["tile_columns"]
    return padded.view(-1, PANEL_ROWS, parts, record["tile_columns"] // PANEL_COLUMNS, width)


def _untiled(record: Record, flat: torch.Tensor) -> torch.Tensor:
    padded = flat.new_empty(record["rows"], record["columns_padded"])
    seen = _tiles(record, padded, PANEL_COLUMNS)
    seen.copy_(flat.view(*(seen.shape[i] for i in (0, 2, 3, 1, 4))).permute(0, 3, 1, 2, 4))
    return padded[:, : record["columns"]]


def _unstacked(record: Record, stacked: torch.Tensor, rows: list[int]) -> list[torch.Tensor]:
    inner = stacked[: sum(rows)]
    parts = inner.unflatten(0, (-1, len(rows))).unbind(1) if record["interleave"] else inner.split(rows)
    return [_in_order(part, spec, inverse=True) for part, spec in zip(parts, record["sources"], strict=True)]


def _in_order(rows: torch.Tensor, spec: Record, inverse: bool = False) -> torch.Tensor:
    if spec["order"] == "natural":
        return rows
    return rows[pair_order(spec["rows"], spec["head_dim"], inverse, spec["rotary_dim"]).to(rows.device)]


def pair_order(rows: int, head_dim: int, inverse: bool = False, rotary_dim: int = 0) -> torch.Tensor:
    """Row indices (int64, ``rows``) that bring rope pairs together: per head of D rows 0, R/2, 1, R/2 + 1, ..., then R, R + 1, ...

    R is ``rotary_dim``, or D without one. With ``inverse``, the indices that undo it.
    """
    turned = rotary_dim or head_dim
    grid = torch.arange(rows).view(-1, head_dim)
    first = grid[:, :turned]
    split = first.unflatten(1, (turned // 2, 2)) if inverse else first.unflatten(1, (2, turned // 2))
    return torch.cat((split.transpose(1, 2).flatten(1), grid[:, turned:]), 1).flatten()


def _vector(record: Record, sources: list[torch.Tensor]) -> torch.Tensor:
    padded = sources[0].new_zeros(round_up(sources[0].shape[0], PANEL_COLUMNS))
    padded[: sources[0].shape[0]] = sources[0]
    return padded


def _table(record: Record, sources: list[torch.Tensor]) -> torch.Tensor:
    return sources[0]


_PACK: dict[str, Callable[[Record, list[torch.Tensor]], torch.Tensor]] = {
    "matrix": _matrix,
    "scale": _scale,
    "bias": _bias,
    "vector": _vector,
    "table": _table,
}
