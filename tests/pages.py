"""README.md and the pages of docs/ as the tests of the documentation read them: blocks of code, commands, links."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("megadsl", "make", "python")
REASONS = ("on a GPU", "takes ", "sets up ")  # how a remark begins that says why a test does not run the command

_COMMONMARK = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Block:
    """A block of code: ``line`` of its page is the first one of ``text``. ``language`` is "" where it is indented."""

    page: Path
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command line; ``remark`` is the comment behind it."""

    words: tuple[str, ...]
    remark: str

    @property
    def excused(self) -> bool:
        return self.remark.startswith(REASONS)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def parsed(page: Path) -> list[Token]:
    return _COMMONMARK.parse(page.read_text())


def blocks(page: Path) -> list[Block]:
    found = []
    for token in parsed(page):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            language, _, rest = token.info.partition(" ")
            words = dict(word.split("=", 1) for word in shlex.split(rest))
            found.append(Block(page, token.map[0] + (2 if token.type == "fence" else 1), language, words.get("title", ""), token.content))
    return found


def commands(text: str) -> Iterator[Command]:
    """The commands of a block, one a line."""
    for line in text.splitlines():
        words = tuple(shlex.split(line, comments=True))
        if words:
            yield Command(words, line.partition(" #")[2].strip())


def inline(page: Path) -> Iterator[Token]:
    """Code in the text, and links: what stands inside of paragraphs, cells and headings."""
    for token in parsed(page):
        yield from token.children or ()
