"""Linears whose columns are split: every wire of the parts, odd shapes, blocks that divide nothing, more blocks than work."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

import megadsl as mk
from megadsl.build.host import DETECT
from megadsl.driver import Compiled
from megadsl.dsl.registry import load
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.emulate.explore import policy_of
from megadsl.ir.schedule import Sync
from tests.kernels import Bench, Configure, bits, check, compiled, judge, one_build, steps

SPECS = Path(__file__).parent / "specs"
SMALL = {"vocab": 203, "hidden": 72, "inter": 2100, "layers": 2}  # 9 row groups x 3 tiles in the last linear of a layer
WIRES = {"tagged": mk.Tagged(2), "sentinel": mk.Sentinel(4), "flag": mk.Flag(2)}


def parts(sync: Sync | None = None, **ways: int) -> Configure:
    """Columns in parts, which travel as ``sync`` says."""

    def configure(s: ScheduleBlock) -> None:
        s.ring("weights", stages=6)  # with as many as fit, kernels of several block counts would not be one build
        for op, count in ways.items():
            s[op].columns(ways=count)
            if sync is not None:
                s.edge(op, op).sync(sync)

    return configure


def spec(name: str, tokens: int, blocks: int, configure: Configure, fields: dict[str, int]) -> Compiled:
    return compiled(load(f"{SPECS / name}")[0], tokens=tokens, blocks=blocks, fields=fields, configure=configure, max_kv=16)


def small_integers(made: Compiled) -> dict[str, torch.Tensor]:
    """Few ones and minus ones to a row: no sum leaves -256 to 256, so that bf16 and a tag's 20 bits of fp32 hold it."""
    generator = torch.Generator().manual_seed(11)

    def sparse(rows: int, columns: int, most: int) -> torch.Tensor:
        keep = torch.rand(rows, columns, generator=generator).argsort(1) < most
        return torch.randint(-1, 2, (rows, columns), generator=generator) * keep

    found = {"embed.weight": torch.randint(-2, 3, (SMALL["vocab"], SMALL["hidden"]), generator=generator)}
    for layer in range(SMALL["layers"]):
        found[f"model.layers.{layer}.up.weight"] = sparse(SMALL["inter"], SMALL["hidden"], 4)
        found[f"model.layers.{layer}.down.weight"] = sparse(SMALL["hidden"], SMALL["inter"], 6)
    found["head.weight"] = torch.randint(-1, 2, (SMALL["vocab"], SMALL["hidden"]), generator=generator)
    return {name: w.bfloat16() for name, w in found.items()}


def whole_logits(weights: dict[str, torch.Tensor], ids: Sequence[int]) -> torch.Tensor:
    """In 64-bit integers."""
    whole = {name: w.long() for name, w in weights.items()}
    x = whole["embed.weight"][list(ids)]
    for layer in range(SMALL["layers"]):
        y = x @ whole[f"model.layers.{layer}.up.weight"].T
        x = x + y @ whole[f"model.layers.{layer}.down.weight"].T
        assert max(int(y.abs().max()), int(x.abs().max())) <= 256, "bf16 would round"
    return x @ whole["head.weight"].T


@cache
def kernels() -> dict[object, Compiled]:
    """By wire and blocks: 1, which multiplies all parts in turn; 5, of which some have two; more than there is work for. And those of the
    tests below."""
    keys = [(wire, blocks) for wire in WIRES for blocks in (1, 5, 40)]
    made: dict[object, Compiled] = {
        (wire, blocks): spec("integers.py:integers", 4, blocks, parts(WIRES[wire], down=3), SMALL) for wire, blocks in keys
    }
    fields = {"vocab": 203, "hidden": 1100, "inter": 2100, "layers": 1}
    made["folded"] = spec("shapes.py:plain", 16, 5, parts(mk.Sentinel(4), gate_up=2, down=3), fields)
    fields = {"vocab": 203, "hidden": 72, "inter": 3800, "layers": 2}
    made["in chunks"] = spec("shapes.py:separate", 3, 4, in_chunks, fields)
    return one_build(made)


@pytest.mark.parametrize("wire", WIRES)
def test_integers_stay_exact(wire: str) -> None:
    for blocks in (1, 5, 40):
        made = kernels()[wire, blocks]
        assert made.plan.exchange("down.parts").wire == wire.capitalize()
        weights = small_integers(made)
        bench = Bench(made, weights, seed=blocks)
        some = steps(made, [(0, 4), (0, 1), (0, 4), (0, 3)])
        for step, result in zip(some, bench.play(some), strict=True):
            assert bits(result.logits).equal(bits(whole_logits(weights, step.ids).float() + 0.0)), f"{blocks} blocks, {step}"


def test_folded_rows_of_many_tokens() -> None:
    """16 tokens; both linears of a layer split, two matrices folded in one, and a ragged last tile in each."""
    check(kernels()["folded"], [(0, 16), (0, 1), (0, 15)], seeds=(1,))


def in_chunks(s: ScheduleBlock) -> None:
    parts(down=2)(s)
    s["down"].split(chunk=1)


def test_parts_in_chunks() -> None:
    """Two operands meet in front of a linear; each part of its columns is gathered in two chunks of a tile."""
    made = kernels()["in chunks"]
    assert len(made.graph.op("down").prologue.args) == 2  # type: ignore[union-attr]
    check(made, [(0, 3), (0, 1), (0, 2)], seeds=(1,))


def test_no_schedule_shows_a_race() -> None:
    """One of the three blocks multiplies two parts."""
    made = spec("integers.py:integers", 2, 3, parts(mk.Sentinel(4), down=2), {"vocab": 40, "hidden": 40, "inter": 1032, "layers": 2})
    some = steps(made, [(0, 2), (0, 1)])
    bench = Bench(made, defines={DETECT: "1"})
    first = bench.play(some)
    judge(made, bench.weights, some, first)
    for seed in range(5):  # each policy once
        bench.program.seed, bench.program.policy = seed, policy_of(seed)
        for step, expected, result in zip(some, first, bench.play(some), strict=True):
            assert result.same(expected), f"seed {seed} gives other bits for {step}"
            assert bench.program.report is not None and bench.program.report.races == ()
