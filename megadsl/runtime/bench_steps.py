"""Several steps a launch beside as many launches: their times a step, and that they leave the same ids and bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megadsl.diagnostics import error
from megadsl.runtime.bench_timing import Contestant, Spread
from megadsl.runtime.control import ADVANCE, BATCH_CHOSEN, CHOSEN, MOST_SEQUENCES, NEXT_IDS, STEPS_MADE, even
from megadsl.runtime.generate import KV_FULL
from megadsl.runtime.program import Program


@dataclass(frozen=True)
class StepsRow:
    """Milliseconds a step: ``together`` in launches of ``count`` steps, ``apart`` in launches of one. ``failure`` says what was not
    the same: ids, logits or cached rows."""

    count: int
    together: Spread
    apart: Spread
    failure: str | None

    def fields(self) -> dict[str, Any]:
        """As JSON; times in milliseconds a step."""
        spreads = {"ms": self.together.median, "ms_p10": self.together.p10, "ms_p90": self.together.p90}
        return {"steps": self.count, **spreads, "ms_in_launches_of_one": self.apart.median, "failure": self.failure}

    def text(self) -> str:
        """For people, in one line."""
        if self.failure is not None:
            return f"{self.count} steps a launch: failed: {self.failure}"
        gain = 1e3 * (self.apart.median - self.together.median)
        return (
            f"{self.count} steps a launch: {self.together.median:.4f} ms a step ({self.together.p10:.4f}-{self.together.p90:.4f}),"
            f" in {self.count} launches {self.apart.median:.4f} ms: {gain:+.1f} us a step gained; the same ids, logits and cached rows"
        )


class StepsTrial:
    """One kernel twice, on the same weights: ``count`` steps in one launch, and in as many that follow each other in one graph.

    ``make`` gives a program with an empty cache. Raises MK465 or MK466 where its kernel cannot make so many steps a launch.
    """

    def __init__(self, make: Callable[[], Program], count: int) -> None:
        self.count = count
        self.together, self.apart = make(), make()
        self._sequences = int(self.together.manifest["sequences"])
        self.together.set_steps(count)
        self._graphs = self.together.capture(), self.apart.capture(count)
        self._inputs: tuple[int, Sequence[int]] = (0, (0,))

    @property
    def programs(self) -> tuple[Program, Program]:
        return self.together, self.apart

    def begin(self, kv: int, ids: Sequence[int]) -> str | None:
        """Run once each on ``kv`` cached rows, which both hold already; what is not the same then. Raises MK450."""
        rows, max_kv = even(len(ids), self._sequences)[0] + self.count - 1, int(self.together.manifest["max_kv"])
        if kv + rows > max_kv:
            raise error(KV_FULL, max_kv=max_kv, used=kv, more=rows, room=max_kv - kv)
        self._inputs = kv, ids
        for program in self.programs:
            self._rewind(program)
        self.together.launch()
        words, chosen = self.together.check(), []
        for index in range(self.count):
            self.apart.launch()
            own = even(len(ids), self._sequences) if index == 0 else [1] * self._sequences
            now = self.apart.check()
            chosen += [now[NEXT_IDS + sum(own[: i + 1]) - 1] for i in range(self._sequences)]
        for program in self.programs:
            self._rewind(program)
        if self._chosen(words) != chosen:
            return "it chooses other ids"
        logits = [program.logits[: self._sequences].view(torch.int32) for program in self.programs]
        if not torch.equal(*logits):
            return "its logits have other bits"
        return None if torch.equal(self.together.buffers["kv"], self.apart.buffers["kv"]) else "its cached rows have other bits"

    def _chosen(self, words: Sequence[int]) -> list[int]:
        """What a launch has chosen, step by step, of a batch for each sequence."""
        made = words[STEPS_MADE]
        if self._sequences == 1:
            return list(words[CHOSEN : CHOSEN + made])
        return [words[BATCH_CHOSEN + at * MOST_SEQUENCES + i] for at in range(made) for i in range(self._sequences)]

    def contestants(self) -> tuple[Contestant, Contestant]:
        """Each run makes all steps from the same inputs, which are given anew outside of the time."""
        names = f"{self.count} steps a launch", f"{self.count} launches"
        both = zip(names, self.programs, self._graphs, strict=True)
        together, apart = (Contestant(name, graph.replay, partial(self._rewind, program)) for name, program, graph in both)
        return together, apart

    def row(self, times: Mapping[str, Spread], failure: str | None) -> StepsRow:
        """What the contestants' times are a step."""
        together, apart = (_each(times[c.name], self.count) for c in self.contestants())
        return StepsRow(self.count, together, apart, failure)

    def _rewind(self, program: Program) -> None:
        kv, ids = self._inputs
        program.set_chain(kv, ids, ADVANCE)


def _each(times: Spread, count: int) -> Spread:
    return Spread(times.p10 / count, times.median / count, times.p90 / count)
