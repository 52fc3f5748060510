"""The tool that times loading, small and on a CPU: it loads what it wrote, says how much that was, and leaves nothing behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("safetensors")

from megadsl.runtime.weights import open_weights
from tools import load_time


def test_a_small_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(load_time, "SHARD", 1 << 20)  # several files
    monkeypatch.setattr(load_time, "NOISE", 1 << 12)
    options = [str(tmp_path), "--model", "llama-tiny", "--gb", "0.003", "--device", "cpu", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["load_time", *options])
    load_time.main()
    found = json.loads(capsys.readouterr().out)
    assert (
        abs(found["bytes"] - 3e6) < 4e5
        and found["layers"] > 4
        and found["ratio"] == pytest.approx(found["load_s"] / found["read_s"], rel=0.1)
    )
    assert not list(tmp_path.iterdir())


def test_what_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_time, "SHARD", 1 << 18)
    compiled = load_time.made("llama-tiny", load_time.config_of("llama-tiny", 1.0))
    assert compiled.graph.layers == 1
    size = load_time.write_checkpoint(tmp_path / "made", compiled)
    source = open_weights(tmp_path / "made")
    tensors = [source.load(name) for name in source.shapes()]
    assert sum(2 * t.numel() for t in tensors) == size and all(bool(t.isfinite().all()) and t.float().std() > 0 for t in tensors)
    assert len(list((tmp_path / "made").glob("*.safetensors"))) > 1
    load_time.read_all(tmp_path / "made")
    load_time.forget(tmp_path / "made")
