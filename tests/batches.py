"""Kernels of a batch, in the emulator or on a GPU, against the torch meaning of each sequence by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megadsl.driver import Compiled
from megadsl.reference.compare import agreement
from megadsl.reference.meaning import argmax
from megadsl.runtime.control import (
    ADVANCE,
    ANCESTORS,
    BATCH_CHOSEN,
    BATCH_KV_LEN,
    BATCH_TOKENS,
    EPOCH,
    MOST_SEQUENCES,
    MOST_STEPS,
    MOST_TOKENS,
    N_TOKENS,
    NEXT_IDS,
    POSITIONS,
    STEPS_MADE,
    TOKEN_IDS,
)
from megadsl.runtime.kv import KvCache, PagedCache
from megadsl.runtime.pack import pack_weights
from megadsl.runtime.program import Program
from megadsl.runtime.weights import TensorSource
from tests.kernels import FACTOR, MARGIN, SLACK, Oracle, Step, Weights, bits, distance, scatter, weights_for


@dataclass(frozen=True)
class BatchStep:
    """One launch: a step of each sequence. One without ids is idle; its rows are poison."""

    sequences: tuple[Step, ...]

    @property
    def kv_lens(self) -> list[int]:
        return [of.kv for of in self.sequences]

    @property
    def counts(self) -> list[int]:
        return [len(of.ids) for of in self.sequences]

    @property
    def ids(self) -> list[int]:
        return [token for of in self.sequences for token in of.ids]

    @property
    def positions(self) -> list[int]:
        return [of.kv + i for of in self.sequences for i in range(len(of.ids))]

    @property
    def ancestors(self) -> list[int]:
        """A chain of each sequence's tokens, or what its step says, as bits of the tokens of all."""
        found, first = [], 0
        for of in self.sequences:
            masks = [(2 << i) - 1 for i in range(len(of.ids))] if of.ancestors is None else of.ancestors
            found += [mask << first for mask in masks]
            first += len(of.ids)
        return found


def batch_steps(made: Compiled, sizes: Iterable[tuple[Sequence[int], Sequence[int]]], seed: int = 0) -> list[BatchStep]:
    """A launch for each (cached rows, new tokens) of all sequences, with random ids."""
    generator = torch.Generator().manual_seed(seed)
    vocab = made.manifest["vocab"]

    def one(kv: int, count: int, number: int) -> Step:
        return Step(tuple(torch.randint(0, vocab, (count,), generator=generator).tolist()), kv, seed * 1000 + number)

    return [
        BatchStep(tuple(one(kv, n, index * MOST_SEQUENCES + i) for i, (kv, n) in enumerate(zip(kvs, counts, strict=True))))
        for index, (kvs, counts) in enumerate(sizes)
    ]


@dataclass(frozen=True)
class BatchResult:
    """fp32 logits (n, vocab), the chosen ids, and all bytes of the caches."""

    logits: torch.Tensor
    ids: tuple[int, ...]
    kv: torch.Tensor

    def same(self, other: BatchResult) -> bool:
        return self.ids == other.ids and bits(self.logits).equal(bits(other.logits)) and self.kv.equal(other.kv)


def cache_of(program: Program, arena: torch.Tensor, sequence: int) -> KvCache:
    """The rows of a sequence in a copy of the arena."""
    if program.pages is not None:
        return PagedCache(program.manifest, arena, program.pages.table, sequence)
    return KvCache(program.manifest, arena, sequence)


class BatchBench:
    """As tests.kernels.Bench: every launch begins with poison in all that must not matter, idle sequences' rows among it."""

    def __init__(self, made: Compiled, weights: Weights | None = None, device: str = "cpu", **options: object) -> None:
        self.made = made
        self.weights = weights_for(made) if weights is None else weights
        arena = pack_weights(made.manifest, TensorSource(self.weights), device, progress=False)
        self.program = Program(made.manifest, made.source, device, arena, **options)  # type: ignore[arg-type]

    def caches(self) -> list[KvCache]:
        return [self.program.rows(i) for i in range(self.made.manifest["sequences"])]

    def put(self, step: BatchStep, flags: int = 0) -> None:
        """Rows and inputs of a launch."""
        program = self.program
        program.buffers["kv"].fill_(0xFF)
        steps = MOST_STEPS if flags else 0
        scatter(program, [(of.kv + len(of.ids) + steps) if of.ids else 0 for of in step.sequences], step.sequences[0].seed)
        for cache, of in zip(self.caches(), step.sequences, strict=True):
            for layer in range(self.made.graph.layers if of.kv and of.ids else 0):
                k, v = of.rows(layer, cache.kv_heads, cache.head_dim)
                cache.write(layer, k.to(program.device), v.to(program.device))
        program.logits.fill_(float("nan"))
        program.control.set_batch(step.kv_lens, step.counts, step.ids, step.positions, step.ancestors, flags)
        for first in (TOKEN_IDS, POSITIONS, ANCESTORS):
            program.control.words[first + len(step.ids) : first + MOST_TOKENS] = -1

    def run(self, step: BatchStep) -> BatchResult:
        self.put(step)
        before = self.program.buffers["kv"].clone()
        self.program.launch()
        words = self.program.check()
        logits = self.program.logits[: len(step.ids)].cpu().clone()
        ids = tuple(words[NEXT_IDS : NEXT_IDS + len(step.ids)])
        assert ids == tuple(argmax(logits).tolist()), "the chosen ids are not the first of the greatest logits"
        last = [sum(step.counts[: i + 1]) - 1 for i in range(len(step.counts))]
        chosen = [words[BATCH_CHOSEN + i] for i, n in enumerate(step.counts) if n]
        assert chosen == [ids[at] for at, n in zip(last, step.counts, strict=True) if n]
        self._only_appended(step, before)
        return BatchResult(logits, ids, self.program.buffers["kv"].clone())

    def play(self, some: Iterable[BatchStep]) -> list[BatchResult]:
        self.program.reset()
        return [self.run(step) for step in some]

    def _only_appended(self, step: BatchStep, before: torch.Tensor) -> None:
        """No byte but those of the new rows has changed."""
        after = self.program.buffers["kv"].clone()
        for i, of in enumerate(step.sequences):
            for layer in range(self.made.graph.layers if of.ids else 0):
                k, v = self.program.rows(i).read(layer, of.kv + len(of.ids))
                for arena in (before, after):  # both: what lies beside a head's features in its last panel is anything
                    cache_of(self.program, arena, i).write(layer, k[:, of.kv :], v[:, of.kv :], of.kv)
        assert after.equal(before), f"{step}: other bytes than those of new rows changed"

    def appended(self, step: BatchStep, result: BatchResult) -> list[list[torch.Tensor]]:
        """Per sequence k and v of the new rows, layer by layer."""
        found = []
        for index, of in enumerate(step.sequences):
            if not of.ids:
                found.append([])
                continue
            scatter(self.program, [(s.kv + len(s.ids)) if s.ids else 0 for s in step.sequences], step.sequences[0].seed)
            cache = cache_of(self.program, result.kv, index)
            both = (pair for layer in range(self.made.graph.layers) for pair in cache.read(layer, of.kv + len(of.ids)))
            found.append([rows[:, of.kv :].cpu() for rows in both])
        return found


def judge_batch(bench: BatchBench, some: Sequence[BatchStep], results: Sequence[BatchResult]) -> None:
    """As tests.kernels.judge, of each sequence of each launch by itself."""
    oracle = Oracle(bench.made, bench.weights)
    # Rounding errors of independent layers add up as their roots do; two layers stay below 2e-2.
    limit = 2e-2 * max(1.0, bench.made.graph.layers / 2) ** 0.5
    exact, rounded, ours = [], [], []
    for step, result in zip(some, results, strict=True):
        assert bool(result.logits.isfinite().all()), f"{step}: not finite"
        first = 0
        for of, rows in zip(step.sequences, bench.appended(step, result), strict=True):
            if not of.ids:
                continue
            fp32, bf16 = oracle.run(of)
            own = result.logits[first : first + len(of.ids)]
            assert distance(own, fp32) < 3 * distance(bf16, fp32) + SLACK, f"{of} of {step.kv_lens}, {step.counts}"
            for mine, theirs in zip(rows, oracle.appended(of), strict=True):
                assert distance(mine, theirs) < limit, f"appended rows of {of}"
            exact.append(fp32), rounded.append(bf16), ours.append(own)
            first += len(of.ids)
    fp32, bf16 = torch.cat(exact), torch.cat(rounded)
    assert distance(torch.cat(ours), fp32) <= FACTOR * distance(bf16, fp32) + SLACK
    assert not agreement(torch.cat(ours), fp32, MARGIN).differing


def check_batches(
    made: Compiled, sizes: Iterable[tuple[Sequence[int], Sequence[int]]], *, device: str = "cpu", seeds: Sequence[int] = ()
) -> list[BatchResult]:
    """Run launches, judge them, and replay them under other emulator ``seeds``, bit for bit."""
    bench = BatchBench(made, device=device)
    some = batch_steps(made, sizes)
    results = bench.play(some)
    judge_batch(bench, some, results)
    for seed in seeds:
        bench.program.seed = seed
        for step, first, again in zip(some, results, bench.play(some), strict=True):
            assert again.same(first), f"seed {seed} gives other bits for {step}"
    return results


def left(bench: BatchBench, chosen: list[list[int]]) -> tuple[list[list[int]], torch.Tensor, torch.Tensor, list[int]]:
    words, n = bench.program.check(), bench.made.manifest["sequences"]
    active = words[N_TOKENS]
    inputs = [words[EPOCH], active, *words[BATCH_KV_LEN : BATCH_KV_LEN + n], *words[BATCH_TOKENS : BATCH_TOKENS + n]]
    for first in (TOKEN_IDS, POSITIONS, ANCESTORS):
        inputs += words[first : first + active]
    return chosen, bits(bench.program.logits[:active]).clone(), bench.program.buffers["kv"].clone(), inputs


def begin(bench: BatchBench, step: BatchStep) -> None:
    bench.program.reset()
    bench.put(step, ADVANCE)


def chosen_by(words: list[int], step: BatchStep, count: int) -> list[list[int]]:
    at = [[BATCH_CHOSEN + index * MOST_SEQUENCES + i for i, n in enumerate(step.counts) if n] for index in range(count)]
    return [[words[i] for i in row] for row in at]


def singles(bench: BatchBench, step: BatchStep, count: int) -> tuple[list[list[int]], torch.Tensor, torch.Tensor, list[int]]:
    begin(bench, step)
    found = []
    for _ in range(count):
        bench.program.launch()
        found += chosen_by(bench.program.check(), step, 1)
    return left(bench, found)


def several(
    bench: BatchBench, step: BatchStep, count: int, stops: tuple[int, ...] = ()
) -> tuple[list[list[int]], torch.Tensor, torch.Tensor, list[int]]:
    begin(bench, step)
    bench.program.set_steps(count, stops)
    bench.program.launch()
    words = bench.program.check()
    bench.program.set_steps(1)
    return left(bench, chosen_by(words, step, words[STEPS_MADE]))


def same(
    a: tuple[list[list[int]], torch.Tensor, torch.Tensor, list[int]], b: tuple[list[list[int]], torch.Tensor, torch.Tensor, list[int]]
) -> bool:
    return a[0] == b[0] and a[1].equal(b[1]) and a[2].equal(b[2]) and a[3] == b[3]
