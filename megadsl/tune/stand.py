"""The bench that is real: candidates are compiled by the compiler, built side by side, and measured on a GPU or in the emulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from megadsl.build.gpus import fingerprint
from megadsl.build.toolchain import find_tool
from megadsl.runtime.contest import Contest
from megadsl.runtime.contest_kinds import Unfit
from megadsl.runtime.cuda import gpu_for
from megadsl.tune.bench import NOT_BUILT, Built, Failed, Times
from megadsl.tune.processes import Builders, Worker
from megadsl.tune.space import Point
from megadsl.tune.subject import EMULATOR, Build, Subject
from megadsl.version import __version__

COMPARE_S, VERIFY_S = 120.0, 300.0  # longer, and the measuring process is ended


class Stand:
    """A Bench of ``subject``: ``processes`` that build, and one that measures with ``lengths`` cached rows. Close it. Raises MK440 to MK443
    where the GPU cannot run its kernels, before anything is built."""

    def __init__(self, subject: Subject, lengths: Sequence[int], processes: int, factor: float = 1.05) -> None:
        self._subject, self._lengths, self._factor = subject, tuple(lengths), factor
        on = None if subject.device == EMULATOR else gpu_for(subject.arch)
        self._builders: Builders[Point, Built | Failed] = Builders(Build(subject, on), processes, partial(Failed, NOT_BUILT))
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

    def twin(self, built: Built, number: int) -> Built:
        return replace(built, kernel=replace(built.kernel, key=f"{built.key} twin {number}"))

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
