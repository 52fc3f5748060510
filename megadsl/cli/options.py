"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A registered model, or FILE.py[:FUNCTION] together with --config.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", exists=True, dir_okay=False, metavar="FILE", help="The model's config.json, for a MODEL that is a file."),
]
Arch = Annotated[str, typer.Option("--arch", metavar="ARCH", help="The GPU architecture to compile for.")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, metavar="N", help="The most new tokens that one launch takes.")]
MaxKv = Annotated[
    int | None,
    typer.Option("--max-kv", min=1, metavar="N", help="The longest context, in tokens, that the KV cache holds. Default: 2048."),
]
Blocks = Annotated[
    int | None,
    typer.Option("--blocks", min=1, metavar="N", help="Thread blocks of the launch. Default: up to one per SM, or a few in the emulator."),
]
