"""A launch's timeline as files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megadsl.machine import machine
from megadsl.trace.activity import activities
from megadsl.trace.perfetto import shown, trace_events
from megadsl.trace.picture import layer_picture
from megadsl.trace.records import read_timeline
from megadsl.trace.table import Summary, render, summarise


def write_timeline(
    manifest: Mapping[str, Any], raw: npt.NDArray[np.uint8], out: Path, *, blocks: int = 8, layer: int | None = None
) -> Summary:
    """Write trace.json (for Perfetto), table.txt, table.json and layer.svg into ``out``, which is made.

    ``raw``: the bytes of the trace buffer. ``blocks``: how many blocks trace.json has, beside the one that works longest; the
    tables are of all. ``layer``: of the picture; the middle one by default. Raises MK460, MK463 and MK464.
    """
    timeline = read_timeline(manifest, raw)
    bytes_per_us = machine(manifest["arch"]).bandwidth / 1e6
    found = activities(timeline, bytes_per_us)
    summary = summarise(timeline, found, bytes_per_us)
    some = shown(found, 1)
    busiest = max(some, key=lambda a: sum(r.work for r in a.executions))
    picture = layer_picture(timeline, found, busiest, manifest["layers"] // 2 if layer is None else layer)
    out.mkdir(parents=True, exist_ok=True)
    (out / "trace.json").write_text(json.dumps(trace_events(timeline, found, blocks), separators=(",", ":")) + "\n")
    (out / "table.txt").write_text(render(summary) + "\n")
    (out / "table.json").write_text(json.dumps(summary.as_json(), indent=1) + "\n")
    (out / "layer.svg").write_text(picture)
    return summary
