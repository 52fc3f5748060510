"""tools/proof_gpu.py on a small model: each part in seconds, and that its comparison can fail."""

from __future__ import annotations

import pytest

from megadsl.machine import DEFAULT_ARCH, machine
from tools.proof_gpu import Proof

pytestmark = pytest.mark.gpu


def make(blocks: int) -> Proof:
    return Proof("llama-tiny", tokens=1, max_kv=512, blocks=blocks, replays=2000, steps=60)


@pytest.fixture(scope="module")
def proof() -> Proof:
    return make(machine(DEFAULT_ARCH).sms)


def test_replays(proof: Proof) -> None:
    (row,) = proof.replays()
    assert row["replays"] == 2000 and row["words_that_differ"] == 0


def test_a_difference_is_counted(proof: Proof) -> None:
    subject = proof.subject()
    subject.prepare(proof.quiet.inputs)
    assert subject.differing() == 0
    logits = subject.inputs[1].results[0]
    logits[0, 5] += 1
    for _ in range(3):
        subject.inputs[0].replay()
        subject.inputs[1].replay()
    assert subject.differing() == 3


def test_chaos(proof: Proof) -> None:
    nobody, *slow, together = proof.chaos()
    assert nobody["words_that_differ"] == together["words_that_differ"] == 0 and together["steps"] == 60
    assert all(row["ms"] > nobody["ms"] for row in slow) and together["ms"] > 1.2 * nobody["ms"], "the delays did not happen"


def test_busy(proof: Proof) -> None:
    *loads, held = proof.busy()
    for row in loads:
        assert row.get("words_that_differ") == 0 or "MK449" in row["refused"], row
        assert row.get("after", 0) == 0
    assert "MK449" in held["refused"] and held["refused_after_s"] < 3 and "MK449" in held["launch_meanwhile"]
    assert held["words_that_differ"] == 0


@pytest.mark.parametrize("blocks", [8, 132])  # two launches of eight blocks would run at the same time
def test_streams(blocks: int) -> None:
    turns, threads = make(blocks).streams()
    assert turns["ids_equal"] == turns["launches"] == 200
    assert threads["steps_counted"] == threads["launches"] == 400 and threads["words_that_differ"] == 0


def test_fewer(proof: Proof) -> None:
    green, grid, compiled = proof.fewer()
    assert "MK444" in green["refused"] and "MK444" in grid["refused"] and "MK163" in compiled["refused"]
    assert green["fitting_refused"] is None and green["words_that_differ"] == 0
