"""Step time of schedule variants of one model, side by side in one process (random weights, CUDA graph, interleaved rounds).

A variant is ``name:knob=value,...``; knobs: window, stages, splits, batch, warps, blocks, sync, l2 (KiB ahead for gate_up).

    python tools/variants.py llama-3.2-1b --kv 512 base: w48:window=49152 s8:splits=8
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import megadsl as mk
from megadsl.driver import Compiled, compile_model
from megadsl.dsl.registry import load
from megadsl.ir.graph import Attention
from megadsl.ops.cost import floor_seconds
from megadsl.machine import DEFAULT_ARCH, machine
from megadsl.runtime.generate import Generator
from megadsl.runtime.weights import TensorSource, needed, random_weights
from megadsl.types import KIB

ROUNDS, REPLAYS = 7, 30


def compile_variant(model: str, tokens: int, knobs: dict[str, str]) -> Compiled:
    """The model with the variant's overrides."""
    kernel, config = load(model, None)
    plain = compile_model(model, tokens=tokens)
    with mk.schedule(kernel, arch=DEFAULT_ARCH) as s:
        ring = {k: int(knobs[k]) for k in ("window", "stages") if k in knobs}
        if ring:
            s.ring("weights", **ring)
        if "warps" in knobs:
            s.role("consumer", warps=int(knobs["warps"]))
        if "batch" in knobs:
            s.batch(int(knobs["batch"]))
        if "blocks" in knobs:
            s.blocks(int(knobs["blocks"]))
        if "splits" in knobs:
            for op in plain.graph.ops:
                if isinstance(op, Attention):
                    s[op.name].split(kv=int(knobs["splits"]))
        if "sync" in knobs:
            kind = {"tagged": mk.Tagged(), "sentinel": mk.Sentinel(), "flag": mk.Flag()}[knobs["sync"]]
            for op in plain.graph.ops:
                if getattr(op, "out", None) is not None:
                    s[op.name].sync(kind)
        if "l2" in knobs:
            s["gate_up_proj"].prefetch(l2=int(knobs["l2"]) * KIB, ahead_of="attention")
    return compile_model(kernel, config=config, tokens=tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--kv", type=int, default=512)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runs: list[tuple[str, Any, Generator]] = []
    weights: TensorSource | None = None
    floor_ms = 0.0
    for text in args.variants:
        name, _, rest = text.partition(":")
        compiled = compile_variant(args.model, args.tokens, dict(item.split("=") for item in rest.split(",") if item))
        if weights is None:
            source = random_weights(compiled.manifest, seed=7, device="cuda")
            weights = TensorSource({n: source.load(n) for n in needed(compiled.manifest)})
            floor_ms = 1e3 * floor_seconds(compiled.graph, machine(DEFAULT_ARCH), args.kv)
        generator = Generator(compiled, weights, "cuda", progress=False)
        generator.kv_len = args.kv
        count = args.tokens
        masks = [(2 << i) - 1 for i in range(count)]
        generator.program.control.set_inputs(args.kv, list(range(1, count + 1)), list(range(args.kv, args.kv + count)), masks)
        runs.append((name, generator.program.capture(), generator))
    times: dict[str, list[float]] = {name: [] for name, _, _ in runs}
    for round_ in range(ROUNDS + 1):
        for name, step, generator in runs:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(REPLAYS):
                step.replay()
            end.record()
            generator.program.check()
            if round_:
                times[name].append(begin.elapsed_time(end) / REPLAYS)
    rows = [{"variant": text, "ms": statistics.median(times[text.partition(":")[0]])} for text in args.variants]
    for row in rows:
        print(f"{row['variant']:<40} {row['ms']:.4f} ms  {row['ms'] / floor_ms:.3f} x floor")
    if args.out:
        args.out.write_text(json.dumps({"model": args.model, "tokens": args.tokens, "kv": args.kv, "floor_ms": floor_ms, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
