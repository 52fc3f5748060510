"""Inputs of 5 to 16 tokens that arrive in registers: that they run, with the same bits for any number of blocks; and what is refused."""

from __future__ import annotations

from functools import cache

import pytest
from check_tools import without
from lower_tools import GPU
from schedules import LINEARS, VALUES

import megadsl as mk
from megadsl.check.checker import check_plan
from megadsl.diagnostics import MegadslError
from megadsl.driver import Compiled, compile_model
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.lower.gathers import is_wide
from megadsl.lower.memory import chunk_pieces, column_chunks
from megadsl.lower.programs import instructions
from megadsl.lower.tiling import tiling
from tests.kernels import Bench, Configure, bits, check, check_races, compiled, config, one_build, steps, together

# Row groups of two tiles: whole ones of 4 panels for each of 8 warps; of 20 panels, which are two and a half for each.
BROAD = {"hidden_size": 2048, "intermediate_size": 1040, "vocab_size": 64, "num_hidden_layers": 1}
ODD = {"hidden_size": 1272, "intermediate_size": 96, "vocab_size": 512, "num_hidden_layers": 1}


def sentinels(s: ScheduleBlock) -> None:
    for op in VALUES:
        s[op].sync(mk.Sentinel())
    s.ring("weights", stages=4)


def chunked(s: ScheduleBlock) -> None:
    sentinels(s)
    for op in ("qkv_proj", "gate_up_proj", "down_proj"):
        s[op].split(chunk=1)
    s.batch(2)


def held(s: ScheduleBlock) -> None:
    sentinels(s)
    for op in LINEARS:
        s[op].prefetch(registers=2)


def in_parts(s: ScheduleBlock) -> None:
    sentinels(s)
    s["down_proj"].columns(ways=2)
    s["o_proj"].prefetch(registers=2)


def fixed_splits(s: ScheduleBlock) -> None:
    sentinels(s)
    s["attention"].split(kv=2)


def forms(made: Compiled) -> dict[str, tuple[int, int]]:
    """Of each linear whose input arrives in registers: tiles of a row group, and gathers of its input."""
    plan = made.plan
    wide = [op for op in (plan.graph.op(name) for name in LINEARS) if is_wide(op, plan.schedule, plan.graph.tokens)]
    return {op.name: (tiling(op).pieces, column_chunks(op, plan.graph, plan.schedule)) for op in wide}


FIVE_HEADS = {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 80, "intermediate_size": 176}
KERNELS: dict[str, tuple[dict[str, int], int, int, Configure]] = {
    "8 tokens": ({}, 8, 7, sentinels),
    "five heads": (FIVE_HEADS, 11, 5, sentinels),
    "odd": (ODD, 16, 4, fixed_splits),
    "odd, 3 blocks": (ODD, 16, 3, fixed_splits),
    "broad": (BROAD, 16, 3, sentinels),
    "chunked": (BROAD, 16, 3, chunked),
    "held": (BROAD, 11, 5, held),
    "in parts": (BROAD, 9, 3, in_parts),
}


@cache
def kernels() -> dict[str, Compiled]:
    made = (
        compiled("llama-tiny", tokens=tokens, blocks=blocks, fields=config(**fields), configure=configure, max_kv=64)
        for fields, tokens, blocks, configure in KERNELS.values()
    )
    return dict(zip(KERNELS, together(*made), strict=True))


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name: str) -> None:
    made = kernels()[name]
    tokens = made.manifest["tokens"]
    assert set(forms(made)) == set(LINEARS)
    assert check_plan(made.plan, GPU).findings == ()
    assert not [i for p in made.plan.programs for i in instructions(p.body) if i.call == "matrix" and "gathered" in i.syncs]
    check(made, [(0, tokens), (37, tokens - 1)], seeds=(3,))


def test_chunks_fit_registers() -> None:
    """Of the largest model's columns two tiles at a time, 64 registers of a lane."""
    plan = compile_model("llama-3.1-8b", tokens=16, schedule="model").plan
    assert {name: chunk_pieces(plan.graph.op(name), plan.graph, plan.schedule) for name in LINEARS} == {
        "qkv_proj": 2, "o_proj": 1, "gate_up_proj": 2, "down_proj": 1, "lm_head": 2,
    }  # fmt: skip
    assert all(plan.schedule.op(name).gather == "registers" for name in LINEARS)


def test_any_number_of_blocks_gives_the_same_bits() -> None:
    """Which panels a warp has depends on its block; in which order sums are added does not."""
    found = [Bench(made).play(steps(made, [(20, 6)]))[0] for made in (kernels()["odd"], kernels()["odd, 3 blocks"])]
    assert bits(found[0].logits).equal(bits(found[1].logits))


@cache
def watched() -> dict[Configure, Compiled]:
    """Kernels for the race detector, which is a build of its own."""
    return one_build(
        {how: compiled("llama-tiny", tokens=5, blocks=2, fields=config(**BROAD), configure=how, max_kv=16) for how in (held, chunked)}
    )


@pytest.mark.parametrize("configure", [held, chunked])
def test_no_schedule_shows_a_race(configure: Configure) -> None:
    made = watched()[configure]
    check_races(made, steps(made, [(0, 5)]))


@pytest.mark.parametrize(
    ("call", "op"), [("hold_tiles", "o_proj"), ("copy_vector", "gate_up_proj"), ("gather", "down_proj"), ("sync", "qkv_proj")]
)
def test_the_checker_finds_what_is_left_out(call: str, op: str) -> None:
    made = compiled("llama-tiny", tokens=5, blocks=3, fields=config(**BROAD), configure=held, max_kv=16)
    assert check_plan(made.plan, GPU).findings == ()
    assert check_plan(without(call, op)(made.plan), GPU).findings


def whole_rows(s: ScheduleBlock) -> None:
    s["o_proj"].sync(mk.Sentinel())
    s["gate_up_proj"].split(chunk=5).gather("registers")  # here


def tags(s: ScheduleBlock) -> None:
    s["attention"].sync(mk.Tagged())
    s["o_proj"].gather("registers")  # here


def half_a_group(s: ScheduleBlock) -> None:
    s["o_proj"].sync(mk.Sentinel())
    s["gate_up_proj"].prefetch(registers=1)  # here


@pytest.mark.parametrize(
    ("decide", "hidden", "code", "why", "mend"),
    [
        (whole_rows, 4160, "MK244", "16 tokens in 160 registers", "chunks of at most 4 tiles"),  # 26 panels a tile: 4 for the busiest warp
        (tags, 2048, "MK244", "'attention' is not dense", "mk.Sentinel()"),
        (half_a_group, 2048, "MK243", "a row group has 2 tiles", "a multiple of 2"),
    ],
)
def test_what_cannot_be(decide: Configure, hidden: int, code: str, why: str, mend: str) -> None:
    fields = config(hidden_size=hidden, num_hidden_layers=1)
    with pytest.raises(MegadslError) as raised:
        compiled("llama-tiny", tokens=16, blocks=16, fields=fields, configure=decide)
    found = raised.value.diagnostics[0]
    assert (found.code, found.span.line) == (code, decide.__code__.co_firstlineno + 2) and why in found.message and mend in found.mend
