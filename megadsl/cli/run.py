"""``megadsl run``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from megadsl.cli.options import (
    Arch,
    Blocks,
    Config,
    Device,
    Formats,
    KvPage,
    KvPages,
    MaxKv,
    Model,
    On,
    Schedule,
    Tokens,
    blocks_on,
    resolve,
)
from megadsl.machine import DEFAULT_ARCH

EXAMPLE = 'Example: megadsl run smollm2-135m --prompt "Once upon" --max-new-tokens 8'


def command(
    model: Model,
    prompt: Annotated[
        list[str],
        typer.Option("--prompt", metavar="TEXT", help="The text to continue. Several, and they are decoded together, as a batch."),
    ],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, metavar="N", help="How many tokens to write.")] = 32,
    weights: Annotated[
        Path | None,
        typer.Option(
            "--weights",
            exists=True,
            metavar="PATH",
            help="A GGUF file, or a Hugging Face directory. Default: MODEL where it is one; the demo's for smollm2-135m.",
        ),
    ] = None,
    device: On = Device.AUTO,
    steps_per_launch: Annotated[
        int | None, typer.Option("--steps-per-launch", min=1, metavar="N", help="Tokens that a launch decodes, at most 32. Default: 8.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print prompt_ids, ids, text and ms_per_token as JSON: of several prompts a list.")
    ] = False,
    config: Config = None,
    arch: Arch = DEFAULT_ARCH,
    tokens: Tokens = 1,
    max_kv: MaxKv = None,
    kv_page: KvPage = 0,
    kv_pages: KvPages = 0,
    blocks: Blocks = None,
    schedule: Schedule = None,
    formats: Formats = None,
) -> None:
    """Continue a prompt greedily, with one kernel launch for several tokens; of several prompts, up to 8 together in each launch."""
    from megadsl.driver import compile_model
    from megadsl.dsl.checkpoints import is_checkpoint
    from megadsl.runtime.batch import BatchGenerator
    from megadsl.runtime.control import MOST_SEQUENCES
    from megadsl.runtime.generate import Generator

    chosen, sequences = resolve(device, arch), min(len(prompt), MOST_SEQUENCES)
    size = {"tokens": max(tokens, sequences), "max_kv": max_kv, "sequences": sequences, "kv_page": kv_page, "kv_pages": kv_pages}
    shared: dict[str, Any] = {"config": config, "arch": arch, "formats": formats, **size}
    compiled = compile_model(model, **shared, blocks=blocks_on(chosen, blocks), schedule=schedule)
    if weights is None and is_checkpoint(model):
        weights = Path(model)
    options: dict[str, Any] = {"steps_per_launch": steps_per_launch}
    if sequences == 1:
        results = [Generator(compiled, weights, chosen.value, **options).generate(prompt[0], max_new_tokens)]
    else:
        results = BatchGenerator(compiled, weights, chosen.value, **options).generate(prompt, max_new_tokens)
    if as_json:
        found = [{"prompt_ids": r.prompt_ids, "ids": r.ids, "text": r.text, "ms_per_token": r.ms_per_token} for r in results]
        typer.echo(json.dumps(found[0] if len(found) == 1 else found))
        return
    where = "on the GPU" if chosen is Device.CUDA else "in the emulator"
    for begun, result in zip(prompt, results, strict=True):
        typer.echo(begun + result.text)
        typer.echo(f"{len(result.ids)} tokens {where}, {result.ms_per_token:.3g} ms per token", err=True)
