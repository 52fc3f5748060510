"""What the plan checker once found in the headers, run: a block may raise its flag again before a reader has looked.

Slices of a value are gathered from their owners alone, so nobody waits for the blocks that own nothing of it; of 40 blocks some are
rounds behind, and then find a flag that is ahead of the round they wait for.
"""

from __future__ import annotations

from pathlib import Path

import megadsl as mk
from megadsl.dsl.registry import load
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.emulate.abi import Policy
from tests.kernels import Bench, compiled, judge, steps

SPECS = Path(__file__).parent / "specs"
FIELDS = {"vocab": 203, "hidden": 72, "inter": 104, "layers": 3}


def flags(s: ScheduleBlock) -> None:
    for op in ("embed", "a_b", "u", "v"):
        s[op].sync(mk.Flag(2))


def test_a_flag_may_be_ahead_of_its_reader() -> None:
    made = compiled(load(f"{SPECS / 'shapes.py'}:branches")[0], blocks=40, fields=FIELDS, configure=flags)
    bench, some = Bench(made), steps(made, [(0, 1), (0, 1)])
    bench.program.policy = Policy.FROZEN_BLOCK
    results = []
    for bench.program.seed in (5, 7):
        results.append(bench.play(some))
    judge(made, bench.weights, some, results[0])
    assert all(a.same(b) for a, b in zip(*results, strict=True))
