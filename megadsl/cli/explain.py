"""``megadsl explain``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from megadsl import resources
from megadsl.cli.options import Arch, Blocks, Config, Formats, KvPage, KvPages, MaxKv, Schedule, Sequences, Tokens
from megadsl.diagnostics import declare, error
from megadsl.machine import DEFAULT_ARCH

EXAMPLE = "Example: megadsl explain llama-3.2-1b --tokens 4, or: megadsl explain MK113"

CODE_UNKNOWN = declare("MK226", "no diagnostic has the code {name}", "near ones: {near}; docs/diagnostics lists them all")

_CODE = re.compile(r"MK\d+", re.IGNORECASE)
_WIDTH = 240  # columns, whatever the terminal has: a long line that wraps reads better than folded cells


def command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL|CODE", help="A registered model, or FILE.py[:FUNCTION] together with --config; or a diagnostic."),
    ] = None,
    config: Config = None,
    arch: Arch = DEFAULT_ARCH,
    tokens: Tokens = 1,
    max_kv: MaxKv = None,
    sequences: Sequences = 1,
    kv_page: KvPage = 0,
    kv_pages: KvPages = 0,
    blocks: Blocks = None,
    schedule: Schedule = None,
    formats: Formats = None,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option("--diff", metavar="A B", help="What schedule B changes against A: files, or default, model (the spec's own), none."),
    ] = None,
    knobs: Annotated[bool, typer.Option("--knobs", help="List what a schedule can decide, and what each of it changes; no MODEL.")] = False,
) -> None:
    """Show what the kernel of MODEL will do, or what the diagnostic CODE means.

    Of a model, per op and per edge: tiles, bytes, roles, placement, sync and the floor that memory bandwidth sets; with --diff what one
    schedule changes against another. Of a code such as MK113: its page of docs/diagnostics, with an example and how it is mended; options
    are ignored.
    """
    if knobs:
        from megadsl.dsl.knobs import table

        _print_table(*table())
        return
    if model is None:
        raise typer.BadParameter("Missing argument 'MODEL|CODE'.")
    if _CODE.fullmatch(model):
        typer.echo(_page(model.upper()), nl=False)
        return
    from megadsl.driver import compile_model
    from megadsl.lower.explain import rows

    size = {"tokens": tokens, "max_kv": max_kv, "sequences": sequences, "kv_page": kv_page, "kv_pages": kv_pages, "blocks": blocks}
    shared: dict[str, Any] = {"config": config, "arch": arch, "formats": formats, **size}
    if diff is not None:
        from megadsl.lower.difference import difference

        a, b = (compile_model(model, **shared, check=False, schedule=side) for side in diff)
        typer.echo(f"A: {diff[0]}\nB: {diff[1]}")
        for columns, lines in difference(a, b):
            _print_table(columns, lines)
        return
    compiled = compile_model(model, **shared, schedule=schedule)
    for columns, lines in rows(compiled):
        _print_table(columns, lines)


def _page(code: str) -> str:
    """The page of a diagnostic, Markdown; MK226 when there is none."""
    pages = {path.stem: path for path in resources.diagnostics().glob("MK*.md")}
    if code not in pages:
        near = get_close_matches(code, sorted(pages), n=3, cutoff=0)
        raise error(CODE_UNKNOWN, name=code, near=", ".join(near))
    return pages[code].read_text(encoding="utf-8")


def _print_table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        numeric = all(line[index][:1].isdigit() for line in lines if line[index])
        table.add_column(column, justify="right" if numeric and lines else "left", no_wrap=True)
    for line in lines:
        table.add_row(*map(Text, line))
    Console(width=_WIDTH).print(table)
