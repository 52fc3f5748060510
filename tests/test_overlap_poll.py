"""How an edge is polled: with a sleep between polls in vain, and by how many vectors of a thread at once. Not a bit depends on it."""

from __future__ import annotations

import re
from functools import cache

import pytest

import megadsl as mk
from megadsl.build.host import DETECT
from megadsl.check.checker import check_plan
from megadsl.driver import Compiled
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.emulate.explore import policy_of
from megadsl.ir.schedule import Sync
from megadsl.lower.difference import difference
from megadsl.runtime.control import MegakernelHang
from tests.kernels import Bench, Configure, Result, check_seeds, compiled, config, one_build, steps
from tests.schedules import VALUES, everywhere, settled

BLOCKS, NS, WIDTH = 3, 150, 1
SIZES = [(0, 2), (17, 1), (90, 2)]
FIELDS = config(hidden_size=1296, intermediate_size=1600)  # of which a thread polls several units
READERS = dict(zip(VALUES, ("qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj", "lm_head"), strict=True))
WIRES: dict[str, Sync] = {"Tagged": mk.Tagged(), "Sentinel": mk.Sentinel(), "Flag": mk.Flag()}


def plain(sync: Sync) -> Configure:
    def decide(s: ScheduleBlock) -> None:
        settled(s)
        everywhere(sync)(s)
        s["attention"].split(kv=2)
        s["down_proj"].columns(ways=2).prefetch(registers=0)
        for op in ("qkv_proj", "o_proj", "gate_up_proj", "lm_head"):
            s[op].gather("shared")
        s.finish("block")

    return decide


def polled(sync: Sync) -> Configure:
    def decide(s: ScheduleBlock) -> None:
        plain(sync)(s)
        for producer, reader in READERS.items():
            s.edge(producer, reader).poll(back_off=NS, width=WIDTH)
        for op in ("attention", "down_proj"):
            s.edge(op, op).poll(back_off=NS)

    return decide


@cache
def kernels() -> dict[str, Compiled]:
    forms = {f"{name}, {form.__name__}": form(sync) for name, sync in WIRES.items() for form in (plain, polled)}
    made = {n: compiled("llama-tiny", tokens=2, blocks=BLOCKS, fields=FIELDS, configure=f) for n, f in forms.items()}
    assert all(not check_plan(one.plan).findings for one in made.values())
    return one_build(made)


@cache
def results(form: str) -> tuple[Result, ...]:
    return tuple(Bench(kernels()[form]).play(steps(kernels()[form], SIZES)))


@pytest.mark.parametrize("wire", WIRES)
def test_the_bits_are_those_of_polls_without(wire: str) -> None:
    made = kernels()[f"{wire}, polled"]
    check_seeds(Bench(made, defines={DETECT: "1"}), steps(made, SIZES), results(f"{wire}, plain"), (0, 1, 4))


def test_inputs_in_registers_and_of_a_finisher() -> None:
    """Sentinels that are polled by the lanes which multiply, and merged by a warp of its own."""

    def decide(s: ScheduleBlock, *, back_off: int) -> None:
        s.ring("weights", stages=6)
        everywhere(mk.Sentinel())(s)
        for op in ("qkv_proj", "o_proj", "gate_up_proj"):
            s[op].gather("registers")
        if back_off:
            for producer, reader in READERS.items():
                s.edge(producer, reader).poll(back_off=back_off)
            s.edge("attention", "attention").poll(back_off=back_off)

    made, beside = (compiled("llama-tiny", blocks=BLOCKS, configure=lambda s, n=n: decide(s, back_off=n)) for n in (NS, 0))
    assert made.plan.tunables.finishes and "mk::poll_operand<mk::BackOff<mk::Dense<mk::Sentinel>, 150>" in made.source
    bench = Bench(made, defines={DETECT: "1"}, seed=3, policy=policy_of(3))
    some = steps(made, [(0, 1), (33, 1)])
    for ours, theirs in zip(bench.play(some), Bench(beside).play(some), strict=True):
        assert ours.same(theirs)
    assert bench.program.report is not None and not bench.program.report.races


def test_a_sleeper_gives_up_too() -> None:
    made = kernels()["Sentinel, polled"]
    site = next(s for s in made.plan.sites if s.kind == "publish" and s.op == "o_proj")
    bench = Bench(made, defines={"MK_LOST_SIGNAL": str(site.id)})
    with pytest.raises(MegakernelHang, match="gate_up_proj"):
        bench.play(steps(made, [(0, 2)]))


def test_what_the_kernel_and_the_plan_say() -> None:
    made, beside = (compiled("llama-tiny", tokens=2, blocks=BLOCKS, fields=FIELDS, configure=f(mk.Tagged())) for f in (polled, plain))
    assert "BackOff" not in beside.source and made.source.count("mk::BackOff<") == len(READERS) + 2
    assert {int(n) for n in re.findall(r"mk::Poll<(\d+),", made.source)} == {WIDTH}
    assert max(int(n) for n in re.findall(r"mk::Poll<(\d+),", beside.source)) > WIDTH
    assert f"a thread polls at most {WIDTH} vectors at once, {NS} ns between polls in vain" in made.plan_text
    decisions, _, plan = difference(beside, made)
    assert ["edge o_proj -> gate_up_proj: back_off", "-", "150"] in decisions[1]
    assert {"exchanges"} <= {line[0] for line in plan[1]}
