"""Where the files that are not Python lie: templates, models and the pages about diagnostics.

A wheel carries them inside the package; an editable install and a checkout have them beside it.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _folder(name: str, beside: str = "") -> Path:
    packaged = _PACKAGE / f"_{name}"
    return packaged if packaged.is_dir() else _PACKAGE.parent / beside / name


def templates() -> Path:
    """The folder with ``kernel.cu.j2``, ``roles/``, ``ops/``, ``sync/``, ``include/`` and ``host/``."""
    return _folder("templates")


def include() -> Path:
    """The folder to give a compiler as ``-I``: ``#include "megadsl/ptx.h"`` resolves in it."""
    return templates() / "include"


def models() -> Path:
    """The folder with the specs of the registered models."""
    return _folder("models")


def diagnostics() -> Path:
    """The folder with one page per diagnostic, ``MK113.md``, and their list, ``README.md``."""
    return _folder("diagnostics", beside="docs")
