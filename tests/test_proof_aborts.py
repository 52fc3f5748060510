"""A launch that was given up costs that launch alone: wherever it stood, the next one gives the bits of a run that never hung."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megadsl.driver import Compiled
from megadsl.emulate import Emulator, LaunchReport, Policy
from megadsl.runtime.control import ADVANCE, KV_LEN, NEXT_IDS, TIMEOUT_US, TOKEN_IDS, MegakernelHang, Wait
from tests.kernels import Bench, Step, compiled, steps
from tests.schedules import everywhere, in_two_splits
from tests.wires import SYNCS, wires

SIZES = [(17, 2), (33, 1)]
LAYERS = 2
PLACES = 6


def kernel(wire: str = "Tagged") -> Compiled:
    if wire != "Tagged":
        return wires()[wire, 2]
    return compiled("llama-tiny", tokens=2, blocks=3, configure=in_two_splits(everywhere(SYNCS[wire])))  # which other tests build too


@contextmanager
def launches(monkeypatch: pytest.MonkeyPatch, by: Emulator | None = None, **changes: int) -> Iterator[None]:
    """Launches with other options; or by another kernel, on the memory of the program that launches."""
    launch = Emulator.launch

    def changed(self: Emulator, *args: Any, **options: Any) -> LaunchReport:
        return launch(by or self, *args, **{**options, **changes})

    with monkeypatch.context() as patch:
        patch.setattr(Emulator, "launch", changed)
        yield


def length(bench: Bench, step: Step) -> int:
    """The emulator's steps that a launch takes, in a program that has launched before."""
    bench.run(step)
    assert bench.program.report is not None
    return bench.program.report.steps


@pytest.mark.parametrize("wire", SYNCS)
def test_a_launch_after_one_that_was_given_up(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given up at six places, first op to last: then every wait falls through, as after the watchdog's time. Twice in a row, so
    that the second one has the rounds of the launch after it, which has other inputs: what is left of it would be taken for new."""
    made = kernel(wire)
    bench, some = Bench(made), steps(made, SIZES)
    expected = bench.play(some)
    waits: list[Wait] = []
    for place in range(PLACES):
        bench.program.seed, bench.program.policy = place + 1, Policy(place % len(Policy))
        limit = length(bench, some[0]) * (2 * place + 1) // (2 * PLACES)
        for _ in range(2):
            with launches(monkeypatch, step_limit=limit), pytest.raises(MegakernelHang) as hang:
                bench.run(some[0])
            waits += hang.value.waits
        for step, first in zip(reversed(some), reversed(expected), strict=True):
            assert bench.run(step).same(first), f"after {hang.value}"
    assert {(w.role, w.kind) for w in waits} >= {("loader", "ring.empty"), ("consumer", "ring.full"), ("consumer", "exchange")}
    for role in ("loader", "consumer"):
        assert {w.layer for w in waits if w.role == role} == set(range(LAYERS))


def test_a_launch_that_was_given_up_keeps_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that feeds itself does not do so with garbage: the launch can be repeated as it was."""
    made = kernel()
    bench, (step,) = Bench(made), steps(made, SIZES[:1])
    expected, program = bench.play([step])[0], bench.program
    steps_of_all = length(bench, step)
    for place in range(PLACES):
        bench.put_rows(step)
        program.control.set_inputs(step.kv, step.ids, range(step.kv, step.kv + 2), [1, 3], ADVANCE)
        before = program.control.words.clone()
        with launches(monkeypatch, step_limit=steps_of_all * (2 * place + 1) // (2 * PLACES)), pytest.raises(MegakernelHang):
            program.launch()
        for words in (slice(KV_LEN, TIMEOUT_US + 1), slice(TOKEN_IDS, NEXT_IDS)):
            assert program.control.words[words].equal(before[words]), f"place {place}"
        program.launch()
        assert tuple(program.check()[NEXT_IDS : NEXT_IDS + 2]) == expected.ids


@pytest.mark.parametrize("op", ["embed_tokens", "gate_up_proj"])
def test_a_launch_after_a_lost_signal(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same memory, first under a kernel that loses a signal, then under one that does not."""
    made = kernel()
    bench, some = Bench(made), steps(made, SIZES)
    expected = bench.play(some)
    site = next(int(s["id"]) for s in made.manifest["sites"] if s["op"] == op and s["kind"] == "publish")
    faulty = Bench(made, bench.weights, defines={"MK_LOST_SIGNAL": str(site)})
    for _ in range(2):
        with launches(monkeypatch, by=faulty.program.emulator), pytest.raises(MegakernelHang):
            bench.run(some[0])
    for step, first in zip(reversed(some), reversed(expected), strict=True):
        assert bench.run(step).same(first)
