"""Checkpoints that are read ahead: the same arena as from tensors in memory, whatever the files are like."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from megadsl.diagnostics import MegadslError
from megadsl.driver import compile_model
from megadsl.runtime import pack, readahead
from megadsl.runtime.pack import pack_weights
from megadsl.runtime.readahead import Stored, read_ahead
from megadsl.runtime.weights import SafetensorsSource, TensorSource, needed, open_weights, random_weights
from tests.checkpoint_tools import LLAMA

safetensors = pytest.importorskip("safetensors.torch")

CPU = torch.device("cpu")
CONFIG = LLAMA | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def checkpoint(folder: Path, config: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16, files: int = 1) -> dict[str, torch.Tensor]:
    """A folder with random weights; what the spec asks for, by name."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    manifest = compile_model(str(folder), blocks=2, check=False).manifest
    source = random_weights(manifest)
    tensors = {name: (1.001 * source.load(name).float()).to(dtype) for name in needed(manifest)}
    names = [f"model-{i}.safetensors" for i in range(files)] if files > 1 else ["model.safetensors"]
    places = dict(zip(tensors, (names[i % files] for i in count()), strict=False))
    for file in names:
        safetensors.save_file({name: tensors[name] for name, place in places.items() if place == file}, folder / file)
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return tensors


def packed(folder: Path) -> torch.Tensor:
    return pack_weights(compile_model(str(folder), blocks=2, check=False).manifest, open_weights(folder), "cpu", progress=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("piece", [readahead.PIECE, 1000])
def test_the_arena_is_that_of_tensors_in_memory(dtype: torch.dtype, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where pieces end inside an element, and in a folder whose name has spaces."""
    monkeypatch.setattr(readahead, "PIECE", piece)
    folder = tmp_path / "a folder with spaces"
    tensors = checkpoint(folder, CONFIG, dtype, files=3 if piece == 1000 else 1)
    manifest = compile_model(str(folder), blocks=2, check=False).manifest
    assert packed(folder).equal(pack_weights(manifest, TensorSource(tensors), "cpu", progress=False))


def test_stacked_projections(tmp_path: Path) -> None:
    config = LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "num_key_value_heads": 4, "hidden_size": 256}
    tensors = checkpoint(tmp_path / "phi3", config, torch.float32)
    stacks = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    stored = dict(tensors)
    for stacked, parts in stacks.items():
        for name in [n for n in tensors if f".{parts[0]}." in n]:
            stored[name.replace(parts[0], stacked)] = torch.cat([stored.pop(name.replace(parts[0], part)) for part in parts])
    safetensors.save_file(stored, tmp_path / "phi3" / "model.safetensors")
    manifest = compile_model(str(tmp_path / "phi3"), blocks=2, check=False).manifest
    assert packed(tmp_path / "phi3").equal(pack_weights(manifest, TensorSource(tensors), "cpu", progress=False))


def test_each_tensor_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied output head is the embedding table again."""
    checkpoint(tmp_path / "tied", CONFIG | {"tie_word_embeddings": True})
    source, asked = open_weights(tmp_path / "tied"), list[Stored]()
    manifest = compile_model(str(tmp_path / "tied"), blocks=2, check=False).manifest
    assert [s["weight"] for r in manifest["pack"] for s in r["sources"]].count(TABLE) == 2
    monkeypatch.setattr(pack, "read_ahead", lambda wanted, device: asked.extend(wanted) or read_ahead(wanted, device))
    pack_weights(manifest, source, "cpu", progress=False)
    assert len({(s.path, s.offset) for s in asked}) == len(asked) == len(source.shapes())


def test_a_file_that_has_become_shorter(tmp_path: Path) -> None:
    """MK477, and neither threads nor files are left behind, also where whoever takes tensors stops early."""
    checkpoint(tmp_path / "cut", CONFIG)
    source, manifest = open_weights(tmp_path / "cut"), compile_model(str(tmp_path / "cut"), blocks=2, check=False).manifest
    assert isinstance(source, SafetensorsSource)
    before = set(os.listdir("/proc/self/fd")), threading.active_count()
    places = [place for name in source.shapes() if (place := source.stored(name)) is not None]
    some = read_ahead(places, CPU)
    assert next(some).shape == places[0].shape
    some.close()
    assert threading.active_count() == before[1] and len(os.listdir("/proc/self/fd")) == len(before[0])
    path = tmp_path / "cut" / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(MegadslError) as raised:
        pack_weights(manifest, source, "cpu", progress=False)
    (found,) = raised.value.diagnostics
    assert found.code == "MK477" and str(path) in found.message and f"byte {path.stat().st_size}" in found.message
    assert threading.active_count() == before[1] and len(os.listdir("/proc/self/fd")) == len(before[0])


def test_a_tensor_of_eight_bits(tmp_path: Path) -> None:
    """MK423, before anything is packed; of both kinds, each for all its layers."""
    tensors = dict(checkpoint(tmp_path / "eight", CONFIG))
    for name in tensors:
        if name.endswith("o_proj.weight"):
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        if name.endswith("down_proj.weight"):
            tensors[name] = tensors[name].to(torch.int8)
    safetensors.save_file(tensors, tmp_path / "eight" / "model.safetensors")
    with pytest.raises(MegadslError) as raised:
        packed(tmp_path / "eight")
    assert sorted((d.code, "F8_E4M3" in d.message, "I8" in d.message) for d in raised.value.diagnostics) == [
        ("MK423", False, True),
        ("MK423", True, False),
    ]


def test_flipped_bytes_of_a_header_never_crash(tmp_path: Path) -> None:
    """A damaged file is refused; what is still sound by itself is another checkpoint, which may lack what the spec asks for."""
    folder = tmp_path / "flipped"
    checkpoint(folder, CONFIG)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    manifest = compile_model(str(folder), blocks=2, check=False).manifest
    outcomes = set()
    for at in [*range(8), *range(8, end, 11)]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            pack_weights(manifest, open_weights(folder), "cpu", progress=False)
        except MegadslError as refused:
            outcomes.add(refused.code)
    assert outcomes == {"MK476"}


def test_nothing_is_wanted() -> None:
    assert list(read_ahead([], CPU)) == []
