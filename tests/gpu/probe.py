"""probe.cu as a compilation: what runtime tests launch, in the emulator and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megadsl.ir.expr import Arg
from megadsl.ir.graph import Fused, Graph, Linear
from megadsl.machine import DEFAULT_ARCH
from megadsl.runtime.weights import TensorSource
from megadsl.source import UNKNOWN

VOCAB, TOKENS, MAX_KV = 97, 4, 40
SOURCE = (Path(__file__).parent / "probe.cu").read_text()


def manifest(blocks: int = 3) -> dict[str, Any]:
    table = {
        **{"name": "embed", "kind": "table", "offset": 0, "layer_stride": 0, "per_layer": False, "format": "bf16", "interleave": False},
        **{"sources": [{"weight": "w", "rows": VOCAB, "order": "natural", "head_dim": 0}]},
        **{"rows": VOCAB, "columns": 1, "columns_padded": 1, "tile_columns": 1, "bytes": 2 * VOCAB},
    }
    site = {"id": 0, "role": "consumer", "op": "gather", "kind": "exchange", "span": "probe.cu:20", "expects": "the epoch of block tile"}
    return {
        **{"model": "probe", "arch": DEFAULT_ARCH, "tokens": TOKENS, "sequences": 1, "kv_page": 0, "kv_pages": 0},
        **{"blocks": blocks, "threads": 32, "cluster": 1, "smem_bytes": 1024},
        **{"entries": ["megakernel"], "launches": [[0, 0]], "several_steps": False},
        **{"layers": 1, "vocab": VOCAB, "max_kv": MAX_KV, "rope": None, "kv": None, "exchange_fill": [[0, 16 * blocks, 0xFF]]},
        **{
            "trace": trace_layout(blocks),
            "sites": [site],
            "pack": [table],
            "random": {},
            "code_word": None,
            "shape": [VOCAB],
        },
        "buffers": {
            **{"control": 512, "weights": 256, "kv": 16, "exchange": 16 * blocks, "logits": TOKENS * VOCAB * 4},
            **{"rope": 0, "pages": 0},
        },
    }


def trace_layout(blocks: int) -> dict[str, Any]:
    phases = [
        {"name": name, "op": name, "span": "probe.cu:20", "looped": False, "sites": [site], "loader": ""}
        for name, site in (("signal", 1), ("gather", 0))
    ]
    end = {"value": "epoch", "looped": False, "slope": 0, "round": 0}
    return {
        **{"records": 8, "bytes": blocks * 10 * 16, "roles": [{"name": "consumer", "kind": "consumer", "stages": 0}], "phases": phases},
        **{"signals": [{**end, "phase": "signal"}], "waits": [{**end, "phase": "gather", "whole": True}]},
    }


def graph(sink: str = "argmax") -> Graph:
    head = Linear("head", Fused(Arg("x"), ()), 1, (), None, None, sink, None, UNKNOWN)
    return Graph("probe", TOKENS, 0, (head,), (), VOCAB, UNKNOWN)


@dataclass(frozen=True)
class Probe:
    """What a Generator takes."""

    manifest: dict[str, Any] = field(default_factory=manifest)
    graph: Graph = field(default_factory=graph)
    source: str = SOURCE


def weights() -> TensorSource:
    return TensorSource({"w": torch.arange(1.0, VOCAB + 1)[:, None]})


def continuation(prompt: list[int], count: int) -> list[int]:
    """What the probe generates."""
    ids = list(prompt)
    for _ in range(count):
        ids.append((5 * ids[-1] + len(ids) - 1) % VOCAB)
    return ids[len(prompt) :]
