"""Formats of weights on the GPU: what tests/test_formats.py asks of the emulator, on the whole machine."""

from __future__ import annotations

from itertools import product

import pytest

from megadsl.driver import Compiled
from tests.kernels import Bench, build_cubins, check, compiled, steps
from tests.test_formats import NARROW

pytestmark = pytest.mark.gpu

SIZES = {1: [(0, 1), (100, 1)], 4: [(15, 4), (300, 3)], 16: [(0, 16), (31, 5)]}
CASES = list(product(("llama-tiny-wide", "qwen3-tiny"), NARROW, SIZES))


@pytest.fixture(scope="module")
def kernels() -> dict[tuple[str, str, int], Compiled]:
    found = {
        (model, name, tokens): compiled(model, tokens=tokens, blocks=132, formats=f"{name}, lm_head={name}", max_kv=512)
        for model, name, tokens in CASES
    }
    build_cubins(found.values())
    return found


@pytest.mark.parametrize(("model", "name", "tokens"), CASES)
def test_against_torch(model: str, name: str, tokens: int, kernels: dict[tuple[str, str, int], Compiled]) -> None:
    made = kernels[model, name, tokens]
    first = check(made, SIZES[tokens], device="cuda")
    again = Bench(made, device="cuda").play(steps(made, SIZES[tokens]))
    assert all(a.same(b) for a, b in zip(first, again, strict=True)), "not the same bits every time"
