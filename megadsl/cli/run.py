"""``megadsl run``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from megadsl.cli.options import Arch, Blocks, Config, Device, MaxKv, Model, On, Schedule, Tokens, blocks_on, resolve
from megadsl.machine import DEFAULT_ARCH

EXAMPLE = 'Example: megadsl run smollm2-135m --prompt "Once upon" --max-new-tokens 8'


def command(
    model: Model,
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="The text to continue.")],
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
    as_json: Annotated[bool, typer.Option("--json", help="Print prompt_ids, ids, text and ms_per_token as one JSON object.")] = False,
    config: Config = None,
    arch: Arch = DEFAULT_ARCH,
    tokens: Tokens = 1,
    max_kv: MaxKv = None,
    blocks: Blocks = None,
    schedule: Schedule = None,
) -> None:
    """Continue a prompt greedily, with one kernel launch for several tokens."""
    from megadsl.driver import compile_model
    from megadsl.dsl.checkpoints import is_checkpoint
    from megadsl.runtime.generate import Generator

    chosen = resolve(device, arch)
    own = blocks_on(chosen, blocks)
    compiled = compile_model(model, config=config, arch=arch, tokens=tokens, max_kv=max_kv, blocks=own, schedule=schedule)
    if weights is None and is_checkpoint(model):
        weights = Path(model)
    result = Generator(compiled, weights, chosen.value, steps_per_launch=steps_per_launch).generate(prompt, max_new_tokens)
    if as_json:
        fields = {"prompt_ids": result.prompt_ids, "ids": result.ids, "text": result.text, "ms_per_token": result.ms_per_token}
        typer.echo(json.dumps(fields))
        return
    typer.echo(prompt + result.text)
    where = "on the GPU" if chosen is Device.CUDA else "in the emulator"
    typer.echo(f"{len(result.ids)} tokens {where}, {result.ms_per_token:.3g} ms per token", err=True)
