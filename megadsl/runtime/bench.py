"""The benchmark: step time of a compiled model beside its byte floor, its error beside torch bf16's, and torch's own times.

Weights are random. All that is compared has the same weights, cache contents and token ids, in one process; a time counts only
where the fidelity gate passes.
"""

from __future__ import annotations

import platform
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megadsl.diagnostics import declare, error
from megadsl.ir.schedule import SCOPES
from megadsl.ops.cost import floor_seconds
from megadsl.reference import EagerModel, Gate, PlainModel, ReferenceModel, gate
from megadsl.reference.model import GraphModel
from megadsl.runtime.bench_baselines import Prepared, Task, prepare
from megadsl.runtime.bench_kinds import Baseline
from megadsl.runtime.bench_steps import StepsRow, StepsTrial
from megadsl.runtime.bench_timing import Clock, Contestant, Spread, host_microseconds
from megadsl.runtime.cuda import machine_of
from megadsl.runtime.generate import Compiled
from megadsl.runtime.pack import pack_weights
from megadsl.runtime.program import Program, Replay, resolve_device
from megadsl.runtime.weights import TensorSource, needed, random_weights

NO_ROOM = declare(
    "MK461",
    "{kv} cached rows and the {forced} tokens that the fidelity gate forces do not fit a cache of {max_kv} rows",
    "measure at most {most} cached rows, or compile with a larger max_kv",
)

UNEVEN = declare("MK498", "{count} tokens of {sequences} sequences", "measure as many tokens of each: a multiple of {sequences} in all")

FORCED_TOKENS = 32  # at least so many logits are judged

_SEED = 7


def forced_rows(tokens: int) -> int:
    """Cache rows that the fidelity gate adds with steps of ``tokens`` tokens: at least two steps, and FORCED_TOKENS."""
    return tokens * max(2, -(-FORCED_TOKENS // tokens))


def each_has(tokens: int, sequences: int) -> int:
    """New tokens of each sequence in a step of a batch that is measured. Raises MK498 where they do not have as many."""
    if tokens % sequences:
        raise error(UNEVEN, count=tokens, sequences=sequences)
    return tokens // sequences


@dataclass(frozen=True)
class Row:
    """What was found for one (tokens, kv).

    ``host_us`` is the host's time for one launch without a graph (None in the emulator); ``differ`` counts replays whose logits were
    other bits than the first one's. ``baselines`` have their time, or the reason why there is none; so have ``launches``, our own
    kernels under other launch scopes.
    """

    tokens: int
    kv: int
    gate: Gate
    times: Spread
    floor_ms: float
    replays: int
    differ: int
    host_us: float | None
    baselines: tuple[BaselineRow, ...]
    launches: Mapping[str, BaselineRow] = field(default_factory=dict)
    steps: StepsRow | None = None
    sequences: int = 1

    @property
    def passed(self) -> bool:
        return self.gate.passed and self.differ == 0 and (self.steps is None or self.steps.failure is None)

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest baseline that ran and was right, and its median in milliseconds."""
        ready = [(row.name, row.times.median) for row in self.baselines if row.times is not None]
        return min(ready, key=lambda found: found[1], default=None)

    def fields(self) -> dict[str, Any]:
        """As JSON; times in milliseconds."""
        compared, best = self.gate.tokens.compared, self.best
        return {
            "tokens": self.tokens, "sequences": self.sequences, "kv": self.kv, "gate": self.gate.passed,
            "error": self.gate.ours.mean, "error_max": self.gate.ours.max,
            "error_bf16": self.gate.bf16.mean, "error_bf16_max": self.gate.bf16.max,
            "tokens_equal": compared - len(self.gate.tokens.differing), "tokens_compared": compared,
            **_time_fields(self.times, self.floor_ms), "floor_ms": self.floor_ms,
            "replays": self.replays, "replays_that_differ": self.differ, "host_us_per_launch": self.host_us,
            **{f"one_{s}_a_launch": self.launches[s].fields(self.floor_ms) if s in self.launches else None for s in SCOPES},
            "several_steps_a_launch": None if self.steps is None else self.steps.fields(),
            "baselines": [row.fields(self.floor_ms) for row in self.baselines],
            "best_baseline": None if best is None else best[0],
            "best_baseline_over_ours": None if best is None else best[1] / self.times.median,
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """For people: a line for the kernel, one a baseline."""
        verdict = "passed" if self.passed else "FAILED"
        agreed = self.gate.tokens.compared - len(self.gate.tokens.differing)
        batch = f" of {self.sequences} sequences," if self.sequences > 1 else ""
        host = "" if self.host_us is None else f", host {self.host_us:.1f} us per launch"
        yield (
            f"tokens {self.tokens:>2}{batch} kv {self.kv:>5}: {_times_text(self.times)},"
            f" {self.times.median / self.floor_ms:.3f} x floor{host};"
            f" gate {verdict}: {self.gate.ours.mean:.3e} against bf16 {self.gate.bf16.mean:.3e},"
            f" tokens {agreed}/{self.gate.tokens.compared}, replays that differ {self.differ}"
        )
        if self.steps is not None:
            yield f"    {self.steps.text()}"
        for row in (*self.launches.values(), *self.baselines):
            yield f"    {row.name}: {row.text(self.times.median)}"


@dataclass(frozen=True)
class BaselineRow:
    """One baseline with its time beside ours, None where it failed."""

    of: Prepared
    times: Spread | None

    @property
    def name(self) -> str:
        return self.of.name

    def fields(self, floor_ms: float) -> dict[str, Any]:
        timed = {} if self.times is None else _time_fields(self.times, floor_ms)
        error = None if self.of.error is None else self.of.error.mean
        return {
            "name": self.name, "attention": self.of.attention, "prepare_s": round(self.of.prepare_s, 1),
            **timed, "error": error, "failure": self.of.failure,
        }  # fmt: skip

    def text(self, ours_ms: float) -> str:
        if self.times is None:
            return f"failed: {self.of.failure}"
        return f"{_times_text(self.times)}, {self.times.median / ours_ms:.3f} x ours (ready after {self.of.prepare_s:.0f} s)"


def _times_text(times: Spread) -> str:
    return f"{times.median:.4f} ms ({times.p10:.4f}-{times.p90:.4f})"


def _time_fields(times: Spread, floor_ms: float) -> dict[str, float]:
    return {"ms": times.median, "ms_p10": times.p10, "ms_p90": times.p90, "of_floor": times.median / floor_ms}


@dataclass(frozen=True)
class Timed:
    """A step by itself: milliseconds, logits (tokens, vocab) fp32, the bytes of the trace buffer."""

    ms: float
    logits: torch.Tensor
    trace: npt.NDArray[np.uint8]


class Subject:
    """One compiled kernel beside fp32 oracle, torch bf16 and the plain torch model, all on the same weights and cache contents.

    Steps have exactly the manifest's ``tokens``, of a batch as many of each sequence (else MK498). ``device`` is "cuda", torch's
    current GPU, or "cpu", the emulator; ``options`` go to the Program. ``apart`` is the same model under other launch scopes, to be
    timed beside it, or why it does not compile. ``steps`` > 1: launches of so many steps are timed as well,
    beside as many launches. Turns TF32 off for the process.
    Raises what Program does.
    """

    def __init__(
        self,
        compiled: Compiled,
        device: str,
        options: Mapping[str, Any] | None = None,
        apart: Mapping[str, Compiled | str] | None = None,
        steps: int = 1,
    ) -> None:
        torch.set_float32_matmul_precision("highest")  # the oracle is fp32
        self.manifest, self.graph, self.count = compiled.manifest, compiled.graph, int(compiled.manifest["tokens"])
        self.max_kv = int(self.manifest["max_kv"])
        self.device = resolve_device(device, self.manifest["arch"])
        where = str(self.device)
        source = random_weights(self.manifest, _SEED, where)
        weights = {name: source.load(name) for name in needed(self.manifest)}
        self.sequences = int(self.manifest["sequences"])
        each_has(self.count, self.sequences)
        arena = pack_weights(self.manifest, TensorSource(weights), where, progress=False)
        self.program = Program(self.manifest, compiled.source, where, arena, **dict(options or {}))
        self.apart: dict[str, Program | str] = {
            scope: made if isinstance(made, str) else Program(made.manifest, made.source, where, arena)
            for scope, made in (apart or {}).items()
        }
        again = partial(Program, self.manifest, compiled.source, where, arena, **dict(options or {}))
        self.steps = StepsTrial(again, steps) if steps > 1 else None
        self._rows = 0  # in each cache
        self.oracle = EachSequence(ReferenceModel(self.graph, weights, self.max_kv, "fp32", where), self.sequences)
        self.bf16 = EachSequence(EagerModel(self.graph, weights, self.max_kv, where), self.sequences)
        self.plain = PlainModel(self.graph, weights, self.max_kv, self.count, where, self.sequences)
        self._random = torch.Generator(self.device)
        self.machine = machine_of(self.manifest["arch"], self.device)
        self.clock = Clock(self.device, self.machine, self.manifest["weight_bytes"])

    def floor_ms(self, kv: int) -> float:
        """Milliseconds that the bytes of a step on ``kv`` cached rows take."""
        return 1e3 * floor_seconds(self.graph, self.machine, kv * self.sequences)

    def fill(self, rows: int) -> None:
        """``rows`` random rows in every cache, the same for all; what they are depends on ``rows`` alone."""
        self._random.manual_seed(1000 + rows)
        self.program.reset()
        programs = [self.program, *(program for program in self.apart.values() if isinstance(program, Program))]
        programs += self.steps.programs if self.steps is not None else ()
        for program in programs:
            if program.pages is not None:  # as they lie when sequences have come and gone
                program.pages.clear()
                random.Random(rows).shuffle(program.pages.free)
            program.reserve([rows] * self.sequences)
        for index, (oracle, bf16) in enumerate(zip(self.oracle.models, self.bf16.models, strict=True)):
            for (cache, layer), (keys, values) in oracle.caches.items():
                shape = keys[:, :rows].shape
                k, v = (torch.randn(shape, generator=self._random, device=self.device).bfloat16() for _ in range(2))
                its, plain = bf16.caches[cache, layer], self.plain.caches[cache, layer]
                for all_of_them, new in (((keys, its[0], plain[0][index]), k), ((values, its[1], plain[1][index]), v)):
                    for tensor in all_of_them:
                        tensor[:, :rows] = new.to(tensor)
                for program in programs:
                    program.rows(index).write(layer, k, v)
            oracle.kv_len = bf16.kv_len = rows
        self._rows = rows

    def judge(self) -> Gate:
        """The fidelity gate over teacher-forced steps of random tokens, from the rows that are in the caches."""
        found: list[tuple[torch.Tensor, ...]] = []
        for _ in range(forced_rows(self.count // self.sequences) * self.sequences // self.count):
            ids = self._ids()
            self.program.logits.fill_(float("nan"))
            self.program.set_chain(self._rows, ids)
            self.program.launch()
            self.program.check()
            self._rows += self.count // self.sequences
            found.append((self.program.logits[: self.count].clone(), self.bf16.step(ids), self.oracle.step(ids)))
        ours, bf16, fp32 = (torch.cat(part) for part in zip(*found, strict=True))
        return gate(ours, bf16, fp32)

    def measure(self, kv: int, replays: int, which: Baseline, budget_s: float) -> Row:
        """Judge, then time the step on ``kv`` cached rows beside the baselines, each at least ``replays`` times.

        Raises MK461 when the cache is too small for the gate, MegakernelHang, MK449.
        """
        forced = forced_rows(self.count // self.sequences)
        if kv + forced > self.max_kv:
            raise error(NO_ROOM, kv=kv, forced=forced, max_kv=self.max_kv, most=max(0, self.max_kv - forced))
        self.fill(kv)
        verdict = self.judge()
        self.fill(kv)
        ids = self._ids()
        self.plain.set_inputs(ids, kv)
        task = Task(self.plain, kv + self.count // self.sequences, self.bf16.step(ids), self.oracle.step(ids))
        baselines = prepare(task, which, budget_s, self.clock, replays)
        program = self.program
        ours, differ = self._contestant(self._ready(program, ids, kv))
        apart = {} if which is Baseline.NONE else {scope: self._apart(scope, ids, kv) for scope in self.apart}
        rivals = [rival for each in (*apart.values(), *baselines) if (rival := each.contestant()) is not None]
        wrong = None if self.steps is None else self.steps.begin(kv, ids)
        rivals += () if self.steps is None else self.steps.contestants()
        times = self.clock.times([ours, *rivals], replays)
        program.check()
        rows = tuple(BaselineRow(baseline, times.get(baseline.name)) for baseline in baselines)
        launches = {scope: BaselineRow(each, times.get(each.name)) for scope, each in apart.items()}
        steps = None if self.steps is None else self.steps.row(times, wrong)
        host_us = host_microseconds(program)
        floor, n = self.floor_ms(kv), self.sequences
        return Row(self.count, kv, verdict, times[ours.name], floor, replays, int(differ), host_us, rows, launches, steps, n)

    def timed(self, kv: int, replays: int) -> Timed:
        """The step on ``kv`` cached rows, alone: its median time, its logits, and its timeline where the build leaves one."""
        self.fill(kv)
        program = self.program
        ours, _ = self._contestant(self._ready(program, self._ids(), kv))
        times = self.clock.times([ours], replays)
        program.check()
        return Timed(times[ours.name].median, program.logits.cpu().clone(), program.buffers["trace"].cpu().numpy().copy())

    def _ids(self) -> list[int]:
        ids: list[int] = torch.randint(0, self.manifest["vocab"], (self.count,), generator=self._random, device=self.device).tolist()
        return ids

    def _ready(self, program: Program, ids: Sequence[int], kv: int) -> Replay:
        """The step on these ids, captured: it may be replayed any number of times, since it overwrites what it has appended."""
        program.set_chain(kv, ids)
        return program.capture()

    def _apart(self, scope: str, ids: Sequence[int], kv: int) -> Prepared:
        """The step under another launch scope, behind the kernel's first replay: it has to leave the same bits."""
        program, began = self.apart[scope], time.monotonic()
        if isinstance(program, str):
            return Prepared(f"one {scope} a launch", "ours", 0.0, program)
        step = self._ready(program, ids, kv)
        step.replay()
        program.check()
        same = torch.equal(program.logits.view(torch.int32), self.program.logits.view(torch.int32))
        graph = "in a CUDA graph of dependent launches" if self.device.type == "cuda" else "launch by launch"
        name = f"one {scope} a launch ({len(program.manifest['launches'])}), {graph}"
        wrong = None if same else "its logits have other bits than the first kernel's"
        return Prepared(name, "ours", time.monotonic() - began, wrong, run=step.replay if same else None)

    def _contestant(self, step: Replay) -> tuple[Contestant, torch.Tensor]:
        """The kernel, and a count of its replays whose logits are other bits than those of a first one."""
        program = self.program
        step.replay()
        program.check()
        first = program.logits.view(torch.int32).clone()
        differ = torch.zeros((), dtype=torch.int64, device=self.device)

        def compare() -> None:
            differ.add_((program.logits.view(torch.int32) != first).any())

        return Contestant("megadsl", step.replay, compare), differ


class EachSequence:
    """A model for each sequence, all on the same weights: a step is one of each, of as many tokens."""

    def __init__(self, model: GraphModel, sequences: int) -> None:
        self.models = [model, *(model.another() for _ in range(sequences - 1))]

    def step(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits (n, vocab) in the order of ``ids``, which are those of the first sequence, then of the next."""
        own = len(ids) // len(self.models)
        return torch.cat([model.step(ids[i * own : (i + 1) * own]) for i, model in enumerate(self.models)])


def describe(subject: Subject) -> dict[str, Any]:
    """What all rows of a run share, for its JSON: where and how it was measured."""
    gpu = subject.device.type == "cuda"
    return {
        "model": subject.manifest["model"], "arch": subject.manifest["arch"], "weights": "random",
        "device": torch.cuda.get_device_name(subject.device) if gpu else f"emulator on {platform.machine()}",
        "torch": torch.__version__, "cuda": torch.version.cuda if gpu else None,
        "kv_page": subject.manifest["kv_page"], "clock": subject.clock.name, "l2_cleared": subject.clock.clears_l2,
    }  # fmt: skip
