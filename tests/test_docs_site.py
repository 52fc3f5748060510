"""The site of docs/ builds without a warning and without the network, has every page, and no link of the repository leads nowhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import megadsl
import megadsl.torch
from tests.pages import ROOT, inline, name_of, parsed

CONFIG = ROOT / "docs" / "site" / "mkdocs.yml"
PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_the_site(tmp_path: Path) -> None:
    """One test, so that one worker builds it once."""
    build(tmp_path)
    navigation_has_every_page((tmp_path / "index.html").read_text())
    for page in PAGES:
        text = (tmp_path / ("" if page.stem == "index" else page.stem) / "index.html").read_text()
        assert re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(?:https?:)?//[^"]*"', text) == [], "readers would fetch it"
        if page.stem != "api":  # the rest of it is docstrings
            reads_as_markdown(page, text)


def build(out: Path) -> None:
    """A warning ends it with 1."""
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(CONFIG), "--site-dir", str(out)]
    done = subprocess.run(command, env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not re.search("warning|error", done.stderr, re.IGNORECASE), done.stderr


def navigation_has_every_page(text: str) -> None:
    (navigation,) = re.findall(r'<nav class="md-nav md-nav--primary.*?</nav>\s*</div>', text, re.DOTALL)
    places = {place.strip("./") for place in re.findall(r'href="([^"#]*)"', navigation)}
    assert {page.stem for page in PAGES} - {"index"} <= places and "diagnostics" in places


def reads_as_markdown(page: Path, text: str) -> None:
    """mkdocs knows an older Markdown than the places where code is read: both find the same lists, tables and blocks of code."""
    tags = {"list_item_open": "li", "table_open": "table", "fence": "pre", "heading_open": "h[1-6]", "image": "img"}
    tokens = Counter(token.type for token in (*parsed(page), *inline(page)))
    (article,) = re.findall(r"<article.*?</article>", text, re.DOTALL)
    found = {tag: len(re.findall(rf"<{tag}[ >]", article)) for tag in tags.values()}
    assert found == {tag: tokens[of] for of, tag in tags.items()}, page.name


def test_the_reference_has_all_public_names() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    names = [f"{module.__name__}.{name}" for module in (megadsl, megadsl.torch) for name in module.__all__]
    assert [name for name in names if f"\n::: {name}\n" not in text] == []


def links(page: Path) -> Iterator[str]:
    for token in inline(page):
        target = token.attrGet("href" if token.type == "link_open" else "src")
        if isinstance(target, str):
            yield target


def broken(page: Path) -> list[str]:
    """Its links to files that are not there. That links within docs/ name a heading that exists is mkdocs's to say."""
    return [link for link in links(page) if not re.match(r"\w+:|#", link) and not (page.parent / link.partition("#")[0]).exists()]


def test_links_lead_somewhere() -> None:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    pages = [ROOT / name for name in names if (ROOT / name).is_file()]
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/diagnostics/MK113.md"} <= {name_of(page) for page in pages}
    assert {name_of(page): found for page in pages if (found := broken(page))} == {}


def test_the_link_test_can_fail(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[a](page.md) [b](other.md#c) ![d](e.svg) `[f](g.md)` [h](https://example.org/i) [j](#k)\n")
    assert broken(page) == ["other.md#c", "e.svg"]
