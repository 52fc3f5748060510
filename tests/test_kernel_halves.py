"""Attention where two warps share a query tile: each adds and publishes half of the columns."""

from __future__ import annotations

from functools import cache

import pytest
from check_tools import unmet
from lower_tools import GPU
from schedules import everywhere

import megadsl as mk
from megadsl.check.checker import check_plan
from megadsl.driver import Compiled
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.ir.plan import Instr
from megadsl.lower.programs import instructions
from tests.kernels import Configure, check, check_races, compiled, config, one_build, steps

FULL = {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 80, "intermediate_size": 176}  # rows of 12 tokens end in a tile
LONG = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128, "hidden_size": 96, "intermediate_size": 64, "vocab_size": 64}


def tagged(s: ScheduleBlock) -> None:
    s["attention"].split(kv=3)


def sentinels(s: ScheduleBlock) -> None:
    everywhere(mk.Sentinel())(s)
    s["attention"].split(kv=2)


def flags(s: ScheduleBlock) -> None:
    everywhere(mk.Flag())(s)


def attention(made: Compiled) -> Instr:
    return next(i for p in made.plan.programs for i in instructions(p.body) if i.call == "attention")


KERNELS: dict[int, tuple[dict[str, int], int, Configure]] = {  # by tokens
    12: (FULL, 3, tagged),
    9: (LONG, 4, sentinels),
    16: (LONG, 2, flags),
    10: (FULL, 5, sentinels),
}


@cache
def kernels() -> dict[int, Compiled]:
    return one_build(
        {
            tokens: compiled("llama-tiny", tokens=tokens, blocks=blocks, fields=config(**fields), configure=configure)
            for tokens, (fields, blocks, configure) in KERNELS.items()
        }
    )


@pytest.mark.parametrize("tokens", KERNELS)
def test_kernels(tokens: int) -> None:
    made = kernels()[tokens]
    assert attention(made).args["halves"]
    assert check_plan(made.plan, GPU).findings == ()
    check(made, [(0, tokens), (3, tokens), (90, tokens - 1)], seeds=(3,))


@pytest.mark.parametrize(("tokens", "halves"), [(1, False), (6, False), (7, True), (12, True), (13, False)])
def test_only_where_a_tile_has_two_warps(tokens: int, halves: bool) -> None:
    made = compiled("llama-tiny", tokens=tokens, fields=config(num_attention_heads=5, num_key_value_heads=1, hidden_size=80))
    assert attention(made).args["halves"] is halves


def test_no_schedule_shows_a_race() -> None:
    made = compiled("llama-tiny", tokens=12, blocks=2, fields=config(**FULL), configure=sentinels, max_kv=48)
    check_races(made, steps(made, [(20, 12)]))


def test_the_checker_knows_the_meeting_in_between() -> None:
    made = compiled("llama-tiny", tokens=12, fields=config(**FULL), configure=sentinels)
    found = check_plan(unmet("attention", "parts")(made.plan), GPU).findings
    assert [f.code for f in found] == ["MK510"] and "attention.scratch" in str(found[0])
