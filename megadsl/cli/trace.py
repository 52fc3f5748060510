"""``megadsl trace``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from megadsl.cli.options import Arch, Blocks, Config, Device, Formats, MaxKv, Model, On, Schedule, Sequences, Tokens, blocks_on, resolve
from megadsl.machine import DEFAULT_ARCH

EXAMPLE = "Example: megadsl trace llama-tiny --device cpu --out trace"

DEFAULT_ROWS = 512


def command(
    model: Model,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the files go.")],
    device: On = Device.AUTO,
    rows: Annotated[
        int | None,
        typer.Option("--kv", min=0, metavar="N", help="Cached rows of each sequence. Default: 512, or what the KV cache has room for."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Steps on a GPU, back to back; the last one is shown.")] = 20,
    shown: Annotated[
        int, typer.Option("--shown", min=1, metavar="N", help="Blocks in trace.json, beside the one that works longest. Tables have all.")
    ] = 8,
    layer: Annotated[
        int | None, typer.Option("--layer", min=0, metavar="N", help="The layer in layer.svg. Default: the middle one.")
    ] = None,
    config: Config = None,
    arch: Arch = DEFAULT_ARCH,
    tokens: Tokens = 1,
    max_kv: MaxKv = None,
    sequences: Sequences = 1,
    blocks: Blocks = None,
    schedule: Schedule = None,
    formats: Formats = None,
) -> None:
    """Show where every microsecond of a step of MODEL goes.

    Runs steps with random weights in a build that records what every role does and when, and writes trace.json (open it at
    https://ui.perfetto.dev), table.txt and table.json (per op: gap, wait, exposed wait, work; per layer: how busy HBM is) and layer.svg.
    docs/tracing.md says what each figure means.
    """
    from megadsl.driver import compile_model
    from megadsl.runtime.control import even
    from megadsl.runtime.tracing import record
    from megadsl.trace.table import render
    from megadsl.trace.write import write_timeline

    chosen = resolve(device, arch)
    size: dict[str, Any] = {"tokens": tokens, "max_kv": max_kv, "sequences": sequences, "blocks": blocks_on(chosen, blocks)}
    compiled = compile_model(model, config=config, arch=arch, schedule=schedule, formats=formats, **size)
    if rows is None:
        rows = max(0, min(DEFAULT_ROWS, compiled.manifest["max_kv"] - even(tokens, sequences)[0]))
    recording = record(compiled, chosen.value, tokens=tokens, rows=rows, steps=steps)
    summary = write_timeline(compiled.manifest, recording.raw, out, blocks=shown, layer=layer)
    typer.echo(render(summary))
    typer.echo(f"written to {out}: trace.json, table.txt, table.json, layer.svg")
