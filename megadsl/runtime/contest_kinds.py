"""What a contest is given and what it says of it. Brings no torch: it travels between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REFUSED, HUNG, CRASHED, WRONG = "refused", "hung", "crashed", "wrong"

Rows = tuple[tuple[float, ...], ...]
"""Milliseconds: for each number of cached rows, one per pair."""


@dataclass(frozen=True)
class Kernel:
    """One built kernel. ``key`` is equal for equal ones; ``manifest`` and ``source`` are the compiler's; no ``cubin``: the emulator's."""

    key: str
    manifest: Mapping[str, Any]
    source: str
    cubin: Path | None = None


class Unfit(Exception):
    """A kernel that this GPU refuses, that hangs, or whose results are wrong: ``outcome`` is REFUSED, HUNG or WRONG."""

    def __init__(self, outcome: str, text: str, code: str = "") -> None:
        super().__init__(outcome, text, code)
        self.outcome, self.text, self.code = outcome, text, code
