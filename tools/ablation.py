"""What each feature of a model's schedule is worth: the step with all of them, and with each of them off, one at a time.

    python -m tools.ablation llama-3.2-1b --kv 512 --out build/ablation.json

Everything runs in one process on the same random weights, in rounds that all take part in (tools/variants.py). A feature that the
model does not use (parts of columns, sentinels) is left out. Kernels are built side by side first; ``--build`` only builds them.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import megadsl as mk
from megadsl.build.nvcc import build_cubin
from megadsl.driver import Compiled, compile_model
from megadsl.dsl.registry import load
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.ir.graph import Linear, kept_values
from megadsl.lower.exchanges import kept_locally
from megadsl.machine import DEFAULT_ARCH, machine
from megadsl.resources import include
from tools.variants import apply_everywhere, medians

Change = Callable[[ScheduleBlock], None]
ALL = "all features"


def features(made: Compiled) -> dict[str, Change]:
    """How to turn off each feature that the schedule of ``made`` uses, by name."""
    return {name: change for name, used, change in (*_of_ops(made), *_of_the_step(made)) if used}


def _each(ops: list[str], change: Callable[[Any], object]) -> Change:
    def apply(s: ScheduleBlock) -> None:
        for op in ops:
            change(s[op])

    return apply


def _of_ops(made: Compiled) -> list[tuple[str, bool, Change]]:
    """(name, whether the schedule has it, how to turn it off)."""
    graph, schedule = made.graph, made.schedule
    linears = [op.name for op in graph.ops if isinstance(op, Linear)]
    held = [o.op for o in schedule.ops if o.prefetch.registers]
    scaled = [o.op for o in schedule.ops if o.scale == "after"]
    parts = [o.op for o in schedule.ops if o.ways > 1]
    split = [o.op for o in schedule.ops if o.splits > 1]
    values = kept_locally(graph, schedule)
    kept = [op.name for op in graph.ops if isinstance(op, Linear) and any(ref.value in values for _, ref in kept_values(op))]
    return [
        ("tiles held in registers", bool(held), _each(held, lambda op: op.prefetch(registers=0))),
        ("row scales behind the products", bool(scaled), _each(scaled, lambda op: op.scale("before"))),
        ("columns in parts", bool(parts), _each(parts, lambda op: op.columns(ways=1))),
        ("attention split over blocks", bool(split), _each(split, lambda op: op.split(kv=1))),
        ("residuals kept in the block", bool(kept), _each(kept, lambda op: op.residual("exchange"))),
        ("weights evicted first", True, _each(linears, lambda op: op.prefetch(hint="evict_normal"))),
    ]


def _of_the_step(made: Compiled) -> list[tuple[str, bool, Change]]:
    graph, schedule = made.graph, made.schedule
    ring, sms = schedule.rings[0][1], machine(schedule.arch).sms
    tagged = all(isinstance(e.sync, mk.Tagged) for e in schedule.edges)
    narrows = ring.meeting_window not in (0, ring.window)
    return [
        ("sentinels (instead: tags)", not tagged, lambda s: apply_everywhere(s, graph, "sync", "tagged")),
        ("a smaller window at meetings", narrows, lambda s: s.ring(ring.name, meeting_window=ring.window)),
        ("row groups reduced in batches", schedule.batch > 1, lambda s: s.batch(1)),
        ("fewer blocks than SMs", schedule.blocks < sms, lambda s: s.blocks(sms)),
        ("a ring as deep as fits (instead: half)", True, lambda s: s.ring(ring.name, stages=max(2, ring.stages // 2))),
        ("one launch a step (instead: one an op)", True, lambda s: s.launch("op")),
    ]


def without(model: str, tokens: int, change: Change | None) -> Compiled:
    """The model under its own schedule, and ``change`` on top of it."""
    own, config = load(model, None)
    kernel = mk.kernel(own.function)
    block = ScheduleBlock(kernel, DEFAULT_ARCH)
    with block:
        if change is not None:
            change(block)
    kernel.records[None] = own.overrides_for(DEFAULT_ARCH).records
    return compile_model(kernel, config=config, tokens=tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--kv", type=int, default=512)
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    base = without(args.model, args.tokens, None)
    made = {ALL: base, **{name: without(args.model, args.tokens, change) for name, change in features(base).items()}}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda compiled: build_cubin(compiled.source, DEFAULT_ARCH, [include()], {}), made.values()))
    if args.build:
        return
    times = medians(made, args.tokens, args.kv)
    rows = [{"feature": name, "ms": ms, "lost_ms": ms - times[ALL]} for name, ms in times.items()]
    for row in rows:
        without_it = "" if row["feature"] == ALL else f"  without it {row['lost_ms']:+.4f}"
        print(f"{row['feature']:<44} {row['ms']:.4f} ms{without_it}")
    if args.out:
        args.out.write_text(json.dumps({"model": args.model, "tokens": args.tokens, "kv": args.kv, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
