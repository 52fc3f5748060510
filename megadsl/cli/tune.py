"""``megadsl tune``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megadsl.cli.options import (
    Arch,
    Blocks,
    Config,
    Device,
    Formats,
    MaxKv,
    Model,
    On,
    Schedule,
    Sequences,
    Tokens,
    blocks_on,
    numbers,
    resolve,
)
from megadsl.machine import DEFAULT_ARCH

if TYPE_CHECKING:
    from megadsl.tune.search import Result, State

EXAMPLE = "Example: megadsl tune llama-3.2-1b --kv 512,2000 --budget 300 --out build/tuned --log build/tune.jsonl"
INTERRUPTED = 130
KEPT_CORES = 2  # for the processes that search and measure


class Effort(StrEnum):
    """How hard to look."""

    QUICK = "quick"
    FULL = "full"


def command(
    model: Model,
    tokens: Tokens = 1,
    kv: Annotated[
        str, typer.Option("--kv", metavar="ROWS,...", help="Cached rows of each sequence in the steps that are timed; all count alike.")
    ] = "512",
    budget: Annotated[float, typer.Option("--budget", min=0, metavar="S", help="Seconds after which no candidate is begun.")] = 600,
    effort: Annotated[
        Effort, typer.Option("--effort", help="quick: what lost by more than 1% is not tried again. full: everything, and more pairs.")
    ] = Effort.QUICK,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Of the order of measurements and of restarts.")] = 0,
    schedule: Schedule = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the best schedule.")] = None,
    log: Annotated[
        Path | None, typer.Option("--log", metavar="FILE", help="Every candidate as a line of JSON. Goes on with one that is there.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, metavar="N", help="Processes that build kernels. Default: all cores but two.")
    ] = None,
    device: On = Device.AUTO,
    config: Config = None,
    arch: Arch = DEFAULT_ARCH,
    max_kv: MaxKv = None,
    sequences: Sequences = 1,
    blocks: Blocks = None,
    formats: Formats = None,
) -> None:
    """Find the schedule with which a step of MODEL is fastest on this GPU.

    Tries every knob of the schedule, the likeliest first, and measures each candidate in pairs with the best so far, on the same random
    weights. It is taken only if it is faster for certain (Wilcoxon's bound on the median gain of the pairs, 99.99% a decision) and
    computes the same bits, or as well as torch where the knob changes rounding. Ctrl-C ends the search and keeps the best. In the
    emulator times say nothing about a GPU.
    """
    from megadsl.driver import DEFAULT_MAX_KV
    from megadsl.runtime.bench import each_has, forced_rows
    from megadsl.tune.log import Log
    from megadsl.tune.result import about, tuned, write_result
    from megadsl.tune.search import EFFORTS, Search, Settings
    from megadsl.tune.stand import Stand
    from megadsl.tune.subject import Subject

    lengths, own = numbers("--kv", kv, least=0), each_has(tokens, sequences)
    chosen, count = resolve(device, arch), processes or max(1, (os.cpu_count() or 1) - KEPT_CORES)
    room = max(DEFAULT_MAX_KV, max(lengths) + forced_rows(own)) if max_kv is None else max_kv
    subject = Subject.of(model, config, tokens, room, blocks_on(chosen, blocks), arch, chosen.value, schedule, sequences, formats)
    stand = Stand(subject, lengths, count)
    try:
        known = {**about(subject, lengths), "seed": seed, "effort": effort.value, **stand.describe()}
        journal = Log(log, known)
        settings = Settings(EFFORTS[effort.value], budget, seed, round_size=min(32, max(4, 2 * count)))
        with _progress(budget) as report:
            result = Search(stand, journal, settings, time.monotonic, report).run()
    finally:
        stand.close()
    if out is not None:
        write_result(out, tuned(subject, lengths, result, known))
    typer.echo("\n".join([*_lines(result), *([f"written to {out}"] if out is not None else [])]))
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)


@contextmanager
def _progress(budget: float) -> Iterator[Callable[[State], None]]:
    """A bar of the time that is spent, with the best so far; what is taken is printed above it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("building the schedule to start from", total=budget, left="")
        taken = 0

        def report(state: State) -> None:
            nonlocal taken
            for step in state.steps[taken:]:
                bar.console.print(f"{step.gain}: {step.text}", highlight=False, soft_wrap=True)
            taken = len(state.steps)
            tried = f"{state.trials} tried, {taken} taken, now {state.ms_text}"
            bar.update(task, description=tried, completed=budget - state.left_s, left=f"{state.left_s:.0f} s left")

        yield report


def _lines(result: Result) -> Iterator[str]:
    for step in result.steps:
        yield f"{step.gain}: {step.text}"
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result.outcomes.items(), key=lambda item: -item[1]))
    yield f"{result.trials} candidates: {outcomes or 'none'}" + ("; interrupted" if result.interrupted else "")
    yield f"gains from {result.floor:.2%} on were taken: the same kernel, loaded again, differs by up to that"
    if result.times is None or result.total is None:
        yield "the schedule to start from is the best that was found" if not result.steps else "the last comparison was not made"
        return
    for base, best in result.medians:
        yield f"{base:.4f} ms to start from, {best:.4f} ms now"
    yield f"together {result.total}"
