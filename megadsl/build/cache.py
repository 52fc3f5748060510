"""The on-disk cache of everything that is slow to make: cubins, host libraries, packed weights.

An entry is named by a digest of all that went into it, so it is never out of date and never rewritten. It appears in
one rename: a reader sees all of it or nothing, and a builder that dies leaves only a temporary that the next one removes.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from megadsl.diagnostics import declare, warn
from megadsl.entries import cache_root, digest

CACHE_UNWRITABLE = declare(
    "MK303",
    "the cache {root} cannot be written ({reason}); results of this process go to a temporary folder and are lost after it",
    "make the folder writable, or set MEGADSL_CACHE_DIR to one that is",
)

_HEADER_SUFFIXES = frozenset({".h", ".hpp", ".cuh", ".inc", ".cpp", ".S"})  # all that an #include may bring in


def headers_digest(include_dirs: Iterable[Path]) -> str:
    """A digest of the name and content of every header under the folders; where the folders lie does not matter."""
    parts: list[str | bytes] = []
    for folder in include_dirs:
        for path in sorted(folder.rglob("*")):
            if path.suffix in _HEADER_SUFFIXES and path.is_file():
                parts += [path.relative_to(folder).as_posix(), path.read_bytes()]
        parts.append("end of folder")
    return digest(parts)


def cached(key_parts: Sequence[str | bytes], suffix: str, build: Callable[[Path], None]) -> Path:
    """The cache entry for ``key_parts``, built when there is none.

    ``key_parts`` must hold everything that the result depends on: tool versions, flags, sources. ``suffix`` ends the
    entry's name (".cubin"). ``build(path)`` makes a file or a folder at ``path``; what it raises passes through and leaves
    nothing. Among processes that want the same entry at once, one builds and the others wait for it. Warns MK303 when the
    cache cannot be written.
    """
    name = digest([*key_parts, suffix]) + suffix
    entry = cache_root() / name
    if entry.exists():
        return entry
    root = _writable(cache_root())
    entry = root / name
    with _only_one(root / "locks" / name) as alone:
        if not entry.exists():
            _build_entry(entry, build, sweep=alone)
    return entry


def _build_entry(entry: Path, build: Callable[[Path], None], sweep: bool) -> None:
    """Build in a temporary folder beside the entry, then rename. With ``sweep``, remove what dead builders left of it."""
    if sweep:
        for left in entry.parent.glob(f".{entry.name}.*"):
            shutil.rmtree(left, ignore_errors=True)
    workplace = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    try:
        build(workplace / entry.name)
        try:
            os.replace(workplace / entry.name, entry)
        except OSError:
            # Where locks do not work two builders can meet here; a folder that the other one placed is as good as ours.
            if not entry.exists():
                raise
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


@contextmanager
def _only_one(lock: Path) -> Iterator[bool]:
    """Hold an exclusive lock that dies with the process. Yields False where the file system has no locks."""
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True


def _writable(root: Path) -> Path:
    """``root``, ready to write, or this process's temporary folder where it is not."""
    try:
        (root / "locks").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root), tempfile.TemporaryFile(dir=root / "locks"):
            return root
    except OSError as reason:
        return _temporary(root, reason.strerror or str(reason))


@cache
def _temporary(root: Path, reason: str) -> Path:
    warn(CACHE_UNWRITABLE, root=root, reason=reason)
    folder = Path(tempfile.mkdtemp(prefix="megadsl-cache-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "locks").mkdir()
    return folder
