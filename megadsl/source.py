"""Where a node comes from: the user's file and line."""

from __future__ import annotations

import linecache
import os
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import CodeType

_PACKAGE = str(Path(__file__).resolve().parent) + os.sep
_MODELS = _PACKAGE + "_models" + os.sep  # specs shipped in the wheel: users' code, not the compiler's


@dataclass(frozen=True)
class Span:
    """A place in the user's source. ``line`` and ``column`` (of characters) count from 1; column 0 means the whole line."""

    file: str
    line: int
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f":{self.column}" if self.column else "")

    @property
    def text(self) -> str:
        """The source line, stripped at the right; empty when the file cannot be read."""
        return linecache.getline(self.file, self.line).rstrip()

    @property
    def short(self) -> str:
        """``file.py:12`` without the folder, stable across checkouts (used in emitted code)."""
        return f"{Path(self.file).name}:{self.line}"


UNKNOWN = Span("<unknown>", 0)


def remember(file: str, text: str) -> None:
    """Let spans of ``file`` show ``text``, whether or not it stands on a disk."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


def is_ours(file: str) -> bool:
    """Whether a source file is the compiler's own, not a user's."""
    return file.startswith(_PACKAGE) and not file.startswith(_MODELS)


def caller_span() -> Span:
    """Span of the innermost stack frame outside megadsl itself: the call that it is in."""
    frame = sys._getframe(1)
    while frame is not None and is_ours(frame.f_code.co_filename):
        if frame.f_back is None:
            return UNKNOWN
        frame = frame.f_back
    return place(frame.f_code, frame.f_lasti, frame.f_lineno)


def place(code: CodeType, instruction: int, line: int) -> Span:
    """Span of the instruction at byte offset ``instruction``, with the column where Python recorded one for ``line``."""
    begin, _, byte, _ = next(islice(code.co_positions(), instruction // 2, None), (None, None, None, None))
    if begin != line or byte is None:
        return Span(code.co_filename, line)
    before = linecache.getline(code.co_filename, line).encode()[:byte]  # Python counts bytes, people count characters
    return Span(code.co_filename, line, len(before.decode(errors="replace")) + 1 if before else byte + 1)
