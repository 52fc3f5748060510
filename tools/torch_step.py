"""What a step costs inside a torch program: the bare launch, and what the operator, torch.compile and a draw of the token add to it.

    python tools/torch_step.py llama-3.2-1b --out build/torch_step.json

Milliseconds by events around each run, interleaved in one process: median, 10th and 90th percentile. "call" is eager and queues behind
nothing, so that the host's time shows; beside it the host's own time of a call. A text is timed as a whole, by its tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megadsl.driver import compile_model
from megadsl.machine import machine
from megadsl.runtime.bench_timing import Clock, Contestant, Spread
from megadsl.runtime.weights import random_weights
from megadsl.torch import DecodeStep, Sampling

DRAW = Sampling(0.8, top_k=50, top_p=0.95)


def captured(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """``run`` as a graph; in the emulator as it is."""
    if device.type == "cpu":
        return run
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def contestants(step: DecodeStep, kv: int) -> list[Contestant]:
    """Each runs one step for one token behind ``kv`` rows."""
    device = step.program.device
    ids, rows = torch.ones(1, dtype=torch.int64, device=device), torch.full((1,), kv, device=device)
    step.program.control.set_inputs(kv, [1], [kv], [1])
    fast = torch.compile(step, fullgraph=True, mode="reduce-overhead")

    def compiled() -> object:
        torch.compiler.cudagraph_mark_step_begin()
        return fast(ids, rows)

    return [
        Contestant("launch, graph", step.program.capture().replay),
        Contestant("step, graph", captured(lambda: step(ids, rows), device)),
        Contestant("step, positions given, graph", captured(lambda: step(ids, rows, positions=rows), device)),
        Contestant("step and draw, graph", captured(lambda: DRAW(step(ids, rows).logits), device)),
        Contestant("step, torch.compile reduce-overhead", compiled),
        Contestant("step, call", lambda: step(ids, rows)),
    ]


def host_us(run: Callable[[], object], calls: int, settle: Callable[[], object]) -> Spread:
    """The host's time of each call, with nothing queued."""
    spent = []
    for _ in range(calls):
        settle()
        began = time.perf_counter()
        run()
        spent.append(1e6 * (time.perf_counter() - began))
    return Spread.of(spent)


def text_ms(step: DecodeStep, tokens: int, **how: float | int) -> float:
    """Wall time of a token of a text, without its prompt and its capture."""
    marks: list[float] = []
    step.generate([1, 2, 3], tokens, on_token=lambda token: marks.append(time.perf_counter()), **how)
    first = len(marks) // 4
    return 1e3 * (marks[-1] - marks[first]) / (len(marks) - 1 - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv", type=int, default=512)
    parser.add_argument("--replays", type=int, default=400)
    parser.add_argument("--text", type=int, default=200, help="tokens of a text")
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    made = compile_model(args.model, blocks=args.blocks)
    step = DecodeStep(made, random_weights(made.manifest, device=args.device), args.device)
    rounds = contestants(step, args.kv)
    clock = Clock(step.program.device, machine(made.manifest["arch"]), made.manifest["weight_bytes"])
    times = clock.times(rounds, args.replays)
    step.check()
    host = {each.name: host_us(each.run, max(2, args.replays // 2), step.check) for each in rounds}
    texts = {"greedy": text_ms(step, args.text), "drawn": text_ms(step, args.text, temperature=0.8, top_k=50, top_p=0.95)}
    for name, spread in times.items():
        print(f"{name:<40} {spread.median:.4f} ms ({spread.p10:.4f} to {spread.p90:.4f}), host {host[name].median:.1f} us")
    for name, each in texts.items():
        print(f"{'text, ' + name:<40} {each:.4f} ms a token")
    if args.out:
        found = {name: {"ms": vars(times[name]), "host_us": vars(host[name])} for name in times}
        args.out.write_text(
            json.dumps({"model": args.model, "kv": args.kv, "clock": clock.name, "steps": found, "text_ms": texts}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
