"""The bench that is real: candidates are compiled by the compiler, built side by side, and measured on a GPU or in the emulator."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megadsl.build.cache import digest
from megadsl.build.gpus import fingerprint
from megadsl.build.host import build_library
from megadsl.build.nvcc import NVCC_FAILED, build_cubin
from megadsl.build.toolchain import find_tool
from megadsl.diagnostics import MegadslError
from megadsl.driver import Compiled, compile_model, load_model
from megadsl.dsl.chosen import choose
from megadsl.dsl.overrides import Override, Overrides
from megadsl.machine import machine
from megadsl.resources import include
from megadsl.runtime.contest import Contest
from megadsl.runtime.contest_kinds import REFUSED, Kernel, Unfit
from megadsl.tune.bench import NOT_BUILT, Built, Failed, Times
from megadsl.tune.effects import Scene
from megadsl.tune.processes import Builders, Worker
from megadsl.tune.space import Point, rounding
from megadsl.version import __version__

EMULATOR = "cpu"
COMPARE_S, VERIFY_S = 120.0, 300.0  # longer, and the measuring process is ended


@dataclass(frozen=True)
class Subject:
    """What is tuned: a model with a number of tokens and rows of the KV cache, compiled for ``device`` ("cuda", "cpu": the emulator) from
    the schedule that ``records`` make of the default one."""

    model: str
    config: Path | None
    tokens: int
    max_kv: int
    blocks: int | None
    arch: str
    device: str
    records: tuple[Override, ...]

    @staticmethod
    def of(
        model: str, config: Path | None, tokens: int, max_kv: int, blocks: int | None, arch: str, device: str, schedule: str | None
    ) -> Subject:
        """From the ``schedule`` that :func:`compile_model` would take. Raises MegadslError."""
        name, kernel, _, rows = load_model(model, config, max_kv)
        chosen = choose(schedule, name, kernel, arch, tokens)
        return Subject(model, config, tokens, rows, blocks, arch, device, chosen.overrides.records)

    def compiled(self, added: Sequence[Override] = ()) -> Compiled:
        """With these on top. Raises MegadslError."""
        return compile_model(
            self.model,
            config=self.config,
            arch=self.arch,
            tokens=self.tokens,
            max_kv=self.max_kv,
            blocks=self.blocks,
            schedule=Overrides(self.arch, (*self.records, *added)),
        )

    def scene(self, found: Compiled) -> Scene:
        return Scene(found.graph, found.schedule, machine(self.arch))


@dataclass(frozen=True)
class Build:
    """Compiles and builds one point; the processes that build are given it."""

    subject: Subject

    def __call__(self, point: Point) -> Built | Failed:
        try:
            return self._built(point)
        except MegadslError as refused:
            outcome = NOT_BUILT if refused.code == NVCC_FAILED else REFUSED
            return Failed(outcome, refused.diagnostics[0].message, refused.code)
        except Exception as broken:  # a mistake of the compiler's must not end the search
            return Failed(NOT_BUILT, f"{type(broken).__name__}: {broken}")

    def _built(self, point: Point) -> Built:
        subject = self.subject
        found = subject.compiled(point.records)
        kernel = Kernel(digest([found.source, json.dumps(found.manifest, sort_keys=True, default=str)]), found.manifest, found.source)
        built = Built(point, kernel.key, rounding(found.graph, found.schedule), subject.scene(found), kernel)
        if subject.device == EMULATOR:
            build_library(found.source, [include()], {})
            return built
        cubin = build_cubin(found.source, subject.arch, [include()], {})
        return replace(built, kernel=replace(kernel, cubin=cubin.path), registers=cubin.registers, spill_bytes=cubin.spill_bytes)


class Stand:
    """A Bench of ``subject``: ``processes`` that build, and one that measures with ``lengths`` cached rows. Close it."""

    def __init__(self, subject: Subject, lengths: Sequence[int], processes: int, factor: float = 1.05) -> None:
        self._subject, self._lengths, self._factor = subject, tuple(lengths), factor
        self._builders: Builders[Point, Built | Failed] = Builders(Build(subject), processes, partial(Failed, NOT_BUILT))
        self._worker: Worker | None = None

    def build(self, points: Sequence[Point]) -> None:
        self._builders.ahead(points)

    def built(self, point: Point) -> Built | Failed:
        return self._builders.get(point)

    def compare(self, base: Built, candidate: Built, pairs: int, seed: int) -> Times | Failed:
        try:
            ours, theirs = self._measuring(base).call("compare", base.kernel, candidate.kernel, pairs, seed, timeout_s=COMPARE_S)
        except Unfit as unfit:
            return Failed(unfit.outcome, unfit.text, unfit.code)
        return Times(ours, theirs)

    def verify(self, base: Built, candidate: Built) -> Failed | None:
        same = base.rounding == candidate.rounding
        try:
            self._measuring(base).call("verify", base.kernel, candidate.kernel, same, timeout_s=VERIFY_S)
        except Unfit as unfit:
            return Failed(unfit.outcome, unfit.text, unfit.code)
        return None

    def describe(self) -> Mapping[str, object]:
        if self._subject.device == EMULATOR:
            return {"gpu": "emulator", "megadsl": __version__}
        return {**fingerprint(), "nvcc": ".".join(map(str, find_tool("nvcc").release)), "megadsl": __version__}

    def close(self) -> None:
        """End all processes."""
        self._builders.close()
        if self._worker is not None:
            self._worker.close()

    def _measuring(self, base: Built) -> Worker:
        if self._worker is None:
            self._worker = Worker(partial(Contest, self._subject.device, base.scene.graph, base.kernel, self._lengths, self._factor))
        return self._worker
