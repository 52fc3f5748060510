"""The committed kernels are what the compiler gives: a change of them is seen in review, line by line."""

from __future__ import annotations

import difflib
import json

import pytest

from tools.regenerate import CASES, COMMAND, GENERATED, Case, files


@pytest.mark.parametrize("case", CASES, ids=str)
def test_generated_files_are_up_to_date(case: Case) -> None:
    there = GENERATED / str(case)
    for name, text in files(case).items():
        path = there / name
        before = path.read_text() if path.exists() else ""
        diff = difflib.unified_diff(before.splitlines(), text.splitlines(), f"generated/{case}/{name}", "now", lineterm="", n=1)
        shown = "\n".join(list(diff)[:40])
        assert before == text, f"{name} differs; when the change is meant, run: {COMMAND}\n{shown}"


def test_nothing_else_lies_there() -> None:
    found = {path.relative_to(GENERATED).as_posix() for path in GENERATED.rglob("*") if path.is_file()}
    assert found == {f"{case}/{name}" for case in CASES for name in ("kernel.cu", "plan.txt", "manifest.json")}


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_compiling_twice_gives_the_same(case: Case) -> None:
    assert files(case) == files(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_manifest_speaks_of_the_same_kernel(case: Case) -> None:
    """Sites in the manifest are those that kernel.cu names by number, and each belongs to a phase of its timeline."""
    found = files(case)
    manifest = json.loads(found["manifest.json"])
    assert [site["id"] for site in manifest["sites"]] == list(range(len(manifest["sites"])))
    assert sorted(site for phase in manifest["trace"]["phases"] for site in phase["sites"]) == list(range(len(manifest["sites"])))
    words = sum(len(line.split(" = ")[1].split(", ")) for line in found["plan.txt"].split("== shape\n")[1].splitlines() if line)
    assert len(manifest["shape"]) == words
