"""One op a launch: the same bits as the megakernel, and what its plan must keep."""

from __future__ import annotations

from megadsl.dsl.schedule import ScheduleBlock
from megadsl.lower.launches import launches
from tests.kernels import Bench, compiled, steps

SIZES = [(0, 2), (70, 1), (33, 2)]


def alone(s: ScheduleBlock) -> None:
    s.launch("op")


def test_the_same_bits() -> None:
    whole, parts = compiled("llama-tiny", tokens=2), compiled("llama-tiny", tokens=2, configure=alone)
    some = steps(whole, SIZES)
    bench = Bench(parts)
    assert all(a.same(b) for a, b in zip(Bench(whole).play(some), bench.play(some), strict=True))
    names = [launch.name for launch in launches(parts.plan)]
    assert names == ["embed_tokens", "qkv_proj", "attention", "attention_merge", "o_proj", "gate_up_proj", "down_proj", "lm_head"]
    loop = [(kernel, layer) for layer in range(2) for kernel in range(1, 7)]
    assert parts.manifest["launches"] == [(0, 0), *loop, (7, 0)] and not launches(whole.plan)
    for seed in (3, 4):
        bench.program.seed = seed
        assert all(a.same(b) for a, b in zip(Bench(whole).play(some), bench.play(some), strict=True))
