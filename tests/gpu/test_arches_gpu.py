"""Kernels for an older architecture on the GPU at hand: rings that the lanes of a warp fill, judged as all others."""

from __future__ import annotations

import pytest
import torch

from megadsl.driver import Compiled
from megadsl.runtime.bench import Subject
from megadsl.runtime.bench_kinds import Baseline
from megadsl.runtime.cuda import architecture, machine_of
from tests.kernels import Bench, compiled, judge, steps
from tests.schedules import gated, settled
from tests.test_kernel_steps import singles, together

pytestmark = pytest.mark.gpu

ARCH = "sm_80"
# tokens, blocks, schedule
CASES = {"settled-1": (1, 108, settled), "gated-2": (2, 40, gated), "default-5-odd": (5, 7, None), "default-16": (16, 97, None)}


def made(name: str) -> Compiled:
    tokens, blocks, configure = CASES[name]
    return compiled("llama-tiny-odd" if "odd" in name else "llama-tiny", tokens=tokens, blocks=blocks, configure=configure, arch=ARCH)


@pytest.mark.parametrize("name", CASES)
def test_an_older_architecture_s_kernels(name: str) -> None:
    kernel, tokens = made(name), CASES[name][0]
    bench = Bench(kernel, device="cuda")
    some = steps(kernel, [(0, tokens), (17, 1), (33, tokens), (100, tokens)])
    results = bench.play(some)
    judge(kernel, bench.weights, some, results)
    for _ in range(20):
        assert all(a.same(b) for a, b in zip(results, bench.play(some), strict=True)), "not the same bits every time"


def test_several_steps_a_launch() -> None:
    bench = Bench(made("gated-2"), device="cuda")
    for kv in (0, 30, 45):
        assert together(bench, 4, kv, tokens=2).same(singles(bench, 4, kv, tokens=2))


def test_the_benchmark_measures_on_the_gpu_at_hand() -> None:
    subject = Subject(made("settled-1"), "cuda")
    row = subject.measure(17, 40, Baseline.NONE, 0)
    assert row.passed and row.times.median > row.floor_ms
    assert subject.machine is machine_of(ARCH, subject.device) and architecture(torch.device("cuda")) in subject.machine.arch
