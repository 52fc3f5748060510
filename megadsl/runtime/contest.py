"""Kernels of one model against each other, two at a time: the same weights at the same addresses, the same cached rows (of each sequence
of a batch), the same tokens.

Two builds of one kernel differ by up to 0.4% when their weights lie elsewhere: so all kernels of one pack layout share an arena, and all
share the KV arena.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megadsl.diagnostics import MegadslError
from megadsl.ir.graph import Attention, Graph
from megadsl.reference import EagerModel, Gate, ReferenceModel, gate
from megadsl.runtime.bench import EachSequence, each_has, forced_rows
from megadsl.runtime.bench_timing import Clock, Contestant
from megadsl.runtime.contest_kinds import HUNG, REFUSED, WRONG, Kernel, Rows, Unfit
from megadsl.runtime.control import MegakernelHang
from megadsl.runtime.cuda import CALL_FAILED, machine_of
from megadsl.runtime.kv import KvCache
from megadsl.runtime.pack import pack_weights
from megadsl.runtime.program import Program, Replay, resolve_device
from megadsl.runtime.queue import GPU_BUSY
from megadsl.runtime.weights import TensorSource, needed, random_weights

SEED = 7
BLOCK_MS = 5.0  # of one kernel's replays in a pair: long enough for the clock, short enough for what drifts
FEWEST, MOST = 4, 50  # replays in it
REPEATS = 20  # replays whose logits have to be equal
LOADED = 4  # kernels that stay loaded


@dataclass
class Runner:
    """A kernel that is loaded and captured; ``kv`` rows are what its control block is set to."""

    program: Program
    replay: Replay
    kv: int = -1


class Contest:
    """All kernels of one model and number of tokens on one device. ``first`` is any of them: its manifest says which weights there are.

    ``lengths`` are the numbers of cached rows, of each sequence, that steps are timed with; ``factor`` is the fidelity gate's. Weights are
    random, and so are the cached rows and the tokens, of which each sequence has as many (else MK498). Turns TF32 off for the process.
    """

    def __init__(self, device: str, graph: Graph, first: Kernel, lengths: Sequence[int], factor: float = 1.05) -> None:
        torch.set_float32_matmul_precision("highest")
        self._graph, self._lengths, self._factor = graph, tuple(lengths), factor
        self._device = resolve_device(device, first.manifest["arch"])
        where = str(self._device)
        source = random_weights(first.manifest, SEED, where)
        self._weights = {name: source.load(name) for name in needed(first.manifest)}
        self._arenas: dict[str, torch.Tensor] = {}
        self._kv = torch.zeros(first.manifest["buffers"]["kv"], dtype=torch.uint8, device=where)
        self._runners: OrderedDict[str, Runner] = OrderedDict()
        self._clock = Clock(self._device, machine_of(first.manifest["arch"], self._device), first.manifest["weight_bytes"])
        self._random = torch.Generator().manual_seed(SEED)
        self._sequences = int(first.manifest["sequences"])
        self._own = each_has(graph.tokens, self._sequences)  # new tokens of each
        self._ids = self._tokens(graph.tokens)
        self._forced = [self._tokens(graph.tokens) for _ in range(forced_rows(self._own) // self._own)]
        self._rows = self._cached_rows()
        self._models: tuple[torch.Tensor, torch.Tensor] | None = None
        with _judged():
            self._fill(self._runner(first).program)

    def compare(self, base: Kernel, candidate: Kernel, pairs: int, seed: int) -> tuple[Rows, Rows]:
        """Milliseconds of a step of both: for each number of cached rows, one per pair, the median of some replays. In each pair a coin by
        ``seed`` says who comes first. Raises Unfit."""
        coin = random.Random(seed)
        found: list[list[list[float]]] = [[[] for _ in self._lengths] for _ in range(2)]
        with _judged():
            runners = [self._runner(kernel) for kernel in (base, candidate)]
            counts = [max(self._replays(runner, kv) for runner in runners) for kv in self._lengths]
            for _ in range(pairs):
                for index, kv in enumerate(self._lengths):
                    order = [0, 1] if coin.random() < 0.5 else [1, 0]
                    for which in order:
                        found[which][index].append(statistics.median(self._spent(runners[which], kv, counts[index])))
            for runner in runners:
                runner.program.check()
        ours, theirs = (tuple(tuple(row) for row in rows) for rows in found)
        return ours, theirs

    def verify(self, base: Kernel, candidate: Kernel, same: bool) -> None:
        """Raises Unfit unless the candidate's results are right: with ``same``, the base's bits; else the fidelity gate judges its logits
        where they are others. Its replays have to agree with each other in any case."""
        with _judged():
            ours, theirs = self._runner(base), self._runner(candidate)
            differing = [text for kv in self._lengths if (text := self._difference(ours, theirs, kv))]
            if differing and same:
                raise Unfit(WRONG, f"bits differ that may not: {'; '.join(differing)}")
            if differing:
                verdict = self._judge(theirs)
                self._fill(theirs.program)
                if not verdict.passed:
                    raise Unfit(WRONG, f"fidelity gate {verdict}")

    def _difference(self, base: Runner, candidate: Runner, kv: int) -> str:
        """What differs between the results of a step of both, "" for nothing. Raises Unfit where replays of the candidate do."""
        expected, first = self._outcome(base, kv), self._outcome(candidate, kv)
        for _ in range(REPEATS if self._device.type == "cuda" else 1):
            again = self._outcome(candidate, kv)
            if any(not torch.equal(a, b) for a, b in zip(first, again, strict=True)):
                raise Unfit(WRONG, f"two replays with {kv} cached rows differ")
        wrong = [int((a != b).sum()) for a, b in zip(expected, first, strict=True)]
        return f"{wrong[0]} logits and {wrong[1]} words of the cache with {kv} cached rows" if any(wrong) else ""

    def _outcome(self, runner: Runner, kv: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The bits of the logits and of the KV arena behind one step on poisoned logits."""
        self._aim(runner, kv)
        runner.program.logits.fill_(float("nan"))
        runner.replay.replay()
        runner.program.check()
        return runner.program.logits.view(torch.int32).clone(), self._kv.view(torch.int32).clone()

    def _judge(self, runner: Runner) -> Gate:
        """The fidelity gate over teacher-forced steps from the fewest cached rows."""
        rows = min(self._lengths)
        bf16, fp32 = self._reference()
        found = []
        for index, ids in enumerate(self._forced):
            self._set_inputs(runner, rows + index * self._own, ids)
            runner.program.logits.fill_(float("nan"))
            runner.replay.replay()
            runner.program.check()
            found.append(runner.program.logits.clone())
        runner.kv = -1
        return gate(torch.cat(found), bf16, fp32, factor=self._factor)

    def _reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of torch bf16 and of the fp32 oracle for the forced tokens; computed once."""
        if self._models is None:
            rows, where = min(self._lengths), str(self._device)
            most = rows + forced_rows(self._own)
            made = []
            for model in (
                EagerModel(self._graph, self._weights, most, where),
                ReferenceModel(self._graph, self._weights, most, "fp32", where),
            ):
                batch = EachSequence(model, self._sequences)
                for one, cached in zip(batch.models, self._rows, strict=True):
                    for (_, layer), pair in one.caches.items():
                        for tensor, own in zip(pair, cached[layer], strict=True):
                            tensor[:, :rows] = own[:, :rows].to(tensor)
                    one.kv_len = rows
                made.append(torch.cat([batch.step(ids).clone() for ids in self._forced]))
            self._models = made[0], made[1]
        return self._models

    def _replays(self, runner: Runner, kv: int) -> int:
        """How many fill a block; warms up on the way. The emulator's one is long enough."""
        if self._device.type != "cuda":
            return 1
        step_ms = statistics.median(self._spent(runner, kv, FEWEST))
        runner.program.check()
        return max(FEWEST, min(MOST, math.ceil(BLOCK_MS / max(step_ms, 1e-3))))

    def _spent(self, runner: Runner, kv: int, count: int) -> list[float]:
        self._aim(runner, kv)
        return self._clock.spent(Contestant("", runner.replay.replay), count)

    def _aim(self, runner: Runner, kv: int) -> None:
        if runner.kv != kv:
            self._set_inputs(runner, kv, self._ids)
            runner.kv = kv

    def _set_inputs(self, runner: Runner, kv: int, ids: Sequence[int]) -> None:
        runner.program.set_chain(kv, ids)

    def _runner(self, kernel: Kernel) -> Runner:
        """The kernel, loaded; those that were not used for longest make room."""
        found = self._runners.pop(kernel.key, None)
        if found is None:
            layout = json.dumps(kernel.manifest["pack"])
            if layout not in self._arenas:
                self._arenas[layout] = pack_weights(kernel.manifest, TensorSource(self._weights), str(self._device), progress=False)
            options: Mapping[str, Any] = {"cubin": kernel.cubin, "kv": self._kv}
            program = Program(kernel.manifest, kernel.source, str(self._device), self._arenas[layout], **options)
            found = Runner(program, program.capture())
            while len(self._runners) >= LOADED:
                self._runners.popitem(last=False)
        self._runners[kernel.key] = found
        return found

    def _tokens(self, count: int) -> list[int]:
        ids: list[int] = torch.randint(0, self._graph.vocab, (count,), generator=self._random).tolist()
        return ids

    def _cached_rows(self) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Of each sequence, random keys and values of every layer, each (kv_heads, rows, head_dim) bf16."""
        op = next((op for op in self._graph.ops if isinstance(op, Attention)), None)
        if op is None:
            return [[] for _ in range(self._sequences)]
        shape = (op.kv_heads, max(self._lengths), op.head_dim)
        chance = torch.Generator(self._device).manual_seed(SEED)

        def layer() -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = torch.randn((2, *shape), generator=chance, device=self._device).bfloat16()
            return keys, values

        return [[layer() for _ in range(self._graph.layers)] for _ in range(self._sequences)]

    def _fill(self, program: Program) -> None:
        """The cached rows, as they were at the beginning."""
        for sequence, cached in enumerate(self._rows):
            for layer, (keys, values) in enumerate(cached):
                KvCache(program.manifest, program.buffers["kv"], sequence).write(layer, keys, values)


@contextmanager
def _judged() -> Iterator[None]:
    """What a kernel does wrong is Unfit; anything else is not the kernel's, and passes through."""
    try:
        yield
    except MegakernelHang as hang:
        raise Unfit(HUNG, str(hang)) from hang
    except MegadslError as refused:
        if refused.code in (CALL_FAILED, GPU_BUSY):  # then this process is of no more use
            raise
        raise Unfit(REFUSED, refused.diagnostics[0].message, refused.code) from refused
