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
from megadsl.reference.plain import Step
from megadsl.runtime.bench_kinds import Baseline
from megadsl.runtime.bench_timing import Clock, Contestant

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
    """A baseline that is ready to be timed, or why it is not (``failure``). ``logits`` are fp32 (n, vocab) of its last run.

    ``attention`` is the form it uses, ``prepare_s`` what compiling, warming up and capturing took.
    """

    name: str
    attention: str
    prepare_s: float
    failure: str | None = None
    run: Callable[[], object] | None = None
    logits: Callable[[], torch.Tensor] | None = None

    def contestant(self) -> Contestant | None:
        return None if self.run is None else Contestant(self.name, self.run)


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


def prepare(model: PlainModel, rows: int, which: Baseline, budget_s: float, clock: Clock, replays: int) -> list[Prepared]:
    """The baselines that ``which`` asks for, of steps with ``rows`` rows in use after them; inputs and caches are set already.

    Torch's own kernels use the form of attention that is fastest; torch.compile gets that one, then, in what is left of
    ``budget_s`` seconds, the one it can fuse. A failure is one of the results.
    """
    if which is Baseline.NONE:
        return []
    torch._dynamo.reset()
    plain, *unfit = _eager(model, rows, clock, min(replays, _TRIAL_REPLAYS))
    if which is Baseline.EAGER_GRAPH:
        return [plain, *unfit]
    compiled: list[Prepared] = []
    forms = dict.fromkeys((plain.attention, _FUSIBLE))
    until = time.monotonic() + budget_s
    for form in forms:
        for name, options in MODES.items():
            left = until - time.monotonic()
            compiled.append(_compiled(model.step(rows, form), f"{name}, {form} attention", form, options, left, model.ids.device))
    return [plain, *unfit, *compiled]


def _eager(model: PlainModel, rows: int, clock: Clock, replays: int) -> list[Prepared]:
    """Torch's own kernels with the form of attention that is fastest, then the forms that failed."""
    where = "eager in a CUDA graph" if model.ids.device.type == "cuda" else "eager"
    tried = [_attempt(model.step(rows, form), f"{where}, {form} attention", form, model.ids.device) for form in ATTENTION_FORMS]
    ready = [contestant for trial in tried if (contestant := trial.contestant()) is not None]
    unfit = [trial for trial in tried if trial.failure is not None]
    if not ready:
        return unfit
    times = clock.times(ready, replays, rounds=2)
    chosen = min(times, key=lambda each: times[each].median)
    return [trial for trial in tried if trial.name == chosen] + unfit


def _compiled(step: Step, name: str, form: str, options: Mapping[str, Any], budget_s: float, device: torch.device) -> Prepared:
    if budget_s <= 0:
        return Prepared(name, form, 0.0, failure="not tried: the time for compiling was used up")
    began = time.monotonic()
    try:
        with at_most(budget_s):
            return _attempt(torch.compile(step, fullgraph=True, dynamic=False, **options), name, form, device)
    except _OutOfTimeError:
        spent = time.monotonic() - began
        return Prepared(name, form, spent, failure=f"not compiled in {budget_s:.0f} s")


def _attempt(step: Step, name: str, form: str, device: torch.device) -> Prepared:
    """Warm up, capture, run once. Whatever torch raises is the result: a baseline that does not run is no reason to stop."""
    began = time.monotonic()
    try:
        run, logits = _captured(step, device)
        run()
    except Exception as problem:
        text = " ".join(f"{type(problem).__name__}: {problem}".split())[:_FAILURE_TEXT]
        return Prepared(name, form, time.monotonic() - began, failure=text)
    return Prepared(name, form, time.monotonic() - began, run=run, logits=logits)


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
