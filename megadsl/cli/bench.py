"""``megadsl bench``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megadsl.cli.options import (
    Arch,
    Blocks,
    Config,
    Device,
    Formats,
    KvPage,
    MaxKv,
    Model,
    On,
    Schedule,
    Sequences,
    blocks_on,
    numbers,
    resolve,
)
from megadsl.diagnostics import MegadslError
from megadsl.ir.schedule import SCOPES
from megadsl.machine import DEFAULT_ARCH
from megadsl.runtime.bench_kinds import Baseline

if TYPE_CHECKING:
    from megadsl.driver import Compiled
    from megadsl.runtime.bench import Timed

EXAMPLE = "Example: megadsl bench llama-3.2-1b --tokens 1,5 --kv 512,2000 --out build/bench.json"


def command(
    model: Model,
    tokens: Annotated[str, typer.Option("--tokens", metavar="N,...", help="New tokens of a step, each a kernel of its own.")] = "1",
    kv: Annotated[str, typer.Option("--kv", metavar="ROWS,...", help="Cached rows that a step finds.")] = "512",
    replays: Annotated[int, typer.Option("--replays", min=2, metavar="N", help="Timed runs of each contestant.")] = 200,
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Also time launches of N steps beside N launches.")] = 1,
    baseline: Annotated[
        Baseline,
        typer.Option("--baseline", help="Our kernels under other launch scopes; torch's in a CUDA graph as well; torch.compile as well."),
    ] = Baseline.COMPILE,
    baseline_budget: Annotated[
        float, typer.Option("--baseline-budget", min=0, metavar="S", help="Seconds for torch.compile, for each pair of tokens and rows.")
    ] = 120,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="DIR", help="Also write the timeline of the first pair, and say what recording costs.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the results as JSON.")] = None,
    device: On = Device.AUTO,
    config: Config = None,
    arch: Arch = DEFAULT_ARCH,
    max_kv: MaxKv = None,
    sequences: Sequences = 1,
    kv_page: KvPage = 0,
    blocks: Blocks = None,
    schedule: Schedule = None,
    formats: Formats = None,
) -> None:
    """Time a step of MODEL with random weights beside its byte floor and beside torch, and judge its logits.

    Prints per pair of tokens and cached rows: median, 10th and 90th percentile, the multiple of the floor, the error beside torch
    bf16's, and torch's times on the same inputs, in interleaved rounds. Exits with 1 when the gate fails or bits differ.
    """
    from megadsl.driver import DEFAULT_MAX_KV, compile_model
    from megadsl.runtime.bench import Row, Subject, describe, forced_rows

    counts, lengths, chosen = numbers("--tokens", tokens, least=1), numbers("--kv", kv, least=0), resolve(device, arch)
    room = max(DEFAULT_MAX_KV, max(lengths) + max(map(forced_rows, counts)) + steps) if max_kv is None else max_kv
    size = {"max_kv": room, "sequences": sequences, "kv_page": kv_page, "blocks": blocks_on(chosen, blocks), "formats": formats}
    rows, shared = list[Row](), {"config": config, "arch": arch, "schedule": schedule, **size}

    def subject_of(count: int, *, beside: bool = False, **options: Any) -> Subject:
        made = compile_model(model, **shared, tokens=count)  # type: ignore[arg-type]  # options by name
        return Subject(made, chosen.value, options, _others(model, shared, made, baseline) if beside else {}, steps if beside else 1)

    def measure(count: int) -> None:  # the subject dies here: two may not fit the GPU
        about = describe(subject := subject_of(count, beside=True))
        if not rows:
            typer.echo(f"{about['model']} for {about['arch']} on {about['device']}; {about['clock']}")
        for length in lengths:
            rows.append(subject.measure(length, replays, baseline, baseline_budget))
            typer.echo("\n".join(rows[-1].lines()))
            if out is not None:  # what is measured is not lost
                _write(out, {**about, "rows": [row.fields() for row in rows]})

    for count in counts:
        measure(count)
    if trace is not None:
        plain, recorded = subject_of(counts[0]).timed(lengths[0], replays), subject_of(counts[0], defines={"MK_TRACE": "1"})
        typer.echo(_traced(recorded.manifest, plain, recorded.timed(lengths[0], replays), trace))
    raise typer.Exit(int(not all(row.passed for row in rows)))


def _others(model: str, options: Mapping[str, Any], made: Compiled, baseline: Baseline) -> dict[str, Compiled | str]:
    """The model under every launch scope but that of the kernel ``made``, where they are to be measured."""
    scopes = [scope for scope in SCOPES if scope != made.schedule.scope and baseline is not Baseline.NONE]
    return {scope: _apart(model, {**options, "tokens": made.manifest["tokens"]}, scope) for scope in scopes}


def _apart(model: str, options: Mapping[str, Any], scope: str) -> Compiled | str:
    """The model under another launch scope, or why its schedule does not allow that."""
    from megadsl.driver import compile_model

    try:
        return compile_model(model, **options, scope=scope)
    except MegadslError as why:
        return f"it does not compile: {why.diagnostics[0].message}"


def _traced(manifest: Mapping[str, Any], plain: Timed, recorded: Timed, out: Path) -> str:
    """Write the timeline; its tables, and what it costs."""
    from megadsl.trace.table import render
    from megadsl.trace.write import write_timeline

    same = plain.logits.numpy().tobytes() == recorded.logits.numpy().tobytes()
    cost = f"{plain.ms:.4f} ms, with the timeline {recorded.ms:.4f} ms ({recorded.ms / plain.ms - 1:+.2%})"
    return f"{render(write_timeline(manifest, recorded.trace, out))}\n{cost}; logits have {'the same' if same else 'OTHER'} bits"


def _write(out: Path, results: Mapping[str, object]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
