"""A model under many schedules in the emulator: races, hangs, faults, and results that depend on the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megadsl.build.host import DETECT
from megadsl.emulate import LaunchReport
from megadsl.emulate.abi import Policy
from megadsl.emulate.explore import Run
from megadsl.runtime.pack import pack_weights
from megadsl.runtime.program import Program
from megadsl.runtime.weights import random_weights

STEPS = 3
WEIGHTS_SEED = 3


class WrongResult(Exception):
    """The logits of one schedule differ from those of the round robin without the detector."""


@dataclass(frozen=True)
class Subject:
    """What :func:`megadsl.emulate.explore.explore` runs: a compiled kernel by its parts, so that processes can be given it.

    ``manifest`` and ``source`` are the compiler's, for a few blocks. Calling it builds the kernel with the race detector
    and gives a Run: ``STEPS`` launches of as many random tokens as the kernel takes, on random weights.
    """

    manifest: dict[str, object]
    source: str

    def __call__(self) -> Run:
        arena = pack_weights(self.manifest, random_weights(self.manifest, WEIGHTS_SEED), "cpu", progress=False, cache=False)
        plain = Program(self.manifest, self.source, "cpu", arena)
        watched = Program(self.manifest, self.source, "cpu", arena, defines={DETECT: "1"})
        expected = [logits for logits, _ in self._steps(plain)]

        def launches(seed: int, policy: Policy) -> Iterator[LaunchReport]:
            watched.seed, watched.policy = seed, policy
            for step, (logits, report) in enumerate(self._steps(watched)):
                yield report
                if not torch.equal(logits, expected[step]):
                    raise WrongResult(f"step {step}: {int((logits != expected[step]).sum())} logits are not those of the round robin")

        return launches

    def _steps(self, program: Program) -> Iterator[tuple[torch.Tensor, LaunchReport]]:
        tokens, vocab = int(str(self.manifest["tokens"])), int(str(self.manifest["vocab"]))
        random = torch.Generator().manual_seed(WEIGHTS_SEED)
        program.reset()
        for step in range(STEPS):
            rows = step * tokens
            ids = torch.randint(0, vocab, (tokens,), generator=random).tolist()
            program.control.set_inputs(rows, ids, list(range(rows, rows + tokens)), [(2 << i) - 1 for i in range(tokens)])
            program.logits.fill_(float("nan"))
            program.launch()
            assert program.report is not None
            yield program.logits.clone(), program.report
