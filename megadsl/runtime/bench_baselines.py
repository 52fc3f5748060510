"""What the megakernel is measured beside: the same model as a plain torch program, as it is and through torch.compile."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from megadsl.reference import ATTENTION_FORMS, PlainModel
from megadsl.reference.compare import Error
from megadsl.reference.plain import Step
from megadsl.runtime.bench_kinds import Baseline
from megadsl.runtime.bench_timing import Clock, Contestant

FACTOR = 2.0
_TRIAL_REPLAYS = 20  # enough to choose between forms of attention
_AGAIN_S = 5.0
_FUSIBLE = "matmul"  # the form of attention that is made of operators which torch.compile can fuse
_FAILURE_TEXT = 400  # characters of a failure that are kept

# Options of torch.compile by name, in the order in which they are tried. "reduce-overhead" is the default mode in CUDA graphs
# that torch manages and copies inputs into; here each is captured as it is, which costs a replay less.
MODES: dict[str, Mapping[str, Any]] = {
    "compile default": {},
    "compile max-autotune": {"mode": "max-autotune-no-cudagraphs"},
}


@dataclass(frozen=True)
class Prepared:
    """A baseline that is ready to be timed, or why it is not (``failure``).

    ``attention`` is the form it uses, ``prepare_s`` what compiling, warming up and capturing took, ``error`` that of its logits.
    """

    name: str
    attention: str
    prepare_s: float
    failure: str | None = None
    error: Error | None = None
    run: Callable[[], object] | None = None

    def contestant(self) -> Contestant | None:
        return None if self.run is None else Contestant(self.name, self.run)


@dataclass(frozen=True)
class Task:
    """What every baseline has to do: a step of ``model``, whose inputs and caches are set, with ``rows`` rows in use after it.

    Its logits should be near ``fp32``, the oracle's, as ``bf16``, EagerModel's, are; each (n, vocab).
    """

    model: PlainModel
    rows: int
    bf16: torch.Tensor
    fp32: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.model.ids.device

    def step(self, form: str) -> Step:
        return self.model.step(self.rows, form)

    def judge(self, logits: torch.Tensor) -> tuple[Error, str | None]:
        """The error against fp32, and what is wrong with it: beyond FACTOR times EagerModel's it is no longer the same model."""
        found, known = Error.of(logits, self.fp32), Error.of(self.bf16, self.fp32)
        wrong = f"its logits are wrong: error {found} against fp32, where torch bf16 op by op has {known}"
        return found, None if found.within(FACTOR, known) else wrong


class _OutOfTimeError(BaseException):
    """Not an Exception: what compiles catches those and wraps them."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Ends the body with _OutOfTimeError after ``seconds``. Only in the main thread, which alone gets signals."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise _OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)  # again, should a handler of the body swallow it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def prepare(task: Task, which: Baseline, budget_s: float, clock: Clock, replays: int) -> list[Prepared]:
    """The baselines that ``which`` asks for.

    Torch's own kernels use the form of attention that is fastest in at most ``replays`` runs; torch.compile gets that one, then, in what
    is left of ``budget_s`` seconds, the one it can fuse. A failure is one of the results.
    """
    if which in (Baseline.NONE, Baseline.LAUNCHES):
        return []
    torch._dynamo.reset()
    plain, *unfit = _eager(task, clock, min(replays, _TRIAL_REPLAYS))
    if which is Baseline.EAGER_GRAPH:
        return [plain, *unfit]
    until = time.monotonic() + budget_s
    forms = dict.fromkeys((plain.attention, _FUSIBLE))
    compiled = [_compiled(task, mode, form, until - time.monotonic()) for form in forms for mode in MODES]
    return [plain, *unfit, *compiled]


def _eager(task: Task, clock: Clock, replays: int) -> list[Prepared]:
    """Torch's own kernels with the form of attention that is fastest, then the forms that failed."""
    where = "eager in a CUDA graph" if task.device.type == "cuda" else "eager"
    tried = [_attempt(task, task.step(form), f"{where}, {form} attention", form) for form in ATTENTION_FORMS]
    ready = [contestant for trial in tried if (contestant := trial.contestant()) is not None]
    unfit = [trial for trial in tried if trial.failure is not None]
    if not ready:
        return unfit
    times = clock.times(ready, replays, rounds=2)
    chosen = min(times, key=lambda each: times[each].median)
    return [trial for trial in tried if trial.name == chosen] + unfit


def _compiled(task: Task, mode: str, form: str, budget_s: float) -> Prepared:
    name = f"{mode}, {form} attention"
    if budget_s <= 0:
        return Prepared(name, form, 0.0, failure="not tried: the time for compiling was used up")
    began = time.monotonic()
    try:
        with at_most(budget_s):
            return _attempt(task, torch.compile(task.step(form), fullgraph=True, dynamic=False, **MODES[mode]), name, form)
    except _OutOfTimeError:
        return Prepared(name, form, time.monotonic() - began, failure=f"not compiled in {budget_s:.0f} s")


def _attempt(task: Task, step: Step, name: str, form: str) -> Prepared:
    """Warm up, capture, run once, judge. Whatever torch raises is the result: a baseline that does not run is no reason to stop."""
    began = time.monotonic()
    try:
        run, logits = _captured(step, task.device)
        run()
        error, wrong = task.judge(logits())
    except Exception as problem:
        text = " ".join(f"{type(problem).__name__}: {problem}".split())[:_FAILURE_TEXT]
        return Prepared(name, form, time.monotonic() - began, text)
    return Prepared(name, form, time.monotonic() - began, wrong, error, run if wrong is None else None)


def _captured(step: Step, device: torch.device) -> tuple[Callable[[], object], Callable[[], torch.Tensor]]:
    """A function that runs the step, on a GPU as a CUDA graph; and one that gives the logits of its last run."""
    newest: list[torch.Tensor] = []

    def run() -> None:
        with torch.no_grad():
            newest[:] = step()[:1]

    def logits() -> torch.Tensor:
        return newest[0].float()

    if device.type == "cpu":
        return run, logits
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()

    kept = (graph, step)  # the graph runs kernels that belong to the compiled step

    def replay() -> None:
        kept[0].replay()

    return replay, logits
