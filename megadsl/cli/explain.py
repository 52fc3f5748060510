"""``megadsl explain``."""

from __future__ import annotations

from collections.abc import Sequence

from megadsl.cli.options import Arch, Blocks, Config, MaxKv, Model, Tokens
from megadsl.machine import DEFAULT_ARCH

EXAMPLE = "Example: megadsl explain llama-3.2-1b --tokens 4"

_WIDTH = 240  # columns, whatever the terminal has: a long line that wraps reads better than folded cells


def command(
    model: Model,
    config: Config = None,
    arch: Arch = DEFAULT_ARCH,
    tokens: Tokens = 1,
    max_kv: MaxKv = None,
    blocks: Blocks = None,
) -> None:
    """Show what the kernel of MODEL will do.

    Per op and per edge: tiles, bytes, roles, placement, sync and the floor that memory bandwidth sets.
    """
    from megadsl.driver import compile_model
    from megadsl.lower.explain import rows

    compiled = compile_model(model, config=config, arch=arch, tokens=tokens, max_kv=max_kv, blocks=blocks)
    for columns, lines in rows(compiled):
        _print_table(columns, lines)


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
