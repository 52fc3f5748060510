"""The mutation scores of docs/verification.md.

    python -m tools.mutation_score --out docs/measurements/mutants.json [--seeds 10] [--processes 2] [MODEL[/SYNC] ...]

SYNC puts one kind of exchange on every edge: tagged, sentinel or flag; without it the model's own schedule stands. Tiny models are
judged twice, as a plan by the checker and as a kernel in the emulator; others as plans. Rows are added to OUT as they are done.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from megadsl.cli.check import EMULATED_BLOCKS
from megadsl.cli.score import Score
from megadsl.driver import Compiled, compile_model
from megadsl.dsl.registry import load
from megadsl.machine import DEFAULT_ARCH, machine
from tools.syncs import synced

CASES = (
    *("smollm2-135m", "llama-3.2-1b", "llama-tiny", "llama-tiny-odd", "llama-tiny-wide", "llama-tiny-interleaved"),
    *("llama-tiny/sentinel", "llama-tiny/flag"),
)
TOKENS = {"llama-tiny": 2, "llama-tiny-odd": 1, "llama-tiny-wide": 1, "llama-tiny-interleaved": 1}
MAX_KV = 64


def compiled(model: str, sync: str, blocks: int | None) -> Compiled:
    """The model under one kind of sync ("" for its own schedule), proved."""
    kernel, config = synced(model, sync) if sync else load(model)
    return compile_model(kernel, config=config, tokens=TOKENS.get(model, 1), blocks=blocks, max_kv=MAX_KV if model in TOKENS else None)


def judged(case: str, seeds: int, processes: int) -> dict[str, Any]:
    """One row."""
    model, _, sync = case.partition("/")
    score, began = Score(), time.perf_counter()
    whole = compiled(model, sync, None)
    score.add_plan(whole.plan, machine(DEFAULT_ARCH), quiet=False)
    row: dict[str, Any] = {"case": case, "tokens": TOKENS.get(model, 1), "blocks": whole.schedule.blocks}
    if model in TOKENS:
        score.add_kernel(compiled(model, sync, EMULATED_BLOCKS), range(1, seeds + 1), processes, quiet=False)
        row |= {"emulated_blocks": EMULATED_BLOCKS, "seeds": seeds}
    return {**row, **score.counts(), "seconds": round(time.perf_counter() - began)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for case in args.cases:
        rows: list[dict[str, Any]] = json.loads(args.out.read_text()) if args.out.exists() else []
        row = judged(case, args.seeds, args.processes)
        args.out.write_text(json.dumps([*(r for r in rows if r["case"] != case), row], indent=1) + "\n")
        print({key: value for key, value in row.items() if key != "arguments"}, flush=True)


if __name__ == "__main__":
    main()
