"""The committed kernels are what the compiler gives: a change of them is seen in review, line by line."""

from __future__ import annotations

import difflib
import json

import pytest

from tools.regenerate import COMMAND, GENERATED, MODELS, files, folder


@pytest.mark.parametrize("model", MODELS)
def test_generated_files_are_up_to_date(model: str) -> None:
    there = GENERATED / folder(model)
    for name, text in files(model).items():
        path = there / name
        before = path.read_text() if path.exists() else ""
        diff = difflib.unified_diff(before.splitlines(), text.splitlines(), f"generated/{folder(model)}/{name}", "now", lineterm="", n=1)
        shown = "\n".join(list(diff)[:40])
        assert before == text, f"{name} differs; when the change is meant, run: {COMMAND}\n{shown}"


def test_nothing_else_lies_there() -> None:
    found = {path.relative_to(GENERATED).as_posix() for path in GENERATED.rglob("*") if path.is_file()}
    assert found == {f"{folder(model)}/{name}" for model in MODELS for name in ("kernel.cu", "plan.txt", "manifest.json")}


@pytest.mark.parametrize("model", MODELS)
def test_compiling_twice_gives_the_same(model: str) -> None:
    assert files(model) == files(model)


@pytest.mark.parametrize("model", MODELS)
def test_the_manifest_speaks_of_the_same_kernel(model: str) -> None:
    """Sites in the manifest are those that kernel.cu names by number, and each belongs to a phase of its timeline."""
    found = files(model)
    manifest = json.loads(found["manifest.json"])
    assert [site["id"] for site in manifest["sites"]] == list(range(len(manifest["sites"])))
    assert sorted(site for phase in manifest["trace"]["phases"] for site in phase["sites"]) == list(range(len(manifest["sites"])))
    words = sum(len(line.split(" = ")[1].split(", ")) for line in found["plan.txt"].split("== shape\n")[1].splitlines() if line)
    assert len(manifest["shape"]) == words
