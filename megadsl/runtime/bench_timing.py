"""How long things take: interleaved rounds, on a GPU by events around each run, in the emulator by the wall clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megadsl.machine import Machine
from megadsl.runtime.program import Program

ROUNDS = 10
EVENTS, WALL = "CUDA events around each replay", "wall clock of the emulator, which says nothing about a GPU"
_WARM_UP = 3
_EXCEEDS = 4  # weights of so many times L2 leave nothing in it for the next run


@dataclass(frozen=True)
class Spread:
    """Milliseconds: the median with the 10th and 90th percentile."""

    p10: float
    median: float
    p90: float

    @staticmethod
    def of(times: Sequence[float]) -> Spread:
        """Of at least two times."""
        deciles = statistics.quantiles(times, n=10, method="inclusive")
        return Spread(deciles[0], statistics.median(times), deciles[-1])


@dataclass(frozen=True)
class Contestant:
    """What is timed: ``run`` enqueues one step. ``after``, which is not timed, is called after each run."""

    name: str
    run: Callable[[], object]
    after: Callable[[], object] = lambda: None


class Clock:
    """Times contestants side by side on one device.

    Where the ``read_bytes`` that a step reads do not exceed L2 by far, L2 is filled with other bytes before each run:
    in use, a step finds what the work between two steps has left.
    """

    def __init__(self, device: torch.device, on: Machine, read_bytes: int) -> None:
        self._device = device
        self.name = EVENTS if device.type == "cuda" else WALL
        self.clears_l2 = device.type == "cuda" and read_bytes < _EXCEEDS * on.l2_bytes
        self._other = torch.zeros(2 * on.l2_bytes, dtype=torch.uint8, device=device) if self.clears_l2 else None

    def times(self, contestants: Sequence[Contestant], replays: int, rounds: int = ROUNDS) -> dict[str, Spread]:
        """By name, over at least ``replays`` runs each; in every round each contestant has its share of them, one after the other.

        So what drifts (clock rates, heat) meets all of them alike.
        """
        rounds = min(rounds, replays)
        share = -(-replays // rounds)
        found: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
        for contestant in contestants:
            self.spent(contestant, _WARM_UP if self._device.type == "cuda" else 1)
        for _ in range(rounds):
            for contestant in contestants:
                found[contestant.name] += self.spent(contestant, share)
        return {name: Spread.of(times) for name, times in found.items()}

    def spent(self, contestant: Contestant, count: int) -> list[float]:
        """Milliseconds of each of ``count`` runs, one after the other."""
        return self._by_events(contestant, count) if self._device.type == "cuda" else self._by_wall(contestant, count)

    def _by_events(self, contestant: Contestant, count: int) -> list[float]:
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for begin, end in marks:
            if self._other is not None:
                self._other.zero_()
            begin.record()
            contestant.run()
            end.record()
            contestant.after()
        torch.cuda.synchronize(self._device)
        return [begin.elapsed_time(end) for begin, end in marks]

    def _by_wall(self, contestant: Contestant, count: int) -> list[float]:
        spent = []
        for _ in range(count):
            began = time.perf_counter()
            contestant.run()
            spent.append(1e3 * (time.perf_counter() - began))
            contestant.after()
        return spent


def host_microseconds(program: Program, calls: int = 200) -> float | None:
    """Median time that the host spends in ``Program.launch`` while the GPU is idle, in microseconds; None in the emulator."""
    if program.device.type != "cuda":
        return None
    spent = []
    for _ in range(calls):
        torch.cuda.synchronize(program.device)
        began = time.perf_counter()
        program.launch()
        spent.append(1e6 * (time.perf_counter() - began))
    program.check()
    return statistics.median(spent)
