"""Fidelity gate and step time of a model with random weights on a GPU, at several KV lengths.

For each (tokens, kv): the cache is filled with random rows, some steps of random tokens are teacher-forced through the kernel,
through the fp32 oracle and through torch bf16 (same weights), and the gate is applied; then the step is captured in a CUDA
graph and replayed. Every replay must give the same bits.

    python tools/fidelity.py llama-3.2-1b --tokens 1 5 16 --kv 0 1 511 512 2000 --replays 200 --out docs/measurements/x.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from megadsl.driver import Compiled, compile_model
from megadsl.machine import machine
from megadsl.ops.cost import floor_seconds
from megadsl.reference import EagerModel, ReferenceModel, gate
from megadsl.runtime.generate import Generator
from megadsl.runtime.program import TRACE
from megadsl.runtime.weights import TensorSource, needed, random_weights
from megadsl.trace.write import write_timeline

FORCED_TOKENS = 32
TURNS = 4


class Subject:
    """One compiled kernel beside its oracle and torch bf16, all on the same weights and the same cache contents."""

    def __init__(self, model: str, tokens: int, max_kv: int, options: dict[str, Any]) -> None:
        self.compiled: Compiled = compile_model(model, tokens=tokens, max_kv=max_kv)
        source = random_weights(self.compiled.manifest, seed=7, device="cuda")
        weights = {name: source.load(name) for name in needed(self.compiled.manifest)}
        self.generator = Generator(self.compiled, TensorSource(weights), "cuda", progress=False, **options)
        self.oracle = ReferenceModel(self.compiled.graph, weights, max_kv, "fp32", "cuda")
        self.bf16 = EagerModel(self.compiled.graph, weights, max_kv, "cuda")
        self.random = torch.Generator("cuda").manual_seed(11)

    def fill(self, rows: int) -> None:
        """``rows`` random rows in every cache, the same for all three."""
        self.generator.reset()
        kv = self.generator.program.kv
        assert kv is not None
        for (cache, layer), (keys, values) in self.oracle.caches.items():
            k = torch.randn(keys[:, :rows].shape, generator=self.random, device="cuda").bfloat16()
            v = torch.randn(values[:, :rows].shape, generator=self.random, device="cuda").bfloat16()
            keys[:, :rows], values[:, :rows] = k.float(), v.float()
            other = self.bf16.caches[cache, layer]
            other[0][:, :rows], other[1][:, :rows] = k.to(other[0].dtype), v.to(other[1].dtype)
            kv.write(layer, k, v)
        self.generator.kv_len = self.oracle.kv_len = self.bf16.kv_len = rows

    def force(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits (forced tokens, vocab) of ours, torch bf16 and the oracle over some steps of ``count`` random tokens."""
        vocab = self.compiled.manifest["vocab"]
        found: list[tuple[torch.Tensor, ...]] = []
        for _ in range(max(2, FORCED_TOKENS // count)):
            ids = torch.randint(0, vocab, (count,), generator=self.random, device="cuda").tolist()
            self.generator.program.logits.fill_(float("nan"))
            found.append((self.generator.step(ids).clone(), self.bf16.step(ids), self.oracle.step(ids)))
        return tuple(torch.cat(part) for part in zip(*found, strict=True))  # type: ignore[return-value]

    def replay(self, count: int, rows: int, replays: int) -> tuple[list[float], int]:
        """Milliseconds of each replay at ``rows`` cached rows, and how many replays gave other logits than the first."""
        program = self.generator.program
        program.control.set_inputs(rows, list(range(1, count + 1)), list(range(rows, rows + count)), [(2 << i) - 1 for i in range(count)])
        step = program.capture()
        for _ in range(3):
            step.replay()
        program.check()
        first = program.logits.clone()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * replays)]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for i in range(replays):
            marks[2 * i].record()
            step.replay()
            marks[2 * i + 1].record()
            wrong += (program.logits != first).any()
        program.check()
        return [a.elapsed_time(b) for a, b in zip(marks[::2], marks[1::2], strict=True)], int(wrong)


def measure(subject: Subject, tokens: int, kv: int, replays: int) -> dict[str, Any]:
    """One row of the table."""
    subject.fill(kv)
    ours, bf16, fp32 = subject.force(tokens)
    verdict = gate(ours, bf16, fp32)
    times, wrong = subject.replay(tokens, kv, replays)
    floor_ms = 1e3 * floor_seconds(subject.compiled.graph, machine(subject.compiled.schedule.arch), kv)
    median = statistics.median(times)
    deciles = statistics.quantiles(times, n=10)
    return {
        "tokens": tokens, "kv": kv, "gate": verdict.passed, "error": verdict.ours.mean, "error_max": verdict.ours.max,
        "error_bf16": verdict.bf16.mean, "error_bf16_max": verdict.bf16.max,
        "tokens_equal": verdict.tokens.compared - len(verdict.tokens.differing), "tokens_compared": verdict.tokens.compared,
        "ms": median, "ms_p10": deciles[0], "ms_p90": deciles[-1], "floor_ms": floor_ms, "of_floor": median / floor_ms,
        "replays": replays, "replays_that_differ": wrong,
    }  # fmt: skip


def trace(model: str, tokens: int, kv: int, max_kv: int, replays: int, out: Path) -> dict[str, Any]:
    """The timeline of one step into ``out``, and what recording it costs: builds with and without it take turns, on the same inputs."""
    subjects = [Subject(model, tokens, max_kv, {"defines": defines}) for defines in ({}, {TRACE: "1"})]
    times: list[list[float]] = [[], []]
    for subject in subjects:
        subject.fill(kv)
    for _ in range(TURNS):
        for mine, subject in zip(times, subjects, strict=True):
            mine += subject.replay(tokens, kv, max(1, replays // TURNS))[0]
    plain, traced = (subject.generator.program for subject in subjects)
    summary = write_timeline(subjects[1].compiled.manifest, traced.buffers["trace"].cpu().numpy(), out)
    print((out / "table.txt").read_text())
    ms, ms_traced = (statistics.median(mine) for mine in times)
    same = torch.equal(plain.logits.view(torch.int32), traced.logits.view(torch.int32))
    print(
        f"without the timeline {ms:.4f} ms, with it {ms_traced:.4f} ms ({ms_traced / ms - 1:+.2%}); same bits: {same}; lost: {summary.lost}"
    )
    return {
        "tokens": tokens,
        "kv": kv,
        "ms": ms,
        "ms_traced": ms_traced,
        "same_bits": same,
        "lost": summary.lost,
        "clocks": dict(summary.clocks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1])
    parser.add_argument("--kv", type=int, nargs="+", default=[512])
    parser.add_argument("--replays", type=int, default=200)
    parser.add_argument("--max-kv", type=int, default=2048)
    parser.add_argument("--trace", type=Path, metavar="DIR", help="also write the timeline of the first combination, and what it costs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    rows: list[dict[str, Any]] = []
    for tokens in args.tokens:
        subject = Subject(args.model, tokens, args.max_kv, {})
        for kv in args.kv:
            row = measure(subject, tokens, kv, args.replays)
            rows.append(row)
            print(
                f"{args.model} tokens {tokens:>2} kv {kv:>5}: {row['ms']:.4f} ms ({row['ms_p10']:.4f}-{row['ms_p90']:.4f}),"
                f" {row['of_floor']:.3f} x floor;"
                f" gate {'passed' if row['gate'] else 'FAILED'}: {row['error']:.3e} against bf16 {row['error_bf16']:.3e},"
                f" tokens {row['tokens_equal']}/{row['tokens_compared']}, replays that differ {row['replays_that_differ']}",
                flush=True,
            )
        del subject
        torch.cuda.empty_cache()
    found: dict[str, Any] = {"model": args.model, "device": torch.cuda.get_device_name(), "rows": rows}
    if args.trace:
        found["trace"] = trace(args.model, args.tokens[0], args.kv[0], args.max_kv, args.replays, args.trace)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
