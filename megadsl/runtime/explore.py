"""A model under many schedules in the emulator: races, hangs, faults, and results that depend on the schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megadsl.build.host import DETECT
from megadsl.emulate import LaunchReport
from megadsl.emulate.abi import Policy
from megadsl.emulate.explore import Run
from megadsl.lower.shape import CHUNK_ROWS
from megadsl.runtime.control import ADVANCE
from megadsl.runtime.pack import pack_weights
from megadsl.runtime.program import Program
from megadsl.runtime.weights import WeightSource, random_weights

WEIGHTS_SEED = 3
UNEVEN = 17  # rows: a chunk and one more
STEPS = 4  # of the last launch: all that a cached row and its copies in another block need, see Subject


class WrongResult(Exception):
    """What one schedule computed differs from what the round robin without the detector did."""


@dataclass(frozen=True)
class Inputs:
    """What a launch is given; None: what the launch before it has prepared on the device."""

    kv_len: int
    ids: tuple[int, ...]
    flags: int = 0
    steps: int = 1


@dataclass(frozen=True)
class Outcome:
    """Everything that a launch leaves behind: logits fp32, the KV arena and the control block's words."""

    logits: torch.Tensor
    kv: torch.Tensor
    control: torch.Tensor

    def difference(self, other: Outcome) -> str:
        """What differs, "" for nothing. A NaN is as good as any other: compilers may swap the operands of a sum."""
        same = (self.logits == other.logits) | (self.logits.isnan() & other.logits.isnan())
        found = [f"{int((~same).sum())} logits"] if not bool(same.all()) else []
        for what, a, b in (("bytes of the KV cache", self.kv, other.kv), ("words of the control block", self.control, other.control)):
            if not torch.equal(a, b):
                found.append(f"{int((a != b).sum())} {what}")
        return ", ".join(found)


@dataclass(frozen=True)
class Subject:
    """A compiled kernel by its parts, so that processes can be given it, and what is done with it.

    ``manifest`` and ``source`` are the compiler's, for a few blocks. Weights are random, but for the last row of the embedding:
    all ones, the bits that an exchange may take for an empty slot. Cached rows are random. Launches: an empty cache; a cache of
    several chunks; fewer tokens than the kernel takes, so that some rows are zeros; a launch that prepares the next one itself,
    and that one; the row of all ones; where the kernel can, four steps whose rows fill a chunk and begin the next, so that
    another block then copies what one has appended: of several tokens in the first step, and another block copies in the second, of one
    in the third. Calling it builds the kernel with the race detector and gives a Run for :func:`megadsl.emulate.explore.explore`.
    """

    manifest: dict[str, Any]
    source: str

    def __call__(self) -> Run:
        arena = self.weights()
        expected = [outcome for outcome, _ in self.launches(self.program(arena, {}))]
        watched = self.program(arena, {DETECT: "1"})

        def run(seed: int, policy: Policy) -> Iterator[LaunchReport]:
            watched.seed, watched.policy = seed, policy
            for step, (outcome, report) in enumerate(self.launches(watched)):
                yield report
                if difference := outcome.difference(expected[step]):
                    raise WrongResult(f"launch {step}: {difference} are not those of the round robin")

        return run

    def weights(self) -> torch.Tensor:
        """The packed arena of this subject's weights."""
        return pack_weights(self.manifest, _Spiked(self.manifest), "cpu", progress=False, cache=False)

    def program(self, arena: torch.Tensor, defines: Mapping[str, str]) -> Program:
        return Program(self.manifest, self.source, "cpu", arena, defines=defines)

    def inputs(self) -> list[Inputs | None]:
        tokens, vocab, rows = (int(self.manifest[key]) for key in ("tokens", "vocab", "max_kv"))
        random = torch.Generator().manual_seed(WEIGHTS_SEED)

        def some(count: int) -> tuple[int, ...]:
            return tuple(torch.randint(0, vocab - 1, (count,), generator=random).tolist())

        full = max(0, min(37, rows - 4 * tokens))
        fewer = max(1, tokens - 1)
        after = full + tokens + fewer
        border = CHUNK_ROWS - 1 if tokens == 1 else CHUNK_ROWS + 1 - tokens
        return [
            Inputs(0, some(tokens)),
            Inputs(full, some(tokens)),
            Inputs(full + tokens, some(fewer)),
            Inputs(after, some(tokens), ADVANCE),
            None,
            Inputs(after + tokens, (vocab - 1,)),
            *([Inputs(max(0, min(border, rows - tokens - STEPS)), some(tokens), steps=STEPS)] if self.manifest["several_steps"] else []),
        ]

    def launches(self, program: Program) -> Iterator[tuple[Outcome, LaunchReport]]:
        """Run the launches of :meth:`inputs`, each on outputs that were poisoned before."""
        self.begin(program)
        for inputs in self.inputs():
            yield self.launch(program, inputs)

    def begin(self, program: Program) -> None:
        """What the first launch finds: a fresh program whose cached rows are random."""
        program.reset()
        if program.kv is not None:
            random = torch.Generator().manual_seed(WEIGHTS_SEED)
            cache = program.buffers["kv"].view(torch.bfloat16)
            cache.copy_(torch.randn(cache.shape, generator=random))

    def launch(self, program: Program, inputs: Inputs | None) -> tuple[Outcome, LaunchReport]:
        """One of the launches, behind those before it."""
        if inputs is not None:
            # of a batch, sequences of other lengths beside the first
            lens = [max(0, inputs.kv_len - UNEVEN * i) for i in range(self.manifest["sequences"])]
            program.set_chain(lens, inputs.ids, inputs.flags)
            program.set_steps(inputs.steps)
        program.logits.fill_(float("nan"))
        program.launch()
        assert program.report is not None
        return Outcome(program.logits.clone(), program.buffers["kv"].clone(), program.control.words.clone()), program.report


class _Spiked(WeightSource):
    """Random weights whose first embedding's last row is all ones."""

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        self._random = random_weights(manifest, WEIGHTS_SEED)
        tables = (record["sources"][0]["weight"] for record in manifest["pack"] if record["kind"] == "table")
        self._table = next(tables, None)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._random.shapes()

    def load(self, name: str) -> torch.Tensor:
        tensor = self._random.load(name)
        if name == self._table:
            tensor.view(torch.int16)[-1] = -1
        return tensor
