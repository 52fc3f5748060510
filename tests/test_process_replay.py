"""tools/process_replay.py: what a change changes, shown by a change made for it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.process_replay import ROOT, differences, of_tree, report

CHANGED = {"a/1": {"plan": "x\ny\n", "source": "s"}, "b/1": {"plan": "refused: MK1"}}


def test_what_is_the_same_is_no_difference() -> None:
    assert differences(CHANGED, json.loads(json.dumps(CHANGED))) == []
    assert report([], 2) == "2 of 2 kernels are as they were"


@pytest.mark.parametrize(
    ("after", "found"),
    [
        (CHANGED | {"a/1": {"plan": "x\nz\n", "source": "s"}}, [("a/1", "plan", ["--- before", "+++ after", "@@ -2 +2 @@", "-y", "+z"])]),
        ({"a/1": CHANGED["a/1"]}, [("b/1", "plan", ["--- before", "+++ after", "@@ -1 +0,0 @@", "-refused: MK1"])]),
        (CHANGED | {"c/1": {"sass": "NOP"}}, [("c/1", "sass", ["--- before", "+++ after", "@@ -0,0 +1 @@", "+NOP"])]),
    ],
)
def test_each_kind_of_difference(after: dict[str, dict[str, str]], found: list[tuple[str, str, list[str]]]) -> None:
    assert differences(CHANGED, after) == found
    assert report(found, 3).splitlines()[0] == f"{found[0][0]}: another {found[0][1]}"
    assert report(found, 3).splitlines()[-1] == "2 of 3 kernels are as they were"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with two small models, one of whose windows differs from the project's."""
    found = tmp_path_factory.mktemp("tree")
    for folder in ("megadsl", "templates", "models"):
        shutil.copytree(ROOT / folder, found / folder, ignore=shutil.ignore_patterns("__pycache__", "gemma.py", "qwen3.py"))
    return found


def test_a_checkout_is_compiled_by_its_own_compiler(tree: Path) -> None:
    before = of_tree(tree, sass=False)
    assert set(before["llama-tiny/1"]) == {"plan", "source"} and before["smollm2-135m/16"] != before["smollm2-135m/1"]
    template = tree / "templates" / "ops" / "tape.cu.j2"
    template.write_text(template.read_text().replace("tape.loader.drain();", "tape.loader.drain();  // changed"))
    found = differences(before, of_tree(tree, sass=False))
    assert {kind for _, kind, _ in found} == {"source"} and len(found) == sum("source" in kinds for kinds in before.values())
    assert "+  tape.loader.drain();  // changed" in found[0][2]


def test_an_unknown_commit_is_said() -> None:
    command = [sys.executable, "-m", "tools.process_replay", "--base", "no-such"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no commit no-such" in done.stderr
