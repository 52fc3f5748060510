"""Step time of schedule variants of one model, side by side in one process (random weights, CUDA graph, interleaved rounds).

A variant is ``name:knob=value,...``; knobs: window, meeting_window, stages, stage_bytes, splits, batch, warps, blocks, sync, finish,
scale, gather, residual, regs, pause (all ops), gather_OP, residual_OP, regs_OP, hint_OP, pause_OP, publish_OP (of one op; regs: tiles
in registers, hint: cache policy, pause: ns before its input is polled), l2 (KiB ahead for gate_up), chunk_OP (tiles of a row group
between two gathers of its input), and a linear's name (parts of its columns). Or one knob, file: a schedule file, or none, model, default,
as --schedule of megadsl has them.

    python tools/variants.py llama-3.2-1b --kv 512 base: w48:window=49152 s8:splits=8
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import megadsl as mk
from megadsl.driver import Compiled, compile_model
from megadsl.dsl.registry import load
from megadsl.ir.graph import Attention, Graph, Linear, kept_values
from megadsl.machine import DEFAULT_ARCH, machine
from megadsl.ops.cost import floor_seconds
from megadsl.runtime.pack import pack_weights
from megadsl.runtime.program import Program, Replay
from megadsl.runtime.weights import TensorSource, needed, random_weights
from megadsl.types import KIB

ROUNDS, REPLAYS = 7, 30


SYNCS: dict[str, Any] = {"tagged": mk.Tagged(), "sentinel": mk.Sentinel(), "flag": mk.Flag()}


OF_ONE: dict[str, Callable[[Any, str], Any]] = {
    "gather": lambda op, value: op.gather(value),
    "hint": lambda op, value: op.prefetch(hint=value),
    "residual": lambda op, value: op.residual(value),
    "regs": lambda op, value: op.prefetch(registers=int(value)),
    "chunk": lambda op, value: op.split(chunk=int(value)),
    "pause": lambda op, value: op.poll(pause=int(value)),
    "publish": lambda op, value: op.publish(value),
}


def apply_knob(s: Any, graph: Graph, knob: str, value: str) -> None:
    """One override, in the words of mk.schedule."""
    match knob:
        case "window" | "stages" | "meeting_window" | "stage_bytes":
            s.ring("weights", **{knob: int(value)})
        case "warps":
            s.role("consumer", warps=int(value))
        case "finish":
            s.finish(value)
        case "batch" | "blocks":
            getattr(s, knob)(int(value))
        case "splits" | "sync" | "scale" | "gather" | "residual" | "pause":
            apply_everywhere(s, graph, knob, value)
        case "l2":
            s["gate_up_proj"].prefetch(l2=int(value) * KIB, ahead_of="attention")
        case "regs":
            for name in (op.name for op in graph.ops if isinstance(op, Linear)):
                s[name].prefetch(registers=int(value))
        case _ if "_" in knob and knob.partition("_")[0] in OF_ONE:
            kind, _, op = knob.partition("_")
            OF_ONE[kind](s[op], value)
        case _:
            split_columns(s, graph, knob, value)


def apply_everywhere(s: Any, graph: Graph, knob: str, value: str) -> None:
    """One override of every op that it can be about."""
    for op in graph.ops:
        if knob == "splits" and isinstance(op, Attention):
            s[op.name].split(kv=int(value))
        if knob == "gather" and isinstance(op, Linear | Attention):
            s[op.name].gather(value)
        if knob == "pause" and isinstance(op, Linear | Attention):
            s[op.name].poll(pause=int(value))
        if knob == "residual" and isinstance(op, Linear) and kept_values(op):
            s[op.name].residual(value)
        if knob == "scale" and isinstance(op, Linear) and op.factored is not None:
            s[op.name].scale(value)
        if knob == "sync" and op.out is not None and op.name in {v.producer for v in graph.values}:
            s[op.name].sync(SYNCS[value])


def split_columns(s: Any, graph: Graph, op: str, ways: str) -> None:
    """A linear's columns in parts, by its name."""
    if not any(isinstance(found, Linear) and found.name == op for found in graph.ops):
        raise SystemExit(f"unknown knob {op!r}")
    s[op].columns(ways=int(ways))


def compile_variant(model: str, tokens: int, knobs: dict[str, str], max_kv: int | None = None) -> Compiled:
    """The model under the variant's schedule, in place of its own, with caches of ``max_kv`` rows."""
    if "file" in knobs:
        return compile_model(model, tokens=tokens, max_kv=max_kv, schedule=knobs["file"])
    found, config = load(model, None)
    kernel = mk.kernel(found.function)
    graph = compile_model(model, tokens=tokens).graph
    with mk.schedule(kernel, arch=DEFAULT_ARCH) as s:
        for knob, value in knobs.items():
            apply_knob(s, graph, knob, value)
    return compile_model(kernel, config=config, tokens=tokens, max_kv=max_kv)


def medians(made: Mapping[str, Compiled], tokens: int, kv: int) -> dict[str, float]:
    """Milliseconds of a step of each, in rounds that all take part in; all on the same random weights."""
    first = next(iter(made.values())).manifest
    source = random_weights(first, seed=7, device="cuda")
    weights = TensorSource({n: source.load(n) for n in needed(first)})
    arenas: dict[str, torch.Tensor] = {}
    runs: list[tuple[str, Replay, Program]] = []
    for name, compiled in made.items():
        layout = json.dumps(compiled.manifest["pack"])
        if layout not in arenas:  # where weights lie is worth up to half a percent: variants with the same layout share them
            arenas[layout] = pack_weights(compiled.manifest, weights, "cuda", progress=False)
        program = Program(compiled.manifest, compiled.source, "cuda", arenas[layout])
        masks = [(2 << i) - 1 for i in range(tokens)]
        program.control.set_inputs(kv, list(range(1, tokens + 1)), list(range(kv, kv + tokens)), masks)
        runs.append((name, program.capture(), program))
    times: dict[str, list[float]] = {name: [] for name, _, _ in runs}
    for round_ in range(ROUNDS + 1):
        for name, step, program in runs:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(REPLAYS):
                step.replay()
            end.record()
            program.check()
            if round_:
                times[name].append(begin.elapsed_time(end) / REPLAYS)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--kv", type=int, default=512)
    parser.add_argument("--max-kv", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    made: dict[str, Compiled] = {}
    for text in args.variants:
        name, _, rest = text.partition(":")
        made[name] = compile_variant(args.model, args.tokens, dict(item.split("=") for item in rest.split(",") if item), args.max_kv)
    floor_ms = 1e3 * floor_seconds(next(iter(made.values())).graph, machine(DEFAULT_ARCH), args.kv)
    times = medians(made, args.tokens, args.kv)
    rows = [{"variant": text, "ms": times[text.partition(":")[0]]} for text in args.variants]
    for row in rows:
        print(f"{row['variant']:<40} {row['ms']:.4f} ms  {row['ms'] / floor_ms:.3f} x floor")
    if args.out:
        result = {"model": args.model, "tokens": args.tokens, "kv": args.kv, "floor_ms": floor_ms, "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
