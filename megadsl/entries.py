"""Where the cache lies on the disk, how its entries are named, and the small ones among them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from megadsl.version import __version__


def cache_root() -> Path:
    """The cache folder of this version: ``$MEGADSL_CACHE_DIR`` or ``~/.cache/megadsl``, then the version. May not exist yet."""
    chosen = os.environ.get("MEGADSL_CACHE_DIR")
    base = Path(chosen) if chosen else Path.home() / ".cache" / "megadsl"
    return base / __version__


def digest(parts: Iterable[str | bytes]) -> str:
    """A hex digest (40 characters) of the parts in order. ``("ab", "c")`` and ``("a", "bc")`` differ."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()[:40]


class SmallEntries:
    """Entries of some kilobytes that are as quickly made anew: where the cache cannot be written they are not kept, without a word.

    Each begins with a seal over its name and its content: what is cut off, damaged or under another's name is no entry.
    """

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix

    def load(self, key_parts: Sequence[str | bytes]) -> bytes | None:
        """The entry for ``key_parts``, which hold all that it depends on, if there is one."""
        entry = self._entry(key_parts)
        try:
            seal, _, content = entry.read_bytes().partition(b"\n")
        except OSError:
            return None
        return content if seal == _seal(entry, content) else None

    def store(self, key_parts: Sequence[str | bytes], content: bytes) -> None:
        """Make it, in one rename."""
        entry = self._entry(key_parts)
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=entry.parent, prefix=f".{entry.name}.", delete=False) as file:
                file.write(_seal(entry, content) + b"\n" + content)
            os.replace(file.name, entry)
        except OSError:
            return

    def _entry(self, key_parts: Sequence[str | bytes]) -> Path:
        return cache_root() / (digest([*key_parts, self._suffix]) + self._suffix)


def _seal(entry: Path, content: bytes) -> bytes:
    return digest([entry.name, content]).encode()
