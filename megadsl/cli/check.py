"""``megadsl check``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from megadsl.cli.options import Arch, Blocks, Config, MaxKv, Model, Tokens
from megadsl.machine import DEFAULT_ARCH

EXAMPLE = "Example: megadsl check smollm2-135m --tokens 4"


def command(
    model: Model,
    config: Config = None,
    arch: Arch = DEFAULT_ARCH,
    tokens: Tokens = 1,
    max_kv: MaxKv = None,
    blocks: Blocks = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: findings, seconds, proved.")] = False,
) -> None:
    """Prove that the kernel of MODEL synchronises rightly, without a GPU and without compiling it.

    Exits with 1 when anything does not hold.
    """
    from dataclasses import asdict

    from megadsl.check import check_plan
    from megadsl.driver import compile_model
    from megadsl.machine import machine

    compiled = compile_model(model, config=config, arch=arch, tokens=tokens, max_kv=max_kv, blocks=blocks, check=False)
    report = check_plan(compiled.plan, machine(arch))
    if as_json:
        findings = [{**asdict(found), "span": str(found.span)} for found in report.findings]
        typer.echo(json.dumps({"findings": findings, "seconds": round(report.seconds, 3), "proved": list(report.proved)}))
    else:
        for line in (*report.findings, *report.proved):
            typer.echo(line)
        typer.echo(f"{len(report.findings)} findings in {report.seconds:.2f} s")
    if report.findings:
        raise typer.Exit(1)
