"""Arguments that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand

from megadsl.machine import DEFAULT_ARCH

EMULATED_BLOCKS = 2  # more blocks only make the emulator slower


class Device(StrEnum):
    """Where the kernel runs: on the GPU, or in the emulator."""

    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"


class Command(TyperCommand):
    """A command that reports everything wrong with its options and arguments at once."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # the base's name is private
        try:
            return super().parse_args(ctx, [*args])
        except typer.BadParameter as first:
            wrong = [first.format_message()]
        options, _, _ = self.make_parser(ctx).parse_args(args=[*args])
        for parameter in self.get_params(ctx):
            try:
                parameter.handle_parse_result(ctx, options, [])
            except typer.BadParameter as found:
                wrong.append(found.format_message())
        ctx.fail("\n".join(dict.fromkeys(wrong)))


Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A registered model, a Hugging Face directory, or FILE.py[:FUNCTION] together with --config.")
]
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
Sequences = Annotated[
    int,
    typer.Option("--sequences", min=1, metavar="N", help="Independent sequences, at most 8, whose new tokens one launch takes: a batch."),
]
Formats = Annotated[
    str | None,
    typer.Option(
        "--formats",
        metavar="FORMAT,OP=FORMAT,...",
        help="What weights are in memory: fp8, int8, nvfp4, mxfp4, int4 or bf16; in all layers, or of one linear.",
    ),
]
KvPage = Annotated[
    int,
    typer.Option(
        "--kv-page", min=0, metavar="N", help="Rows of a page of the KV cache: 16, 32 or 64. Default: none, a sequence's rows lie together."
    ),
]
KvPages = Annotated[
    int,
    typer.Option("--kv-pages", min=0, metavar="N", help="Pages that all sequences share. Default: enough for --max-kv rows of each."),
]
Blocks = Annotated[
    int | None,
    typer.Option("--blocks", min=1, metavar="N", help="Thread blocks of the launch. Default: up to one per SM, or a few in the emulator."),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar="FILE",
        help="A schedule file in place of the stored one or the spec's own; or default, model (the spec's own) or none.",
    ),
]
On = Annotated[Device, typer.Option("--device", help="auto is cuda where there is a GPU for it, else cpu: the emulator.")]


def resolve(device: Device, arch: str = DEFAULT_ARCH) -> Device:
    """CUDA or CPU, whichever ``device`` means on this machine for kernels of ``arch``."""
    from megadsl.build.gpus import gpus

    if device is not Device.AUTO:
        return device
    return Device.CUDA if any(gpu.runs(arch) for gpu in gpus()) else Device.CPU


def blocks_on(device: Device, blocks: int | None) -> int | None:
    """The ``blocks`` that were asked for; in the emulator, few where none were."""
    return EMULATED_BLOCKS if device is Device.CPU and blocks is None else blocks


def numbers(option: str, text: str, least: int) -> list[int]:
    """The integers of a comma-separated list, each at least ``least``."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise typer.BadParameter(f"{text!r} is no list like 1,5,16 of numbers from {least} up", param_hint=option)
    return found
