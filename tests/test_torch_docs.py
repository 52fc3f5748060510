"""docs/torch.md is one program, and it runs: in the emulator or on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels import compiled
from tests.test_readme import blocks
from tests.test_torch import device

__all__ = ["device"]  # a fixture


def test_the_tutorial_runs(repository: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr("megadsl.driver.compile_model", lambda model, *, tokens: compiled(model, tokens=tokens))  # what other tests build
    monkeypatch.setattr("torch.cuda.is_available", lambda: device == "cuda")
    page = repository / "docs" / "torch.md"
    names: dict[str, object] = {}
    for text in blocks(page.read_text(), "python"):
        lines = page.read_text()[: page.read_text().index(text)].count("\n")
        exec(compile("\n" * lines + text, str(page), "exec"), names)
    assert str(names["device"]) == device
