"""Inputs that arrive in registers: where by default, what the plan then looks like, that it runs, and what is refused."""

from __future__ import annotations

from functools import cache

import pytest
from check_tools import without
from schedules import LINEARS, VALUES

import megadsl as mk
from megadsl.check.checker import check_plan
from megadsl.diagnostics import MegadslError
from megadsl.driver import Compiled, compile_model
from megadsl.dsl.registry import load
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.lower.gathers import tiles_together
from megadsl.lower.programs import instructions
from megadsl.machine import machine
from tests.kernels import Configure, check, compiled, together

GPU = machine("sm_90a")


def sentinels(s: ScheduleBlock) -> None:
    for op in VALUES:
        s[op].sync(mk.Sentinel())


def and_no_tiles(s: ScheduleBlock) -> None:
    sentinels(s)
    for op in LINEARS:
        s[op].prefetch(registers=0)


def test_a_small_model_gathers_nothing_into_shared_memory() -> None:
    plan = compile_model("smollm2-135m").plan
    assert {how.gather for how in plan.schedule.ops if how.op != "embed_tokens"} == {"registers"}
    assert all(e.dense for e in plan.exchanges if e.dtype == "bf16")
    found = [i for p in plan.programs for i in instructions(p.body)]
    assert not [i for i in found if "gathered" in i.syncs or i.call in ("copy_vector", "wait_vector")]
    assert {op.name: tiles_together(op, plan.schedule, 1) for op in plan.graph.ops if op.name in LINEARS} == dict.fromkeys(LINEARS, 3) | {
        "down_proj": 2  # both tiles of a row group
    }


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-tiny"])
def test_many_columns_or_tags_do_not(name: str) -> None:
    """Of the large model a lane would hold too many vectors, of the tiny one tagged vectors do not lie densely."""
    assert "registers" not in {how.gather for how in compile_model(name).plan.schedule.ops}


KERNELS: list[tuple[str, int, int, Configure, int, list[tuple[int, int]]]] = [
    ("llama-tiny", 1, 2, sentinels, 512, [(0, 1), (128, 1), (300, 1)]),  # more chunks than warps
    ("llama-tiny", 1, 8, sentinels, 512, [(16, 1), (511, 1)]),
    ("llama-tiny-odd", 2, 5, and_no_tiles, 128, [(0, 2), (37, 1)]),
    ("qwen3-tiny", 1, 3, sentinels, 512, [(0, 1), (37, 1), (300, 1)]),  # heads of 128 that are mapped before they are multiplied
]
MAPPED = [(64, 4, 2), (128, 8, 2)]  # head dimension, query heads, KV heads


@cache
def kernels() -> tuple[list[Compiled], list[Compiled]]:
    """Those of KERNELS, and those of MAPPED."""
    some = [compiled(name, tokens=t, blocks=b, configure=configure, max_kv=max_kv) for name, t, b, configure, max_kv, _ in KERNELS]
    shapes = [{"head_dim": dim, "num_attention_heads": heads, "num_key_value_heads": kv_heads} for dim, heads, kv_heads in MAPPED]
    mapped = [compiled("qwen3-tiny", blocks=3, fields=load("qwen3-tiny")[1] | shape, configure=sentinels) for shape in shapes]
    made = list(together(*some, *mapped))
    return made[: len(some)], made[len(some) :]


@pytest.mark.parametrize("index", range(len(KERNELS)), ids=lambda i: "-".join(map(str, KERNELS[i][:3])))
def test_kernels(index: int) -> None:
    made, sizes = kernels()[0][index], KERNELS[index][-1]
    assert {made.plan.schedule.op(op).gather for op in LINEARS} == {"registers"}
    assert check_plan(made.plan, GPU).findings == ()
    check(made, sizes, seeds=(3,))


@pytest.mark.parametrize(("call", "op"), [("hold_tiles", "o_proj"), ("hold_vector", "gate_up_proj"), ("gather", "down_proj")])
def test_the_checker_finds_what_is_left_out(call: str, op: str) -> None:
    plan = compiled("llama-tiny", blocks=3, configure=sentinels).plan
    assert check_plan(without(call, op)(plan), GPU).findings


@pytest.mark.parametrize("index", range(len(MAPPED)), ids=lambda i: "-".join(map(str, MAPPED[i])))
def test_mapped_heads(index: int) -> None:
    """Two and four query rows to a KV head, of narrow heads and of wide ones, whose rows do not all find lanes at once."""
    made = kernels()[1][index]
    assert made.plan.schedule.op("attention").gather == "registers"
    assert not [i for p in made.plan.programs for i in instructions(p.body) if "mapped" in i.syncs]
    check(made, [(0, 1), (100, 1)], seeds=(3,))


def test_stages_are_let_go_of_behind_the_products() -> None:
    """A ring that is shorter than what an op holds is refused, and the checker finds it stuck."""

    def short(s: ScheduleBlock) -> None:
        sentinels(s)
        s["gate_up_proj"].prefetch(registers=3)
        s.ring("weights", stages=1)  # its vector and its tiles

    with pytest.raises(MegadslError) as raised:
        compiled("llama-tiny", blocks=3, configure=short)
    assert "MK177" in {d.code for d in raised.value.diagnostics}


def tags(s: ScheduleBlock) -> None:
    s["o_proj"].gather("registers")  # here


def no_linear(s: ScheduleBlock) -> None:
    s["embed_tokens"].gather("registers")  # here


@pytest.mark.parametrize(
    ("decide", "tokens", "why", "mend"),
    [
        (tags, 1, "'attention' is not dense", "mk.Sentinel()"),
        (no_linear, 1, "it gathers nothing", "linears and attention"),
    ],
)
def test_what_cannot_be(decide: Configure, tokens: int, why: str, mend: str) -> None:
    with pytest.raises(MegadslError) as raised:
        compiled("llama-tiny", tokens=tokens, blocks=3, configure=decide)
    found = raised.value.diagnostics[0]
    assert (found.code, found.span.line) == ("MK244", decide.__code__.co_firstlineno + 1) and why in found.message and mend in found.mend
