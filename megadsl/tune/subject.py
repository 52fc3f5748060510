"""What is tuned, and how a point of the search becomes a kernel. Brings no torch: every process that builds imports it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megadsl.build.host import build_library
from megadsl.build.nvcc import NVCC_FAILED, build_cubin
from megadsl.diagnostics import MegadslError
from megadsl.driver import Compiled, compile_model, load_model
from megadsl.dsl.chosen import choose
from megadsl.dsl.overrides import Decision, Override, Overrides, SetPoll, SetRing, SetSync, recorded
from megadsl.entries import digest
from megadsl.machine import machine
from megadsl.resources import include
from megadsl.runtime.contest_kinds import REFUSED, Kernel
from megadsl.tune.bench import NOT_BUILT, Built, Failed
from megadsl.tune.effects import Scene, ends
from megadsl.tune.space import Point, rounding

EMULATOR = "cpu"


@dataclass(frozen=True)
class Subject:
    """What is tuned: a model with a number of tokens, of sequences and of rows of each KV cache, compiled for ``device`` ("cuda",
    "cpu": the emulator) from the schedule that ``records`` make of the default one."""

    model: str
    config: Path | None
    tokens: int
    max_kv: int
    blocks: int | None
    arch: str
    device: str
    records: tuple[Override, ...]
    sequences: int = 1
    formats: str | None = None

    @staticmethod
    def of(
        model: str,
        config: Path | None,
        tokens: int,
        max_kv: int,
        blocks: int | None,
        arch: str,
        device: str,
        schedule: str | None,
        sequences: int = 1,
        formats: str | None = None,
    ) -> Subject:
        """From the ``schedule`` that :func:`compile_model` would take. Raises MegadslError."""
        name, kernel, _, rows = load_model(model, config, max_kv)
        chosen = choose(schedule, name, kernel, arch, tokens, sequences, as_measured=not formats)
        own = Subject(model, config, tokens, rows, blocks, arch, device, chosen.overrides.records, sequences, formats)
        found = own.compiled()
        return replace(own, records=tuple(recorded(_named(d, found)) for d in chosen.overrides.decisions()))

    def compiled(self, added: Sequence[Override] = ()) -> Compiled:
        """With these on top. Raises MegadslError."""
        return compile_model(
            self.model,
            config=self.config,
            arch=self.arch,
            tokens=self.tokens,
            max_kv=self.max_kv,
            sequences=self.sequences,
            blocks=self.blocks,
            formats=self.formats,
            schedule=Overrides(self.arch, (*self.records, *added)),
        )

    def scene(self, found: Compiled) -> Scene:
        return Scene(found.graph, found.schedule, machine(self.arch))


def _named(decision: Decision, found: Compiled) -> Decision:
    """By the name that the tuner uses: a ring's own, not its role's; of a value's producers the last; no reader of it."""
    first, *rest = decision.subject or ("",)
    if decision.record is SetRing:
        return replace(decision, subject=(next((ring.name for role, ring in found.schedule.rings if first == role), first),))
    if decision.record is SetSync and rest != [first]:
        value = found.graph.op(first).out
        return replace(decision, subject=(next(e.producer for e in found.schedule.edges if e.value == value),))
    if decision.record is SetPoll and rest != [first]:
        value = found.graph.op(first).out
        of = next(e for e in found.schedule.edges if e.value == value)
        return replace(decision, subject=ends(found.graph, of.value, of.producer))
    return decision


@dataclass(frozen=True)
class Build:
    """Compiles and builds one point, for a GPU of the architecture ``on``; the processes that build are given it."""

    subject: Subject
    on: str | None = None

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
        cubin = build_cubin(found.source, subject.arch, [include()], {}, on=self.on)
        return replace(built, kernel=replace(kernel, cubin=cubin.path), registers=cubin.registers, spill_bytes=cubin.spill_bytes)
