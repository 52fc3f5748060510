"""Custom ops: their own headers in generated kernels, in the emulator, against what they mean in torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import megadsl as mk
from megadsl.driver import Compiled
from megadsl.dsl.registry import load
from megadsl.dsl.schedule import ScheduleBlock
from tests.kernels import check, check_races, compiled, one_build, steps

SPECS = Path(__file__).parent / "specs"
CONFIG = {"vocab": 203, "hidden": 128, "layers": 2, "experts": 16}
SIZES = {1: [(0, 1), (17, 1)], 3: [(0, 3), (16, 2), (0, 1)], 16: [(0, 16), (31, 5)]}


def made(name: str, tokens: int, blocks: int, configure: Callable[[ScheduleBlock], None] | None = None, **options: Any) -> Compiled:
    kernel = load(f"{SPECS / 'custom_ops.py'}:{name}")[0]
    return compiled(kernel, tokens=tokens, blocks=blocks, fields=CONFIG, configure=configure, max_kv=64, **options)


@cache
def kernels() -> dict[tuple[str, int, int], Compiled]:
    return one_build({key: made(*key) for key in product(("rotated", "experts", "cosine"), SIZES, (2, 3, 5))})


@pytest.mark.parametrize("blocks", [2, 3, 5])
@pytest.mark.parametrize("tokens", [1, 3, 16])
@pytest.mark.parametrize("name", ["rotated", "experts", "cosine"])
def test_against_torch(name: str, tokens: int, blocks: int) -> None:
    check(kernels()[name, tokens, blocks], SIZES[tokens], seeds=(1, 2) if blocks == 3 else ())
