"""``megadsl compile``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from megadsl.cli.options import Arch, Blocks, Config, Formats, KvPage, KvPages, MaxKv, Model, Schedule, Sequences, Tokens
from megadsl.machine import DEFAULT_ARCH, machine

EXAMPLE = "Example: megadsl compile smollm2-135m --tokens 4 --out build/smollm2"


def command(
    model: Model,
    out: Annotated[Path, typer.Option("--out", file_okay=False, metavar="DIR", help="The folder to write to.")],
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
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Prove the plan's synchronisation first; the manifest says whether.")
    ] = True,
) -> None:
    """Compile MODEL to one kernel.

    Leaves kernel.cu, kernel.cubin, plan.txt, report.txt and manifest.json in DIR, or on an error nothing.
    """
    from megadsl.driver import compile_model, write_artifacts

    size = {"tokens": tokens, "max_kv": max_kv, "sequences": sequences, "kv_page": kv_page, "kv_pages": kv_pages}
    shared: dict[str, Any] = {"config": config, "arch": arch, "formats": formats, **size}
    compiled = compile_model(model, **shared, blocks=blocks, schedule=schedule, check=check)
    write_artifacts(compiled, out)
    typer.echo((out / "report.txt").read_text(), nl=False)
    typer.echo(f"kernels for {arch}: {machine(arch).proof}")
    typer.echo(f"written to {out}")
