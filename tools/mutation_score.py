"""The mutation scores of docs/verification.md.

    python -m tools.mutation_score --out docs/measurements/mutants.json [--seeds 4] [--processes 2] [--part plan] [MODEL[/SYNC] ...]

SYNC puts one kind of exchange on every edge: tagged, sentinel or flag; or it is paused: a pause before each op's first poll. Without it
the model's own schedule stands. All are judged as plans by the checker, tiny models as kernels in the emulator too, on 5 blocks and, what
nobody notices, on 8. OUT has a row a case, of two parts, and keeps the parts that were judged earlier; a part is added as soon as it is
done. A plan takes a minute or so, a kernel about five on one core.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import date
from pathlib import Path
from typing import Any

from megadsl.cli.check import EMULATED_BLOCKS, MORE_BLOCKS
from megadsl.cli.score import Score
from megadsl.driver import Compiled, compile_model
from megadsl.dsl.registry import load
from megadsl.ir.schedule import Sentinel
from megadsl.machine import DEFAULT_ARCH, machine
from tools.syncs import paused, synced

PAUSED = "paused"

CASES = (
    *("smollm2-135m", "llama-3.2-1b", "llama-3.1-8b", "qwen3-0.6b"),
    *("llama-tiny", "llama-tiny-odd", "llama-tiny-wide", "llama-tiny-interleaved", "llama-tiny-biased", "qwen3-tiny", "gemma-tiny"),
    *("llama-tiny/sentinel", "llama-tiny/flag", "llama-tiny-odd/sentinel", "llama-tiny-odd/paused"),
)
TOKENS = {case.partition("/")[0]: 1 for case in CASES if "-tiny" in case} | {"llama-tiny": 2}  # those that are emulated
MAX_KV = 64
SENTINEL_LAYERS = 3  # what a publication empties, for two rounds later, is then asked for within the launch


def compiled(model: str, sync: str, blocks: int | None) -> Compiled:
    """The model under one kind of sync ("" for its own schedule), proved."""
    kernel, config = paused(model) if sync == PAUSED else synced(model, sync) if sync else load(model)
    small = model in TOKENS
    made = compile_model(kernel, config=config, tokens=TOKENS.get(model, 1), blocks=blocks, max_kv=MAX_KV if small else None)
    if not small or not any(isinstance(edge.sync, Sentinel) for edge in made.schedule.edges):
        return made
    config = {**config, "num_hidden_layers": SENTINEL_LAYERS}
    return compile_model(kernel, config=config, tokens=TOKENS[model], blocks=blocks, max_kv=MAX_KV)


def plan_part(case: str) -> dict[str, Any]:
    """The checker's score, of the plan that would run on a GPU."""
    model, _, sync = case.partition("/")
    made, score = compiled(model, sync, None), Score()
    score.add_plan(made.plan, machine(DEFAULT_ARCH), quiet=True)
    return {"blocks": made.schedule.blocks, **score.counts()}


def kernel_part(case: str, seeds: int, processes: int) -> dict[str, Any]:
    """The emulated kernel's score, and what noticed each mutant."""
    model, _, sync = case.partition("/")
    score = Score()
    few, more = (compiled(model, sync, blocks) for blocks in (EMULATED_BLOCKS, EMULATED_BLOCKS + MORE_BLOCKS))
    score.add_kernel(few, more, range(1, seeds + 1), processes, quiet=True)
    return {
        "blocks": EMULATED_BLOCKS,
        "seeds": seeds,
        **score.counts(),
        "noticed": [[r.name, r.killed_by, r.blocks] for r in score.rows if r.killed_by],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--part", choices=("plan", "kernel"), help="one part alone; default: both")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for case in args.cases:
        model = case.partition("/")[0]
        for part in ("plan", "kernel"):
            if args.part not in (None, part) or (part == "kernel" and model not in TOKENS):
                continue
            began = time.perf_counter()
            found = plan_part(case) if part == "plan" else kernel_part(case, args.seeds, args.processes)
            found |= {"date": date.today().isoformat(), "seconds": round(time.perf_counter() - began)}
            rows = {row["case"]: row for row in json.loads(args.out.read_text())} if args.out.exists() else {}
            rows[case] = {"case": case, "tokens": TOKENS.get(model, 1), **rows.get(case, {}), part: found}
            args.out.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
            print(case, part, {key: value for key, value in found.items() if key not in ("arguments", "noticed")}, flush=True)


if __name__ == "__main__":
    main()
