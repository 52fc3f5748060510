"""Results that leave word by word from registers: the same bits, under the race detector too, and what is refused."""

from __future__ import annotations

from functools import cache

import pytest

import megadsl as mk
from megadsl.check.checker import check_plan
from megadsl.diagnostics import MegadslError
from megadsl.driver import Compiled
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.machine import machine
from tests.kernels import Bench, Configure, check, check_races, compiled, steps, together
from tests.schedules import VALUES

FROM_REGISTERS = ("qkv_proj", "attention", "o_proj", "down_proj")


def words(s: ScheduleBlock) -> None:
    for op in VALUES:
        s[op].sync(mk.Sentinel())
    for op in FROM_REGISTERS:
        s[op].publish("registers")


def two_splits(s: ScheduleBlock) -> None:
    """Lanes that merge an item have four of its features each, and residual rows come by exchange: nobody keeps what is sent."""
    words(s)
    s["attention"].split(kv=2)
    for op in ("o_proj", "down_proj"):
        s[op].residual("exchange")


def one_split(s: ScheduleBlock) -> None:
    words(s)
    s["attention"].split(kv=1)


# model, tokens, blocks, decisions, (cached rows, new tokens)
KERNELS: list[tuple[str, int, int, Configure, list[tuple[int, int]]]] = [
    ("llama-tiny", 1, 3, words, [(0, 1), (37, 1)]),
    ("llama-tiny", 2, 5, two_splits, [(0, 2), (100, 1)]),
    ("llama-tiny-odd", 1, 7, one_split, [(5, 1)]),
    ("qwen3-tiny", 1, 4, words, [(0, 1), (33, 1)]),
]


@cache
def kernels() -> tuple[Compiled, ...]:
    return together(*(compiled(model, tokens=tokens, blocks=blocks, configure=how) for model, tokens, blocks, how, _ in KERNELS))


@pytest.mark.parametrize("index", range(len(KERNELS)), ids=lambda i: "-".join(map(str, KERNELS[i][:3])))
def test_kernels(index: int) -> None:
    made, sizes = kernels()[index], KERNELS[index][-1]
    assert {made.plan.exchange(str(made.graph.op(op).out)).words for op in FROM_REGISTERS} == {True}
    assert check_plan(made.plan, machine("sm_90a")).findings == ()
    check(made, sizes, seeds=(3, 4))


def test_no_bit_changes() -> None:
    def staged(s: ScheduleBlock) -> None:
        words(s)
        for op in FROM_REGISTERS:
            s[op].publish("staged")

    made = compiled("llama-tiny", blocks=3, configure=staged)
    ours, theirs = kernels()[0], made
    some = steps(ours, KERNELS[0][-1])
    first, second = (Bench(one).play(some) for one in (ours, theirs))
    assert all(a.same(b) for a, b in zip(first, second, strict=True))


def test_words_are_in_order_for_the_race_detector() -> None:
    """Stores of single words meet loads and resets of whole vectors that are four accesses each, of the same words."""
    check_races(kernels()[0], steps(kernels()[0], KERNELS[0][-1]))


@pytest.mark.parametrize(
    ("op", "why", "mend"),
    [
        ("gate_up_proj", "its threads have single features, half a word each", 'use .publish("staged")'),
        ("lm_head", "has no results of its own to send", "publish(...) is for linears and attention"),
        ("embed_tokens", "has no results of its own to send", "publish(...) is for linears and attention"),
    ],
)
def test_ops_that_cannot(op: str, why: str, mend: str) -> None:
    def decide(s: ScheduleBlock) -> None:
        words(s)
        s[op].publish("registers")  # here

    with pytest.raises(MegadslError) as raised:
        compiled("llama-tiny", blocks=3, configure=decide)
    found = raised.value.diagnostics[0]
    assert (found.code, found.span.line) == ("MK247" if op == "gate_up_proj" else "MK158", decide.__code__.co_firstlineno + 2)
    assert why in found.message and found.mend == mend


def test_many_tokens_have_no_finisher() -> None:
    with pytest.raises(MegadslError) as raised:
        compiled("llama-tiny", tokens=16, blocks=3, configure=words)
    assert {d.code for d in raised.value.diagnostics} == {"MK247"} and len(raised.value.diagnostics) == len(FROM_REGISTERS)
    assert all("for at most 8, and there are 16" in d.message and d.mend == 'use .publish("staged")' for d in raised.value.diagnostics)
