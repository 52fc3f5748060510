"""What only a GPU can show of the timeline: all SMs have one clock, and recording changes no bit."""

from __future__ import annotations

import pytest

from megadsl.driver import compile_model
from megadsl.machine import DEFAULT_ARCH, machine
from megadsl.runtime.tracing import record
from megadsl.trace.activity import activities
from megadsl.trace.records import read_timeline
from megadsl.trace.table import summarise
from tests.kernels import Bench, compiled, steps

pytestmark = pytest.mark.gpu


def test_all_sms_have_one_clock() -> None:
    made = compile_model("smollm2-135m")
    timeline = read_timeline(made.manifest, record(made, "cuda", tokens=1, rows=300).raw)
    bytes_per_us = machine(DEFAULT_ARCH).bandwidth / 1e6
    summary = summarise(timeline, activities(timeline, bytes_per_us), bytes_per_us)
    assert timeline.lost == 0 and len({block.sm for block in timeline.blocks}) == made.manifest["blocks"]
    assert 0 < timeline.tick_ns <= 1024, "a clock too coarse for hand-offs"
    assert summary.handoff_us[0] * 1e3 > -timeline.tick_ns - 1, "somebody had a value before a block that it polled had published it"
    assert sum(row.share for row in summary.ops) == pytest.approx(1)
    assert sum(layer.bytes for layer in summary.layers) / bytes_per_us < summary.step_us, "faster than HBM"


def test_no_bit_changes() -> None:
    made = compiled("llama-tiny", tokens=2, blocks=5)
    some = steps(made, [(0, 2), (70, 1), (33, 2)])
    plain, traced = (Bench(made, device="cuda", **options).play(some) for options in ({}, {"defines": {"MK_TRACE": "1"}}))
    assert all(a.same(b) for a, b in zip(plain, traced, strict=True))
