"""Barriers that nothing needs are left out of a plan, and no others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from check_tools import plan, split, unmet, without
from schedules import everywhere

import megadsl as mk
from megadsl.check import check_plan, without_needless_barriers
from megadsl.check.barriers import OPTIONAL
from megadsl.check.edits import edited
from megadsl.driver import compile_model
from megadsl.ir.plan import Plan
from megadsl.lower.programs import instructions


def optional(of: Plan) -> set[tuple[str, str]]:
    """(call, op) of the barriers that may be left out and are there."""
    found = (i for p in of.programs for i in instructions(p.body))
    return {(i.call, i.op) for i in found if OPTIONAL.get(i.call) in i.syncs}


PLANS: dict[str, Plan] = {
    "tags": plan("llama-tiny", blocks=5),
    "idle blocks": plan("llama-tiny", everywhere(mk.Tagged()), blocks=7),
    "inputs in registers": plan("llama-tiny-odd", everywhere(mk.Sentinel()), blocks=5),
    "flags": plan("llama-tiny", everywhere(mk.Flag(2)), blocks=5),
    "all warps merge": plan("llama-tiny", tokens=16, blocks=7),
    "one block": plan("llama-tiny", blocks=1, fields={"hidden_size": 512}),
    "columns in parts": plan("llama-tiny", split(mk.Sentinel(), down_proj=3), blocks=5, fields={"intermediate_size": 3000}),
    "smollm2": plan("smollm2-135m", everywhere(mk.Sentinel())),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_is_left_is_needed_and_what_is_gone_is_not(name: str) -> None:
    lean = without_needless_barriers(PLANS[name])
    assert check_plan(lean).findings == ()
    assert optional(lean) <= optional(PLANS[name])
    for call, op in optional(lean):
        found = check_plan(unmet_of(lean, call, op)).findings
        assert {d.code for d in found} & {"MK500", "MK501", "MK502", "MK510"}, (call, op)


def unmet_of(of: Plan, call: str, op: str) -> Plan:
    return edited(of, lambda i: replace(i, syncs=tuple(s for s in i.syncs if s != OPTIONAL[call])) if (i.call, i.op) == (call, op) else i)


def test_both_outcomes_are_among_them() -> None:
    lean = {name: without_needless_barriers(made) for name, made in PLANS.items()}
    assert optional(lean["tags"]) == set() != optional(PLANS["tags"])
    assert optional(lean["inputs in registers"])  # nothing meets between a publication and the next partial sums
    assert ("attention", "attention") in optional(lean["all warps merge"])  # all warps stage what they merge, also in idle blocks
    assert {call for call, _ in optional(lean["one block"])} == {"publish"}  # more units than a warp has threads are kept by all


def test_of_two_that_stand_in_for_each_other_one_stays() -> None:
    """Publishing the queries ends with a barrier, and a block without a unit meets: one of the two is enough for the merge."""
    made = PLANS["idle blocks"]
    assert {("publish", "qkv_proj"), ("attention", "attention")} <= optional(made)
    assert check_plan(without_needless_barriers(made)).findings == ()


def test_a_plan_that_is_not_in_order_stays_as_it_is() -> None:
    for broken in (unmet("matrix", "partials")(PLANS["tags"]), without("gather")(PLANS["tags"])):
        assert without_needless_barriers(broken) is broken


def test_the_kernel_has_them_where_the_plan_does() -> None:
    compiled = compile_model("smollm2-135m")
    text = compiled.source
    published = sum(call == "publish" for call, _ in optional(compiled.plan))
    assert text.count("out.publish<true>") == published > 0
    assert text.count("out.publish<false>") > 0
