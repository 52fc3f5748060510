"""Generated kernels, run in the emulator or on a GPU, against the torch meanings of the same graph."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

import megadsl as mk
from megadsl.build.host import DETECT
from megadsl.build.nvcc import build_cubin
from megadsl.driver import Compiled, compile_model
from megadsl.dsl.formats import Formats
from megadsl.dsl.kernel import Kernel
from megadsl.dsl.registry import load
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.emulate import LaunchReport, Policy, Run, explore
from megadsl.emulate.explore import Exploration, policy_of
from megadsl.ir.graph import Attention, Linear
from megadsl.machine import DEFAULT_ARCH, Machine
from megadsl.reference import ReferenceModel
from megadsl.reference.compare import agreement
from megadsl.reference.meaning import argmax
from megadsl.resources import include
from megadsl.runtime.control import ANCESTORS, MOST_TOKENS, NEXT_IDS, POSITIONS, TOKEN_IDS
from megadsl.runtime.pack import pack_weights
from megadsl.runtime.program import Program
from megadsl.runtime.weights import TensorSource, needed, random_weights
from tests.libraries import library

Configure = Callable[[ScheduleBlock], None]
Weights = dict[str, torch.Tensor]
Key = TypeVar("Key")

MAX_KV = 128
FACTOR = 1.1  # our error against fp32, as a multiple of the error of the same rounding points in torch
SLACK = 1e-3  # relative; a dropped row or a wrong tag shows as 1e-2 and more
MARGIN = 0.1


def config(**fields: Any) -> dict[str, Any]:
    """llama-tiny with some fields changed."""
    return load("llama-tiny")[1] | fields


def compiled(
    model: str | Kernel,
    *,
    tokens: int = 1,
    blocks: int = 3,
    fields: Mapping[str, Any] | None = None,
    configure: Configure | None = None,
    max_kv: int = MAX_KV,
    sequences: int = 1,
    kv_page: int = 0,
    kv_pages: int = 0,
    arch: str = DEFAULT_ARCH,
    on: Machine | None = None,
    formats: Formats = None,
) -> Compiled:
    """A compilation with its own copy of the kernel, so that ``configure`` (the body of mk.schedule) stays with this one."""
    kernel, own = load(model) if isinstance(model, str) else (model, {})
    kernel = Kernel(kernel.function)
    if configure is not None:
        with mk.schedule(kernel, arch=arch) as s:
            configure(s)
    own = dict(own if fields is None else fields)
    size: dict[str, Any] = {
        "tokens": tokens,
        "blocks": blocks,
        "max_kv": max_kv,
        "sequences": sequences,
        "kv_page": kv_page,
        "kv_pages": kv_pages,
    }
    found = compile_model(kernel, config=own, arch=arch, on=on, formats=formats, **size)
    # Comments name shapes that the code takes as data; without them such kernels are one build.
    return replace(found, source=re.sub(r"[ \t]*//.*", "", found.source))


def together(*some: Compiled) -> tuple[Compiled, ...]:
    """The same kernels, of one launch a step each, in one library for the emulator."""
    assert all(made.manifest["launches"] == [(0, 0)] for made in some)
    words = max(len(made.manifest["shape"]) for made in some)
    sources = list(dict.fromkeys(made.source for made in some))
    source = library(sources, words)

    def shape(made: Compiled) -> list[int]:
        own = made.manifest["shape"]
        return [*own, *[0] * (words - len(own))]

    return tuple(
        replace(made, source=source, manifest={**made.manifest, "launches": [(sources.index(made.source), 0)], "shape": shape(made)})
        for made in some
    )


def one_build(some: Mapping[Key, Compiled]) -> dict[Key, Compiled]:
    """``together`` of kernels that have names: what a test file keeps, so that each of its tests takes its own."""
    return dict(zip(some, together(*some.values()), strict=True))


def weights_for(made: Compiled, seed: int = 1) -> Weights:
    source = random_weights(made.manifest, seed)
    return {name: source.load(name) for name in needed(made.manifest)}


@dataclass(frozen=True)
class Step:
    """One launch: the ids after ``kv`` cached rows, whose contents are random numbers that depend on ``seed`` alone."""

    ids: tuple[int, ...]
    kv: int
    seed: int
    positions: tuple[int, ...] | None = None
    ancestors: tuple[int, ...] | None = None

    def rows(self, layer: int, kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cached k and v of a layer, each (kv_heads, kv, head_dim) bf16."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + layer)
        k, v = torch.randn(2, kv_heads, self.kv, head_dim, generator=generator).bfloat16()
        return k, v


def steps(made: Compiled, sizes: Iterable[tuple[int, int]], seed: int = 0) -> list[Step]:
    """A step for each (cached rows, new tokens), with random ids."""
    generator = torch.Generator().manual_seed(seed)
    vocab = made.manifest["vocab"]
    return [
        Step(tuple(torch.randint(0, vocab, (count,), generator=generator).tolist()), kv, seed * 100 + index)
        for index, (kv, count) in enumerate(sizes)
    ]


@dataclass(frozen=True)
class Result:
    """What a step left: fp32 logits (n, vocab), the chosen ids, and per layer the appended k and v (kv_heads, n, head_dim)."""

    logits: torch.Tensor
    ids: tuple[int, ...]
    rows: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    def same(self, other: Result) -> bool:
        """Bit for bit."""
        rows = [pair for x, y in zip(self.rows, other.rows, strict=True) for pair in zip(x, y, strict=True)]
        return self.ids == other.ids and all(bits(a).equal(bits(b)) for a, b in [(self.logits, other.logits), *rows])


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.int32 if t.element_size() == 4 else torch.int16)


class Bench:
    """A program whose every step begins with poison in all that must not matter: NaN logits, NaN in the KV rows that do not
    exist, inputs of -1 for tokens past the step's count."""

    def __init__(
        self, made: Compiled, weights: Weights | None = None, device: str = "cpu", arena: torch.Tensor | None = None, **options: Any
    ) -> None:
        self.made = made
        self.weights = weights_for(made) if weights is None else weights
        arena = pack_weights(made.manifest, TensorSource(self.weights), device, progress=False) if arena is None else arena
        self.program = Program(made.manifest, made.source, device, arena, **options)
        self.chooses = any(isinstance(op, Linear) and op.sink == "argmax" for op in made.graph.ops)

    def run(self, step: Step) -> Result:
        """One launch; checks that cached rows and rows that do not exist are left alone."""
        count, cached = len(step.ids), self.put_rows(step)
        self.program.logits.fill_(float("nan"))
        positions = range(step.kv, step.kv + count) if step.positions is None else step.positions
        ancestors = [(2 << i) - 1 for i in range(count)] if step.ancestors is None else step.ancestors
        self.program.control.set_inputs(step.kv, step.ids, positions, ancestors)
        for first in (TOKEN_IDS, POSITIONS, ANCESTORS):
            self.program.control.words[first + count : first + MOST_TOKENS] = -1
        self.program.launch()
        words = self.program.check()
        logits = self.program.logits[:count].cpu().clone()
        ids = tuple(words[NEXT_IDS : NEXT_IDS + count]) if self.chooses else ()
        assert not self.chooses or ids == tuple(argmax(logits).tolist()), "the chosen ids are not the first of the greatest logits"
        return Result(logits, ids, self._appended(step, cached))

    def play(self, some: Iterable[Step]) -> list[Result]:
        """The steps from a fresh start."""
        self.program.reset()
        return [self.run(step) for step in some]

    def put_rows(self, step: Step) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Fill the cache with the step's rows and NaN behind them; what each layer then holds, all max_kv rows."""
        kv = self.program.kv
        if kv is None:
            return []
        self.program.buffers["kv"].fill_(0xFF)
        scatter(self.program, [kv.max_kv], step.seed)
        for layer in range(self.made.graph.layers):
            k, v = step.rows(layer, kv.kv_heads, kv.head_dim)
            if step.kv:
                kv.write(layer, k.to(self.program.device), v.to(self.program.device))
        return [kv.read(layer, kv.max_kv) for layer in range(self.made.graph.layers)]

    def _appended(self, step: Step, before: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        kv, end = self.program.kv, step.kv + len(step.ids)
        found = []
        for layer, old in enumerate(before):
            assert kv is not None
            now = kv.read(layer, kv.max_kv)
            for a, b in zip(now, old, strict=True):
                assert bits(a[:, : step.kv]).equal(bits(b[:, : step.kv])), f"layer {layer}: cached rows changed"
                assert bits(a[:, end:]).equal(bits(b[:, end:])), f"layer {layer}: rows behind the new ones changed"
            found.append((now[0][:, step.kv : end].cpu().clone(), now[1][:, step.kv : end].cpu().clone()))
        return tuple(found)


def scatter(program: Program, rows: Sequence[int], seed: int) -> None:
    """Pages in random order for so many rows of each sequence, where rows lie in pages."""
    if program.pages is not None:
        program.pages.clear()
        random.Random(seed).shuffle(program.pages.free)
        program.reserve(rows)


class Oracle:
    """The same graph in torch: fp32, and with the kernel's rounding points."""

    def __init__(self, made: Compiled, weights: Weights) -> None:
        self.fp32 = ReferenceModel(made.graph, {k: v.float() for k, v in weights.items()}, made.manifest["max_kv"], "fp32")
        self.bf16 = ReferenceModel(made.graph, weights, made.manifest["max_kv"], "bf16")

    def run(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of both, each (n, vocab)."""
        fp32, bf16 = (self._run(model, step) for model in (self.fp32, self.bf16))
        return fp32, bf16

    def _run(self, model: ReferenceModel, step: Step) -> torch.Tensor:
        model.kv_len = step.kv
        for (_, layer), (keys, values) in model.caches.items():
            k, v = step.rows(layer, keys.shape[0], keys.shape[2])
            keys[:, : step.kv], values[:, : step.kv] = k.to(keys), v.to(values)
        return model.step(step.ids, step.positions, step.ancestors)

    def appended(self, step: Step) -> list[torch.Tensor]:
        """k and v of the last step's new rows, layer by layer."""
        end = step.kv + len(step.ids)
        return [t[:, step.kv : end] for pair in self.bf16.caches.values() for t in pair]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def judge(made: Compiled, weights: Weights, some: Sequence[Step], results: Sequence[Result]) -> None:
    """Asserts that the results are as near to fp32 as the kernel's rounding points allow, appended rows included."""
    oracle = Oracle(made, weights)
    logits: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step, result in zip(some, results, strict=True):
        assert bool(result.logits.isfinite().all()), f"{step}: {int((~result.logits.isfinite()).sum())} logits are not finite"
        logits.append(oracle.run(step))
        for ours, theirs in zip((t for pair in result.rows for t in pair), oracle.appended(step), strict=True):
            assert distance(ours, theirs) < 2e-2, f"appended rows of {step}"
    ours = torch.cat([r.logits for r in results])
    fp32, bf16 = (torch.cat(list(each)) for each in zip(*logits, strict=True))
    for result, (exact, _) in zip(results, logits, strict=True):
        assert distance(result.logits, exact) < 3 * distance(bf16, fp32) + SLACK
    assert distance(ours, fp32) <= FACTOR * distance(bf16, fp32) + SLACK
    assert not agreement(ours, fp32, MARGIN).differing


def check(
    made: Compiled, sizes: Iterable[tuple[int, int]], *, device: str = "cpu", seeds: Sequence[int] = (), **options: Any
) -> list[Result]:
    """Run steps of (cached rows, new tokens), judge them, and replay them under other emulator ``seeds``, bit for bit."""
    bench = Bench(made, device=device, **options)
    some = steps(made, sizes)
    results = bench.play(some)
    judge(made, bench.weights, some, results)
    for seed in seeds:
        bench.program.seed = seed
        for step, first, again in zip(some, results, bench.play(some), strict=True):
            assert again.same(first), f"seed {seed} gives other bits for {step}"
    return results


def check_seeds(bench: Bench, some: Sequence[Step], expected: Sequence[Result], seeds: Iterable[int]) -> None:
    """Under every seed, and the policy that goes with it, each step gives the same bits, and where the race detector watches, no race."""
    for seed in seeds:
        bench.program.seed, bench.program.policy = seed, policy_of(seed)
        bench.program.reset()
        for step, wanted in zip(some, expected, strict=True):
            assert bench.run(step).same(wanted), f"seed {seed} gives other bits for {step}"
            report = bench.program.report
            assert report is not None and not report.races and not report.hung


def explored(bench: Bench, some: Sequence[Step], expected: Sequence[Result], seeds: Sequence[int]) -> Exploration:
    """What :func:`explore` finds of launches of these steps, each of which gives the same bits under every seed."""

    def program() -> Run:
        def launches(seed: int, policy: Policy) -> Iterator[LaunchReport]:
            bench.program.seed, bench.program.policy = seed, policy
            bench.program.reset()
            for step, wanted in zip(some, expected, strict=True):
                assert bench.run(step).same(wanted)
                assert bench.program.report is not None
                yield bench.program.report

        return launches

    return explore(program, seeds)


def build_cubins(some: Iterable[Compiled]) -> None:
    """For the GPU, side by side: programs take them from the cache afterwards."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda made: build_cubin(made.source, made.manifest["arch"], [include()], {}), some))


def attention_of(made: Compiled) -> Attention:
    return next(op for op in made.graph.ops if isinstance(op, Attention))


def check_races(made: Compiled, some: Sequence[Step]) -> None:
    """Under the race detector: right, and the same bits without a race under an unfair schedule too."""
    bench = Bench(made, defines={DETECT: "1"})
    first = bench.play(some)
    judge(made, bench.weights, some, first)
    bench.program.seed, bench.program.policy = 2, policy_of(2)
    assert bench.play(some)[0].same(first[0])
    assert bench.program.report is not None and not bench.program.report.races
