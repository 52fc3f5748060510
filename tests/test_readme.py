"""The README tells the truth: its spec and schedule compile, its excerpt stands in the committed kernel, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megadsl.driver import compile_model
from megadsl.dsl.kernel import Kernel
from tools.regenerate import COMMAND, GENERATED, excerpt, folder

CONFIG = {"hidden": 128, "inter": 192, "heads": 4, "kv_heads": 2, "layers": 2, "vocab": 512}


@pytest.fixture
def readme(repository: Path) -> str:
    return (repository / "README.md").read_text()


def blocks(readme: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)


def spec_of(readme: str, tmp_path: Path) -> tuple[Kernel, dict[str, object]]:
    """The README's spec, run from a file so that its lines can be named."""
    path = tmp_path / "spec.py"
    path.write_text(blocks(readme, "python")[0])
    names: dict[str, object] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    kernel = names["decode_step"]
    assert isinstance(kernel, Kernel)
    return kernel, names


def test_the_spec_compiles(readme: str, tmp_path: Path) -> None:
    kernel, _ = spec_of(readme, tmp_path)
    compiled = compile_model(kernel, config=CONFIG, tokens=3, blocks=2)
    assert [op.name for op in compiled.graph.ops] == ["embed", "q_k_v", "attention", "o", "gate_up", "down", "lm_head"]


def test_the_schedule_is_accepted(readme: str, tmp_path: Path) -> None:
    kernel, names = spec_of(readme, tmp_path)
    (schedule,) = [text for text in blocks(readme, "python") if "mk.schedule" in text]
    exec(schedule, names)
    schedule_of = compile_model(kernel, config=CONFIG, blocks=2).schedule
    assert schedule_of.ring("loader").stages == 12 and schedule_of.op("down").prefetch.ahead_of == "attention"
    assert type(schedule_of.edge("o").sync).__name__ == "Sentinel"


def test_the_excerpt_is_of_the_committed_kernel(readme: str) -> None:
    (shown,) = blocks(readme, "cuda")
    model = "smollm2-135m"
    assert shown == excerpt((GENERATED / folder(model) / "kernel.cu").read_text()), f"run: {COMMAND}"


def prose(page: str) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", page, flags=re.MULTILINE | re.DOTALL)


def test_links_lead_somewhere(repository: Path) -> None:
    pages = [repository / "README.md", repository / "CONTRIBUTING.md", *sorted((repository / "docs").glob("*.md"))]
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)", prose(page.read_text())):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"
