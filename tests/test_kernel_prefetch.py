"""What a loader asks L2 for. The emulator's prefetch only checks that it stays inside a buffer; here it also says what it was given."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megadsl.check.model import attention_unit
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.lower.columns import share_begin
from megadsl.lower.tiling import tiling
from tests.kernels import Bench, Step, compiled
from tests.test_detector_models import change_header

ROWS, MOST, KV = 1536, 4096, 70  # bytes of a unit's cached rows, of a block's tiles; cached rows
BLOCKS, LAYERS, CHUNK = 3, 2, 16 * 64 * 2 * 2  # bytes of 16 rows of a head's keys and values


def for_the_next_layer(s: ScheduleBlock) -> None:
    s["attention"].prefetch(l2=ROWS, ahead_of="down_proj").split(kv=2)
    s["qkv_proj"].prefetch(l2=MOST, ahead_of="gate_up_proj")
    s["o_proj"].prefetch(l2=MOST, ahead_of="qkv_proj")


def test_what_is_prefetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Of an op that stands behind: this layer's. Of one in front: the next layer's, and nothing in the last layer."""
    told = '{ host::check_prefetch(src, bytes); std::fprintf(stderr, "prefetch %llu %u\\n", (unsigned long long)src, bytes); }'
    change_header(monkeypatch, tmp_path, "ptx/copy.h", "{ host::check_prefetch(src, bytes); }", told)
    header = tmp_path / "include" / "megadsl" / "ptx" / "copy.h"
    header.write_text(header.read_text().replace("#pragma once\n", "#pragma once\n#include <cstdio>\n", 1))
    made = compiled("llama-tiny", blocks=BLOCKS, configure=for_the_next_layer)
    bench = Bench(made)
    capfd.readouterr()
    bench.run(Step((77,), KV, 1))
    found = sorted((int(at), int(size)) for at, size in re.findall(r"prefetch (\d+) (\d+)", capfd.readouterr().err))
    addresses = bench.program.addresses()
    wanted: list[tuple[int, int]] = []
    kv = made.manifest["kv"]
    for unit in range(kv["kv_heads"] * 2):
        head, begin, end, _ = attention_unit(2, unit, KV)
        at = addresses["kv"] + kv["layer_stride"] + head * kv["head_stride"] + begin * CHUNK
        wanted.append((at, min(ROWS, (end - begin) * CHUNK)))
    packs = {record["name"]: record for record in made.manifest["pack"]}
    for name, layers in (("qkv_proj", [1]), ("o_proj", [0, 1])):
        tiles, offset = tiling(made.graph.op(name)), made.schedule.op(name).share_offset  # type: ignore[arg-type]
        assert tiles.pieces == 1 and tiles.fold == 1
        for block in range(BLOCKS):
            first, last = (share_begin(tiles.groups, BLOCKS, offset, i) for i in (block, block + 1))
            size = min(MOST, (last - first) * tiles.group_bytes)
            at = addresses["weights"] + packs[name]["offset"] + first * tiles.group_bytes
            wanted += [(at + layer * packs[name]["layer_stride"], size) for layer in layers]
    assert found == sorted(wanted)
