"""Custom ops on the GPU: what tests/test_custom_ops.py asks of the emulator, on the whole machine."""

from __future__ import annotations

from itertools import product

import pytest

from megadsl.driver import Compiled
from tests.kernels import Bench, build_cubins, judge, steps
from tests.test_custom_ops import NAMES, SIZES, flags, launched_alone, made, whole_units

pytestmark = pytest.mark.gpu

SMS = 132
CASES = [*product(NAMES, SIZES, (7, SMS))]
SCHEDULED = {
    "whole units, gated": ("experts", 3, whole_units),
    "whole units by one warp": ("experts", 1, whole_units),
    "flags": ("cosine", 3, flags),
    "one op twice": ("twice", 3, None),
}


@pytest.fixture(scope="module")
def kernels() -> dict[str, Compiled]:
    plain = {f"{name}-{tokens}-{blocks}": made(name, tokens, blocks) for name, tokens, blocks in CASES}
    found = plain | {case: made(name, tokens, SMS, how) for case, (name, tokens, how) in SCHEDULED.items()}
    build_cubins(found.values())
    return found


@pytest.mark.parametrize("case", [*(f"{name}-{tokens}-{blocks}" for name, tokens, blocks in CASES), *SCHEDULED])
def test_cases(case: str, kernels: dict[str, Compiled]) -> None:
    kernel = kernels[case]
    bench, some = Bench(kernel, device="cuda"), steps(kernel, SIZES[kernel.manifest["tokens"]])
    results = bench.play(some)
    judge(kernel, bench.weights, some, results)
    for _ in range(3):
        assert all(a.same(b) for a, b in zip(results, bench.play(some), strict=True)), "not the same bits every time"


def test_one_op_a_launch(kernels: dict[str, Compiled]) -> None:
    whole, parts = kernels[f"experts-3-{SMS}"], made("experts", 3, SMS, launched_alone)
    some = steps(whole, SIZES[3])
    played = zip(Bench(whole, device="cuda").play(some), Bench(parts, device="cuda").play(some), strict=True)
    assert all(a.same(b) for a, b in played)
