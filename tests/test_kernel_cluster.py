"""Splits of an attention that are added within a cluster of blocks, through distributed shared memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from lower_tools import GPU

import megadsl as mk
from megadsl.check.checker import check_plan
from megadsl.check.edits import edited
from megadsl.check.mutants import plan_mutants, score_plan
from megadsl.diagnostics import MegadslError
from megadsl.driver import Compiled
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.emulate.abi import Point
from megadsl.emulate.equivalent import Facts, argument_for
from megadsl.emulate.frames import Frame
from megadsl.emulate.mutants import mutants
from megadsl.resources import include
from megadsl.runtime.control import MegakernelHang
from megadsl.runtime.explore import Subject
from megadsl.runtime.mutants import MutableSubject
from megadsl.runtime.program import TRACE
from megadsl.trace.activity import activities
from megadsl.trace.handoffs import handoffs
from megadsl.trace.records import read_timeline
from tests.kernels import Bench, Configure, check, check_races, compiled, config, one_build, steps
from tests.schedules import VALUES
from tests.test_kernel_steps import singles, together
from tests.test_kernel_watchdog import publisher


def clustered(splits: int, *, finish: str | None = None, words: bool = False) -> Configure:
    def decide(s: ScheduleBlock) -> None:
        for op in VALUES:
            s[op].sync(mk.Sentinel())
        if finish is not None:
            s.finish(finish)
        s["attention"].split(kv=splits).merge("cluster")
        if words:
            s["attention"].publish("registers")

    return decide


ONE_HEAD = {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 80, "intermediate_size": 176}
# model, tokens, blocks, decisions, other fields, (cached rows, new tokens)
KERNELS: dict[str, tuple[str, int, int, Configure, dict[str, int], list[tuple[int, int]]]] = {
    "two": ("llama-tiny", 1, 4, clustered(2), {}, [(0, 1), (1, 1), (17, 1), (100, 1)]),
    "four-idle": ("llama-tiny", 2, 12, clustered(4), {}, [(0, 2), (33, 1), (90, 2)]),
    "eight": ("llama-tiny-odd", 1, 8, clustered(8), {}, [(5, 1), (127, 1)]),
    "words": ("llama-tiny", 1, 6, clustered(2, words=True), {}, [(0, 1), (40, 1)]),
    "by-the-block": ("llama-tiny", 1, 8, clustered(4, finish="block"), {}, [(0, 1), (65, 1)]),
    "many-tokens": ("llama-tiny", 5, 4, clustered(2), ONE_HEAD, [(0, 5), (47, 3)]),
    "mapped-heads": ("qwen3-tiny", 1, 6, clustered(2), {}, [(0, 1), (33, 1)]),
}


@cache
def kernels() -> dict[str, Compiled]:
    return one_build(
        {
            name: compiled(model, tokens=tokens, blocks=blocks, fields=config(**fields) if fields else None, configure=how)
            for name, (model, tokens, blocks, how, fields, _) in KERNELS.items()
        }
    )


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name: str) -> None:
    made = kernels()[name]
    assert made.manifest["cluster"] == made.schedule.op("attention").splits > 1
    assert made.plan.exchange("attention.parts").wire == "Async"
    check(made, KERNELS[name][-1], seeds=(3, 4))


def test_the_same_bits_as_by_an_exchange() -> None:
    """Where a thread adds one split in both forms."""

    def elsewhere(s: ScheduleBlock) -> None:
        clustered(2)(s)
        s["attention"].merge("exchange")
        s.edge("attention", "attention").sync(mk.Sentinel())

    ours, theirs = kernels()["two"], compiled("llama-tiny", blocks=4, configure=elsewhere)
    some = steps(ours, KERNELS["two"][-1])
    first, second = (Bench(one).play(some) for one in (ours, theirs))
    assert all(a.same(b) for a, b in zip(first, second, strict=True))


def test_several_steps_a_launch() -> None:
    bench = Bench(kernels()["four-idle"])
    for kv in (0, 45):
        assert together(bench, 4, kv, tokens=2).same(singles(bench, 4, kv, tokens=2))


def test_no_schedule_shows_a_race() -> None:
    for name in ("two", "four-idle"):
        made = kernels()[name]
        check_races(made, steps(made, KERNELS[name][-1][-2:]))


def test_a_launch_that_is_given_up_leaves_no_trace() -> None:
    """Blocks go on sending to each other, expect nothing any more, and leave together; the next launch finds all as it was."""
    made = replace(kernels()["two"])
    some = steps(made, [(20, 1)])
    right = Bench(made).play(some)
    faulty = Bench(made, defines={"MK_LOST_SIGNAL": str(publisher(made, "qkv_proj"))})
    for _ in range(2):
        with pytest.raises(MegakernelHang):
            faulty.play(some)
    assert all(a.same(b) for a, b in zip(right, Bench(made).play(some), strict=True))


def test_the_checker_knows_how_parts_travel() -> None:
    plan = compiled("llama-tiny", blocks=6, configure=clustered(2)).plan
    assert any("at the scope of the GPU, Async at the scope of a cluster;" in line for line in check_plan(plan, GPU).proved)
    verdicts = score_plan(plan, GPU)
    assert [v.name for v in verdicts if v.survived] == []
    killed = {v.name: v.code for v in verdicts}
    assert killed["clusters of 4 blocks instead of 2: launch"] == "MK535"
    assert killed["2 slots instead of 1: exchange attention.parts"] == "MK542"
    assert killed["half the bytes: area attention.received"] == "MK513"
    assert len({str(m) for m in plan_mutants(plan)}) == len(verdicts)


def test_parts_are_not_overwritten_before_they_are_added() -> None:
    """The next layer's parts go to the same place. That their sender knows of its reader rests on the gathers in between."""
    plan = compiled("llama-tiny", blocks=6, configure=clustered(2)).plan
    deaf = edited(plan, lambda i: None if i.call == "gather" and i.op in ("o_proj", "gate_up_proj", "down_proj", "qkv_proj") else i)
    found = next(d for d in check_plan(deaf, GPU).findings if d.code == "MK501" and "attention.parts" in d.message)
    assert "overwrites its slot" in found.detail and "more slots" in found.mend


def test_mistakes_in_the_cluster_are_noticed() -> None:
    made = compiled("llama-tiny", blocks=4, configure=clustered(2), max_kv=64)
    subject = MutableSubject(Subject(made.manifest, made.source), tuple(range(1, 6)))()
    places = subject.home.points((1, 2))[0]
    facts = Facts(made.plan, places, include())
    found = [m for m in mutants(places, 10**7) if m.place.kind in (Point.SEND, Point.CLUSTER, Point.EXPECT) and m.place.role != "loader"]
    assert {m.place.kind for m in found} == {Point.SEND, Point.CLUSTER, Point.EXPECT}
    for mutant in found:
        verdict = subject.judge(mutant)
        assert not verdict.possible or not verdict.survived or argument_for(mutant, facts), verdict
    argued = [m for m in found if argument_for(m, facts)]  # leaving: only a launch that is given up needs it
    assert argued and all(m.place.within("leave_cluster") for m in argued)
    gave_up = replace(places[0], frames=(Frame("mk::detail::tell_all", "wait.h", 1),))
    assert not any(argument_for(m, replace(facts, places=(*places, gave_up))) for m in argued)


def test_the_timeline_knows_who_sent_a_block_its_parts() -> None:
    bench = Bench(kernels()["four-idle"], defines={TRACE: "1"})
    bench.play(steps(bench.made, [(70, 2)]))
    timeline = read_timeline(bench.program.manifest, bench.program.buffers["trace"].numpy())
    found = [h for h in handoffs(timeline.layout, activities(timeline, 2e3)) if h.value == "attention.parts"]
    assert len(found) == 2 * 8  # of two layers, those blocks that have a unit
    for handoff in found:
        block = handoff.activity.block.number
        assert set(handoff.sources.blocks) == set(range(block // 4 * 4, block // 4 * 4 + 4)) and handoff.latency >= 0


def _with(**other: int | str) -> Configure:
    def decide(s: ScheduleBlock) -> None:
        clustered(int(other.get("splits", 2)))(s)
        if "sync" in other:
            s["attention"].sync(mk.Tagged())
        if "launch" in other:
            s.launch(str(other["launch"]))
        if "offset" in other:
            s["attention"].split(share_offset=int(other["offset"]))
        s["attention"].merge("cluster")  # here

    return decide


@pytest.mark.parametrize(
    ("how", "blocks", "tokens", "arch", "why", "mend"),
    [
        (_with(splits=3), 6, 1, "sm_90a", "it has 3 splits", "use .split(kv=n) with one of: 2, 4, 8"),
        (_with(splits=4), 4, 1, "sm_90a", "its 8 units find 4 blocks", "use fewer splits or more blocks"),
        (_with(), 5, 1, "sm_90a", "5 blocks are no clusters of 2", "use a multiple of that for the blocks"),
        (_with(splits=8), 128, 1, "sm_90a", "H200 runs 120 blocks in clusters of 8 at once, not 128", "use at most 120 blocks"),
        (_with(sync="tagged"), 4, 1, "sm_90a", "'attention' is not dense", "use mk.Sentinel() for it"),
        (_with(offset=1), 4, 1, "sm_90a", "its features are shared out by KV heads, not by an offset", "use .split(share_offset=0)"),
        (_with(), 4, 1, "sm_80", "sm_80 has no cluster", 'use .merge("exchange")'),
        (_with(), 4, 16, "sm_90a", "two warps have each tile of its queries", "use fewer tokens, or other consumer warps"),
    ],
)
def test_what_cannot_be_added_within_a_cluster(how: Configure, blocks: int, tokens: int, arch: str, why: str, mend: str) -> None:
    fields = config(num_attention_heads=4, num_key_value_heads=1) if tokens == 16 else None
    with pytest.raises(MegadslError) as raised:
        compiled("llama-tiny", tokens=tokens, blocks=blocks, fields=fields, configure=how, arch=arch)
    found = raised.value.diagnostics[0]
    assert (found.code, why in found.message, found.mend) == ("MK248", True, mend)
    assert found.span.line == how.__code__.co_firstlineno + 8


@pytest.mark.parametrize("scope", ["op", "layer"])
def test_a_step_of_many_launches_has_no_clusters(scope: str) -> None:
    with pytest.raises(MegadslError) as raised:
        compiled("llama-tiny", blocks=4, configure=_with(launch=scope))
    assert {d.code for d in raised.value.diagnostics} >= {"MK248"}
