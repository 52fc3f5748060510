"""One op a launch: the same bits as the megakernel, and what its plan must keep."""

from __future__ import annotations

from dataclasses import replace

import pytest

import megadsl as mk
from megadsl.check.checker import check_plan
from megadsl.diagnostics import MegadslError
from megadsl.driver import compile_model
from megadsl.dsl.registry import load
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.ir.plan import Plan
from megadsl.lower.launches import launches
from megadsl.machine import machine
from tests.check_tools import assert_found, plan, without
from tests.kernels import Bench, compiled, steps
from tests.schedules import alone, everywhere, kv_loader

SIZES = [(0, 2), (70, 1), (33, 2)]


def test_the_same_bits() -> None:
    whole, parts = compiled("llama-tiny", tokens=2), compiled("llama-tiny", tokens=2, configure=alone)
    some = steps(whole, SIZES)
    bench = Bench(parts)
    assert all(a.same(b) for a, b in zip(Bench(whole).play(some), bench.play(some), strict=True))
    names = [launch.name for launch in launches(parts.plan)]
    assert names == ["embed_tokens", "qkv_proj", "attention", "attention_merge", "o_proj", "gate_up_proj", "down_proj", "lm_head"]
    loop = [(kernel, layer) for layer in range(2) for kernel in range(1, 7)]
    assert parts.manifest["launches"] == [(0, 0), *loop, (7, 0)] and not launches(whole.plan)
    for seed in (3, 4):
        bench.program.seed = seed
        assert all(a.same(b) for a, b in zip(Bench(whole).play(some), bench.play(some), strict=True))


@pytest.fixture(scope="module")
def apart() -> Plan:
    return plan("llama-tiny", alone, 2, blocks=3)


@pytest.mark.parametrize(
    ("call", "op", "code", "words"),
    [
        ("join_launch", "qkv_proj", "MK560", "'qkv_proj' touches exchange.x before its launch has waited"),
        ("join_launch", "attention", "MK560", "'attention' touches exchange.qkv_proj before"),
        ("await_step", "attention", "MK560", "'attention' touches kv.kv before"),
        ("join_launch", "embed_tokens", "MK560", "'embed_tokens' touches control.token_ids before"),
        ("gather_kept", "o_proj", "MK512", "'o_proj' reads 'kept' in shared memory, which holds nothing yet"),
        ("load_vector", "qkv_proj", "MK520", "where the loader fills qkv_proj"),
    ],
)
def test_broken_launches_are_found(apart: Plan, call: str, op: str, code: str, words: str) -> None:
    assert_found(without(call, op)(apart), code, words)


@pytest.mark.parametrize(("name", "tokens", "decide"), [("llama-tiny", 2, kv_loader), ("smollm2-135m", 1, everywhere(mk.Sentinel()))])
def test_launches_hold(name: str, tokens: int, decide: object) -> None:
    def both(s: ScheduleBlock) -> None:
        decide(s)  # type: ignore[operator]
        s.launch("op")

    report = check_plan(plan(name, both, tokens))
    assert not report.findings and any(line.startswith("launches: 8 kernels") for line in report.proved)


def test_launches_without_room_beside_each_other() -> None:
    some = compile_model("llama-3.2-1b", scope="op", check=False).schedule
    many = compile_model("llama-tiny-wide", tokens=16, scope="op", check=False).schedule
    assert (some.resident, many.resident) == (2, 1) and some.rings[0][1].stages < many.rings[0][1].stages


def test_a_scope_that_is_none() -> None:
    made = mk.kernel(load("llama-tiny")[0].function)
    with pytest.raises(MegadslError) as caught, mk.schedule(made) as s:
        s.launch("layers")
    assert caught.value.code == "MK151" and "'layers' is not known" in str(caught.value) and "step" in str(caught.value)


def test_a_machine_without_dependent_launches() -> None:
    old = replace(machine("sm_90a"), features=machine("sm_90a").features - {"dependent_launch"})
    with pytest.raises(MegadslError) as caught:
        compile_model("llama-tiny", on=old, scope="op")
    assert caught.value.code == "MK167" and "one op a launch needs 'dependent_launch'" in str(caught.value)
