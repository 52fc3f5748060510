"""The messages of diagnostics that no spec alone provokes, as the tests that provoke them show them: tools/shown.json.

``python -m tools.catalogue --record`` runs those tests and writes the file; whenever one of them runs, it has to show the same again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megadsl.diagnostics import Diagnostic

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tools" / "shown.json"
TEMPORARY = re.compile(r"[^\s'\"(]*/pytest-of-[^/\s]+/pytest-\d+/(popen-gw\d+/)?[^/\s'\")]+(/|\b)")


@dataclass(frozen=True)
class Shown:
    """``text``: severity, code, message and mend, as the test ``test`` (a node id) shows them."""

    test: str
    text: str


@cache
def shown() -> dict[str, Shown]:
    """What is recorded, by code."""
    return {code: Shown(**fields) for code, fields in json.loads(FILE.read_text()).items()} if FILE.exists() else {}


def text_of(found: Diagnostic) -> str:
    """A diagnostic without its place and without the folders of this machine."""
    text = f"{found.severity}[{found.code}]: {found.message}\n    mend: {found.mend}"
    return TEMPORARY.sub("", text).replace(f"{ROOT}/", "")


@contextmanager
def recording() -> Iterator[list[Diagnostic]]:
    """All diagnostics that are made meanwhile."""
    made: list[Diagnostic] = []
    original = Diagnostic.__init__

    def init(self: Diagnostic, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)  # type: ignore[arg-type]
        made.append(self)

    Diagnostic.__init__ = init  # type: ignore[method-assign]
    try:
        yield made
    finally:
        Diagnostic.__init__ = original  # type: ignore[method-assign]


def check(test: str, made: list[Diagnostic]) -> None:
    """A test that is recorded shows what is recorded."""
    texts = {text_of(found) for found in made}
    for code, wanted in shown().items():
        if wanted.test == test:
            near = "\n".join(sorted(text for text in texts if f"[{code}]" in text))
            assert wanted.text in texts, f"{test} shows {code} otherwise; when that is meant: make diagnostics\n{wanted.text}\n{near}"


def record(file: Path, test: str, made: list[Diagnostic]) -> None:
    """Add a line per diagnostic to ``file``."""
    with file.open("a") as out:
        for found in made:
            out.write(json.dumps({"code": found.code, "test": test, "text": text_of(found)}) + "\n")
