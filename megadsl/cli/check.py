"""``megadsl check``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megadsl.cli.options import Arch, Blocks, Config, Formats, KvPage, KvPages, MaxKv, Model, Schedule, Sequences, Tokens
from megadsl.machine import DEFAULT_ARCH

if TYPE_CHECKING:
    from megadsl.check.report import Report

EXAMPLE = "Example: megadsl check llama-tiny --tokens 4 --seeds 10"
EMULATED_BLOCKS = 5
MORE_BLOCKS = 3  # in the grid where mutants that nobody has noticed are tried again: rings are then deeper than an op's share


def command(
    model: Model,
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
    seeds: Annotated[
        int, typer.Option("--seeds", min=0, metavar="N", help="Also emulate N schedules under the race detector; for tiny models.")
    ] = 0,
    processes: Annotated[int, typer.Option("--processes", min=1, metavar="P", help="Processes that share the schedules.")] = 1,
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Also break the plan, and with --seeds the kernel, in every way that the checks must notice.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings, seconds, proved, seeds, schedules, mutants as JSON.")] = False,
) -> None:
    """Prove that the kernel of MODEL synchronises rightly, without a GPU and without compiling it.

    With --seeds it is also emulated, on 5 blocks unless --blocks says otherwise: each seed is another order of events, some of them
    adversarial, and is repeated exactly by running it again; logits are compared with torch. With --mutants each wait, arrival, barrier,
    fence, store, count, slot and share is spoilt, one at a time: the checker must refuse the plan, or a schedule show a race, a deadlock
    or a wrong result. Exits with 1 when anything does not hold, or a mutant goes unnoticed and nobody has said why it may.
    """
    from dataclasses import asdict

    from megadsl.check.checker import check_plan
    from megadsl.cli.score import Score
    from megadsl.driver import compile_model
    from megadsl.machine import machine

    size = {"tokens": tokens, "max_kv": max_kv, "sequences": sequences, "kv_page": kv_page, "kv_pages": kv_pages}
    shared: dict[str, Any] = {"config": config, "arch": arch, "schedule": schedule, "formats": formats, **size, "check": False}
    compiled = compile_model(model, **shared, blocks=blocks)
    report = check_plan(compiled.plan, machine(arch))
    schedules: list[dict[str, object]] = []
    judged = Score()
    if mutants and not report.findings:
        judged.add_plan(compiled.plan, machine(arch), quiet=as_json)
    if seeds and not report.findings:
        few = compile_model(model, **shared, blocks=blocks or EMULATED_BLOCKS)
        schedules = _explored(few.manifest, few.source, seeds, processes, quiet=as_json) or _against_torch(few)
        if mutants and not schedules:
            more = compile_model(model, **shared, blocks=few.schedule.blocks + MORE_BLOCKS)
            judged.add_kernel(few, more, range(1, seeds + 1), processes, quiet=as_json)
    counts = {"mutants": judged.counts()} if mutants else {}
    if as_json:
        findings = [{**asdict(found), "span": str(found.span)} for found in report.findings]
        proof = {"findings": findings, "seconds": round(report.seconds, 3), "proved": list(report.proved)}
        typer.echo(json.dumps({**proof, "seeds": seeds, "schedules": schedules, **counts}))
    else:
        typer.echo("\n".join([*_lines(report, seeds, schedules), *(judged.lines() if mutants else ())]))
    if report.findings or schedules or judged.survivors:
        raise typer.Exit(1)


def _against_torch(few: Any) -> list[dict[str, object]]:
    """Whether the logits, the same in all schedules, are what the graph means; as a finding of the round robin."""
    from megadsl.runtime.meant import wrong_logits

    wrong = wrong_logits(few.graph, few.manifest, few.source)
    return [{"seed": 0, "policy": "even", "kind": "WrongResult", "text": wrong}] if wrong else []


def _lines(report: Report, seeds: int, schedules: list[dict[str, object]]) -> Iterator[str]:
    """What was found and proved, for people."""
    yield from map(str, (*report.findings, *report.proved))
    yield f"{len(report.findings)} findings in {report.seconds:.2f} s"
    for found in schedules:
        yield f"seed {found['seed']} ({found['policy']}): {found['kind']}\n{found['text']}"
    if seeds and not report.findings:
        yield f"{len(schedules)} findings in {seeds} emulated schedules"


def _explored(manifest: dict[str, Any], source: str, seeds: int, processes: int, *, quiet: bool) -> list[dict[str, object]]:
    """What the emulated schedules showed, by seed."""
    from rich.console import Console
    from rich.progress import Progress

    from megadsl.emulate.explore import explore
    from megadsl.runtime.explore import Subject

    with Progress(console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task("schedules", total=seeds)
        result = explore(Subject(manifest, source), range(seeds), processes, lambda done: bar.update(task, completed=done))
    return [{"seed": f.seed, "policy": f.policy.name.lower(), "kind": f.kind, "text": f.text} for f in result.findings]
