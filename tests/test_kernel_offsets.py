"""Arenas of more than 2**31 elements, more than 2**32 bytes, and more than 2**31 of the units that offsets count: in memory that takes room
only where something is written. Whatever a kernel computed in too few bits would lead elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megadsl.diagnostics import MegadslError
from megadsl.dsl.registry import load
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.lower import packing
from megadsl.runtime.pack import pack_into, pack_weights
from megadsl.runtime.program import Program
from megadsl.runtime.weights import TensorSource
from tests.kernels import Bench, Step, bits, compiled, config, steps, weights_for

GIB = 1 << 30
FAR = 33 * GIB  # more than 2**31 units of 16 bytes


def sparse(folder: Path, size: int) -> torch.Tensor:
    """Zeros, uint8, that take no room before they are written: a file with holes."""
    with (folder / "arena").open("wb") as file:
        file.truncate(size)
    return torch.from_file(str(folder / "arena"), shared=True, size=size, dtype=torch.uint8)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_weights_that_lie_far_apart(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables, vectors, biases and matrices of two layers, 2 GB each."""
    fields = load("llama-tiny-biased")[1]
    near = compiled("llama-tiny-biased", fields=fields, arch=arch)
    monkeypatch.setattr(packing, "ALIGN", 2 * GIB)
    far = compiled("llama-tiny-biased", fields=fields, arch=arch)
    assert near.source == far.source
    size = int(far.manifest["buffers"]["weights"])
    begins = {r["name"]: r["offset"] + (far.graph.layers - 1) * r["layer_stride"] for r in far.manifest["pack"]}
    assert size > FAR and sum(begin > FAR for begin in begins.values()) > 3
    weights, arena = weights_for(near), sparse(tmp_path, size)
    pack_into(arena, far.manifest, TensorSource(weights))
    some = steps(near, [(0, 1), (17, 1), (40, 1)])
    first, second = Bench(near, weights).play(some), Bench(far, weights, arena=arena).play(some)
    assert all(a.same(b) for a, b in zip(first, second, strict=True))


def splits(s: ScheduleBlock) -> None:
    s["attention"].split(kv=2)


def test_caches_that_are_large(tmp_path: Path) -> None:
    """Of 16 layers with 4 KV heads: rows are appended and read where the last of them end."""
    fields = config(num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=16)
    near = compiled("llama-tiny", fields=fields, configure=splits)
    rows = FAR // (near.graph.layers * 4 * 64 * 4) + 16
    far = compiled("llama-tiny", fields=fields, configure=splits, max_kv=rows - rows % 16)
    assert near.source == far.source and far.manifest["buffers"]["kv"] > FAR
    weights, step = weights_for(near), Step((77,), 37, 3)
    expected = Bench(near, weights).run(step)
    arena = pack_weights(far.manifest, TensorSource(weights), "cpu", progress=False)
    program = Program(far.manifest, far.source, "cpu", arena, kv=sparse(tmp_path, int(far.manifest["buffers"]["kv"])))
    assert program.kv is not None
    for layer in range(far.graph.layers):
        program.kv.write(layer, *step.rows(layer, 4, 64))
    program.control.set_inputs(step.kv, step.ids, [step.kv], [1])
    program.launch()
    assert bits(program.logits[:1]).equal(bits(expected.logits))
    for layer, appended in enumerate(expected.rows):
        for ours, theirs in zip(program.kv.read(layer, step.kv + 1), appended, strict=True):
            assert bits(ours[:, step.kv :]).equal(bits(theirs))


@pytest.mark.parametrize(
    ("fields", "max_kv", "words"),
    [
        ({"num_hidden_layers": 160}, 2048, "the packed weights take"),
        ({}, 1 << 20, "use a max_kv of at most 524288"),
    ],
)
def test_what_lies_beyond_is_refused(fields: dict[str, Any], max_kv: int, words: str) -> None:
    with pytest.raises(MegadslError) as refused:
        compiled("llama-3.1-8b", fields=load("llama-3.1-8b")[1] | fields, max_kv=max_kv, blocks=128)
    (found,) = refused.value.diagnostics
    assert found.code == "MK212" and words in str(found)
