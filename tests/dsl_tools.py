"""What the tests of the DSL and of fusion share."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import megadsl as mk
from megadsl.diagnostics import Diagnostic, MegadslError
from megadsl.ir.graph import Graph
from megadsl.lower.fuse import fuse
from megadsl.lower.infer import infer

HIDDEN = 128
HEADERS = Path(__file__).parent / "specs" / "custom"  # of custom ops
CFG = SimpleNamespace(hidden=HIDDEN, layers=2, vocab=256)


def plain(function: Any) -> Any:
    """The Python function of a kernel."""
    return function.function if isinstance(function, mk.Kernel) else function


def line_of(function: Any, mark: str) -> int:
    """Number of the one line of a kernel (or function) that contains ``mark``."""
    lines, first = inspect.getsourcelines(plain(function))
    hits = [first + i for i, line in enumerate(lines) if mark in line]
    assert len(hits) == 1, f"{mark!r} stands on lines {hits}"
    return hits[0]


def findings(run: Any) -> list[Diagnostic]:
    """The diagnostics that ``run()`` raises."""
    with pytest.raises(MegadslError) as raised:
        run()
    return raised.value.diagnostics


def one(found: list[Diagnostic], code: str) -> Diagnostic:
    """The only finding of that code."""
    matching = [d for d in found if d.code == code]
    assert len(matching) == 1, f"{code}: {[str(d) for d in found]}"
    return matching[0]


def trace_finds(kernel: mk.Kernel, code: str, message: str, mend: str, mark: str = "# here", cfg: Any = CFG, **trace: Any) -> None:
    """Tracing reports ``code`` at the marked line, with these words in message and mend."""
    check(one(findings(lambda: kernel.trace(cfg, **trace)), code), kernel, mark, message, mend)


def fuse_finds(kernel: mk.Kernel, code: str, message: str, mend: str, mark: str = "# here", cfg: Any = CFG) -> None:
    """Fusion reports ``code`` at the marked line of a kernel that traces without findings."""
    spec = infer(kernel.trace(cfg))
    check(one(findings(lambda: fuse(spec)), code), kernel, mark, message, mend)


def check(found: Diagnostic, function: Any, mark: str, message: str, mend: str) -> None:
    assert message in found.message
    assert mend in found.mend
    function = plain(function)
    assert (found.span.file, found.span.line) == (inspect.getsourcefile(function), line_of(function, mark))


def graph_of(kernel: mk.Kernel, cfg: Any = CFG, tokens: int | None = None) -> Graph:
    return fuse(infer(kernel.trace(cfg, tokens)))


def head(x: mk.Tensor) -> mk.Tensor:
    """The shortest way from an activation to legal outputs."""
    return mk.argmax(mk.linear(x, mk.weight("lm_head", (CFG.vocab, x.shape[1]))))


def start(tokens: int = 1) -> mk.Tensor:
    return mk.embed(mk.weight("embed", (CFG.vocab, HIDDEN)), mk.input_ids(tokens))


def square(name: str) -> mk.Tensor:
    return mk.weight(name, (HIDDEN, HIDDEN))
