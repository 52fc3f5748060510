"""The mutation score: every mistake in a plan is refused, a share of those in a kernel is noticed; arguments are few and used."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from check_tools import by_block, plan
from typer.testing import CliRunner

import megadsl as mk
from megadsl.check.checker import check_plan
from megadsl.check.edits import edited
from megadsl.check.mutants import EQUIVALENT as PLAN_EQUIVALENT
from megadsl.check.mutants import PlanMutant, judge_plan, plan_mutants, score_plan
from megadsl.cli import app
from megadsl.driver import Compiled, compile_model
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.dsl.schedule_file import parse
from megadsl.emit import emit
from megadsl.emulate.abi import Change, Point
from megadsl.emulate.boundary import copied_elsewhere_at_once, copies_wait_for_stages
from megadsl.emulate.equivalent import BEHIND_FLAGS, EQUIVALENT, OWN_ROWS, ROWS_BEHIND_FLAGS, Facts, argument_for
from megadsl.emulate.frames import Frame
from megadsl.emulate.mutants import CHANGES, Mutant, Place, mutants
from megadsl.machine import DEFAULT_ARCH, machine
from megadsl.resources import include
from megadsl.runtime.explore import Subject
from megadsl.runtime.mutants import DEADLOCK, DETECTOR, RECORDED_SEEDS, RESULT, Judge, MutableSubject, small_rings
from tests.kernels import MAX_KV
from tests.kernels import compiled as compiled_kernel
from tests.schedules import everywhere, kv_loader
from tools.syncs import synced

SM90 = machine("sm_90a")


def test_every_mutant_of_a_plan_is_refused_or_argued_away() -> None:
    plan = compile_model("llama-tiny", blocks=5, max_kv=64, check=False).plan
    verdicts = score_plan(plan, SM90)
    assert [v.name for v in verdicts if v.survived] == []
    argued = [v for v in verdicts if v.argument]
    assert len(verdicts) > 200 and 0 < len(argued) <= len(verdicts) / 10
    assert all(v.evidence for v in verdicts if v.code)
    assert len({v.name for v in verdicts}) == len(verdicts)


def test_a_share_of_a_full_model_s_mutants_is_refused() -> None:
    plan = compile_model("smollm2-135m", check=False).plan
    some: list[PlanMutant] = list(plan_mutants(plan))[::40]
    assert len(some) > 5
    verdicts = [judge_plan(mutant, plan, SM90) for mutant in some]
    assert [v.name for v in verdicts if v.survived] == []


# Most arguments are about kernels whose warps finish what they multiply: a finisher meets the others where something would be in conflict.
BY_BLOCK = parse(f"arch = {DEFAULT_ARCH}\n\nfinish = block\n", "by block")


def test_arguments_about_plans_name_mutants_that_exist() -> None:
    plans = [
        compile_model("smollm2-135m", check=False).plan,
        compile_model("llama-tiny", blocks=132, max_kv=64, check=False).plan,
        plan("llama-tiny", by_block(), blocks=132, max_kv=64),
        plan("llama-tiny", kv_loader, blocks=5),  # pauses
    ]
    found = [(m.what, m.where) for made in plans for m in plan_mutants(made)]
    for e in PLAN_EQUIVALENT:
        assert any(what == e.what and where.startswith(e.where) for what, where in found), e


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return compile_model("llama-tiny", blocks=3, max_kv=MAX_KV, schedule=BY_BLOCK)  # with its comments, which say what is whose


@pytest.fixture(scope="module")
def judge(compiled: Compiled) -> Judge:
    return MutableSubject(Subject(compiled.manifest, emit(small_rings(compiled.plan))), tuple(range(1, 11)))()


@pytest.fixture(scope="module")
def found(judge: Judge) -> tuple[Place, ...]:
    return judge.home.points(RECORDED_SEEDS)[0]


@pytest.fixture(scope="module")
def facts(compiled: Compiled, found: tuple[Place, ...]) -> Facts:
    return Facts(small_rings(compiled.plan), found, include())


def test_points_are_those_of_the_kernel(found: tuple[Place, ...]) -> None:
    """Everything but what sentinels have, what blocks without work do (here each has some), words of launches that are given up, and
    clusters."""
    absent = {Point.SHARED, Point.EMPTY, Point.ZERO_TRIP, Point.SEND, Point.CLUSTER}
    assert {place.kind for place in found} == set(Point) - absent
    for place in found:
        assert place.frames and place.keys and place.text
        assert place.role in ("loader", "consumer", "common")
    waits = {place.op for place in found if place.kind is Point.POLL}
    assert waits >= {"qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj", "lm_head"}
    assert len({(place.kind, place.frames) for place in found}) == len(found)


def test_one_mutant_of_each_sort_is_noticed(judge: Judge, found: tuple[Place, ...], facts: Facts) -> None:
    """The last one of each: ops late in the step."""
    sorts: dict[tuple[Point, str], Mutant] = {}
    for mutant in mutants(found, 10**7):
        if not argument_for(mutant, facts):
            sorts[mutant.place.kind, mutant.what] = mutant
    verdicts = [judge.judge(mutant) for mutant in sorts.values()]
    assert [v.name for v in verdicts if v.possible and v.survived] == []
    assert {v.killed_by for v in verdicts} >= {DETECTOR, DEADLOCK, RESULT}
    assert all(v.evidence for v in verdicts if v.killed_by)


def test_rings_are_small_enough_for_every_release_to_be_waited_for(compiled: Compiled, judge: Judge, found: tuple[Place, ...]) -> None:
    made = small_rings(compiled.plan)
    assert [ring.stages for _, ring in made.schedule.rings] == [4]  # a norm's vector and three tiles in registers
    assert compiled.plan.schedule.rings[0][1].stages > 4 and not check_plan(made).findings
    last = [place for place in found if place.op == "lm_head" and place.within("Reader::release") and place.within("consume_tiles")]
    dropped = [m for m in mutants(last, 10**6) if m.place.kind is Point.ARRIVE and m.what == "arrival dropped"]
    assert dropped and {judge.judge(mutant).killed_by for mutant in dropped} == {DEADLOCK}


def test_half_of_one_arrival_is_no_mutant(judge: Judge, found: tuple[Place, ...]) -> None:
    halves = [m for m in mutants(found, 10**6) if m.what == "half the arrivals"]
    possible = {m.place.text: judge.judge(m).possible for m in halves}
    assert possible == {"ptx::mbar_init(full + i, Copies::kArrivals);": False, "ptx::mbar_init(empty + i, consumer_warps);": True}


def test_without_a_mutant_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch, judge: Judge, found: tuple[Place, ...]) -> None:
    monkeypatch.setattr(judge, "seeds", (1,))
    nowhere = Mutant(Place(Point.WAIT, "", "", "", found[0].frames, "", ()), CHANGES[Point.WAIT][0])
    verdict = judge.judge(nowhere)
    assert not verdict.killed_by and not verdict.possible


def test_what_nobody_notices_is_tried_in_another_grid(judge: Judge, found: tuple[Place, ...]) -> None:
    """There a point is the one to which the same lines lead. At home this mutant makes its mistake nowhere, and nothing is noticed."""
    more = compile_model("llama-tiny", blocks=4, max_kv=MAX_KV, schedule=BY_BLOCK)
    both = MutableSubject(judge.home.subject, (3,), Subject(more.manifest, emit(more.plan)))()
    place = next(p for p in found if p.kind is Point.BLOCK_BARRIER and p.within("take_token"))
    verdict = both.judge(Mutant(replace(place, keys=()), Change.DROP, 10**7))
    assert (verdict.killed_by, verdict.blocks) == (DETECTOR, 4)


def test_what_orders_rows_between_steps_is_worked_out_from_the_plan() -> None:
    one, two, more = (
        compile_model("llama-tiny", tokens=tokens, blocks=blocks, max_kv=64, check=False).plan
        for tokens, blocks in ((1, 5), (2, 5), (2, 8))
    )
    assert not copied_elsewhere_at_once(one) and copied_elsewhere_at_once(two)
    assert copies_wait_for_stages(small_rings(two), of_the_head=False) and not copies_wait_for_stages(more, of_the_head=False)
    apart = compiled_kernel("llama-tiny", blocks=5, configure=kv_loader).plan
    assert not copies_wait_for_stages(apart, of_the_head=True)  # a ring of its own has nothing else in it


# Places that the kernel of these tests does not have; its hand-offs have no flags.
ELSEWHERE = {"multiply_direct", "run_heads", "gather_kept", "publish_halves", "leave_cluster"}
OF_OTHERS = {OWN_ROWS, BEHIND_FLAGS, ROWS_BEHIND_FLAGS}


def test_arguments_about_kernels_name_places_that_exist(found: tuple[Place, ...]) -> None:
    headers = "".join(path.read_text() for path in (include() / "megadsl").glob("*.h"))
    for e in EQUIVALENT:
        if e.function in ELSEWHERE:
            assert f" {e.function}(" in headers, e
        else:
            assert any(place.kind is e.kind and place.within(e.function) for place in found), e


def test_arguments_about_kernels_are_few_and_hold_only_where_their_facts_do(facts: Facts) -> None:
    every = mutants(facts.places, 10**6)

    function = {e.argument: e.function for e in EQUIVALENT if e.function not in ELSEWHERE and e.argument not in OF_OTHERS}

    def argued(some: Facts) -> set[str]:
        return {function[argument] for m in every if (argument := argument_for(m, some))}

    held = set(function.values())
    assert argued(facts) == held
    gave_up = replace(facts.places[0], frames=(Frame("mk::detail::tell_all", "wait.h", 1),))
    assert argued(replace(facts, places=(*facts.places, gave_up))) == held - {"Loader::drain", "may_run", "finish_step"}
    lonely = tuple(place for place in facts.places if place.kind is not Point.PHASE or place.within("Loader::retire"))
    assert argued(replace(facts, places=lonely)) == held - {"Loader::retire"}
    refused = edited(facts.plan, lambda i: None if i.call == "gather" else i)
    assert argued(replace(facts, plan=refused)) == {"may_run", "finish_step"}


def test_arguments_about_inputs_in_registers_hold_only_where_their_facts_do() -> None:
    kernel, config = synced("llama-tiny-odd", "sentinel")
    made = compile_model(kernel, config=config, blocks=5, max_kv=MAX_KV).plan
    frames = (Frame("mk::Reader::release", "ring.h", 1), Frame("multiply_direct", "direct.h", 1))
    place = Place(Point.WARP_BARRIER, "consumer", "o_proj", "", frames, "", ())
    facts = Facts(made, (place,), include())
    both = [replace(place, op=op) for op in ("o_proj", "down_proj")]
    assert all(argument_for(Mutant(p, Change.DROP), facts) for p in both)  # the finisher meets the block before it polls
    alone = replace(facts, plan=replace(made, tunables=replace(made.tunables, finishes=False)))
    part = edited(alone.plan, lambda i: replace(i, args={**i.args, "whole": False}) if i.call == "hold_tiles" else i)
    merged = edited(part, lambda i: replace(i, syncs=("done",)) if i.call == "merge" else i)
    assert [bool(argument_for(Mutant(p, Change.DROP), alone)) for p in both] == [True, True]  # behind the barrier of the partial sums
    assert [bool(argument_for(Mutant(p, Change.DROP), replace(alone, plan=merged))) for p in both] == [True, False]
    inner = replace(place, frames=(frames[0], Frame("multiply_from_ring", "direct.h", 1), frames[1]))
    assert not argument_for(Mutant(inner, Change.DROP), facts)


def mutant(kind: Point, change: Change, function: str, op: str = "o_proj", text: str = "") -> Mutant:
    return Mutant(Place(kind, "consumer", op, "", (Frame(f"mk::{function}", "any.h", 1),), text, ()), change)


BEHIND = [mutant(Point.STORE, Change.NARROW, name) for name in ("Outgoing::send", "publish_unit", "publish_halves")]
BEHIND += [mutant(Point.LOAD, Change.NARROW, name) for name in ("gather_units", "add_parts_of")]
FENCES = [mutant(Point.FENCE, Change.DROP, name, text="ptx::fence_acq_rel_gpu();") for name in ("release_rows", "acquire_rows")]


def test_arguments_about_flags_hold_only_where_everything_has_them() -> None:
    def but_one(s: ScheduleBlock) -> None:
        everywhere(mk.Flag())(s)
        s["o_proj"].sync(mk.Tagged())

    both = (everywhere(mk.Flag()), but_one)
    flags, others = (compiled_kernel("llama-tiny", tokens=2, blocks=5, configure=decide).plan for decide in both)
    proxies = mutant(Point.FENCE, Change.DROP, "release_rows", text="ptx::fence_proxy_async();")
    facts = Facts(flags, (proxies.place,), include())
    assert [argument_for(m, facts) for m in BEHIND] == [BEHIND_FLAGS] * len(BEHIND)
    assert [argument_for(m, facts) for m in FENCES] == [ROWS_BEHIND_FLAGS] * 2
    assert not argument_for(proxies, facts)
    assert not any(argument_for(m, replace(facts, plan=others)) for m in [*BEHIND, *FENCES])
    assert not any(argument_for(m, replace(facts, places=())) for m in FENCES), "nobody fences for the proxies"
    refused = replace(facts, plan=edited(flags, lambda i: None if i.call == "gather" else i))
    assert not any(argument_for(m, refused) for m in [*BEHIND, *FENCES])


def test_arguments_about_residual_rows_hold_only_where_they_are_the_blocks_own() -> None:
    def exchanged(s: ScheduleBlock) -> None:
        s["o_proj"].residual("exchange")

    def moved(s: ScheduleBlock) -> None:
        exchanged(s)
        s["o_proj"].split(share_offset=2)
        s["down_proj"].split(share_offset=1)

    made, others = (compiled_kernel("llama-tiny-odd", blocks=4, configure=decide).plan for decide in (exchanged, moved))
    of = [mutant(Point.LOAD, Change.NARROW, "gather_kept"), mutant(Point.POLL, Change.DROP, "gather_kept")]
    facts = Facts(made, (), include())
    assert [argument_for(m, facts) for m in of] == [OWN_ROWS] * 2
    sliced = edited(made, lambda i: replace(i, args={**i.args, "begin": 8}) if i.call == "gather_kept" else i)
    by_block = replace(made, tunables=replace(made.tunables, finishes=False))
    for other in (others, sliced, by_block):
        assert not any(argument_for(m, replace(facts, plan=other)) for m in of)
    assert not any(argument_for(replace(m, place=replace(m.place, op="qkv_proj")), facts) for m in of), "it gathers none"


def test_a_word_that_only_hints_is_read_for_the_window_alone() -> None:
    """So that no mutant need be made of storing it: whatever it says, the same load waits for its stage's empty phase."""
    lines = [line.strip() for path in sorted((include() / "megadsl").rglob("*.h")) for line in path.read_text().splitlines()]
    reads = [line for line in lines if re.search(r"ld_shared\w*(<\w+>)?\([^;]*meeting", line)]
    told = "const u32 told = Copies::same(ptx::ld_shared_volatile(meeting));"  # in OwnWindows::now(), for ops with windows of their own
    assert [line.startswith("MK_DEV u32 now() const") or line == told for line in reads] == [True, True]
    asked = [line for line in lines if "window.template now<" in line]
    assert asked == ["while (in_flight >= window.template now<Copies>())"] and not any("window.now" in line for line in lines)
    assert sum("st_shared_hint(" in line and "MK_" not in line for line in lines) == 2


def test_the_command_counts_them() -> None:
    done = CliRunner().invoke(app, ["check", "llama-tiny", "--max-kv", str(MAX_KV), "--blocks", "4", "--mutants", "--json"])
    assert done.exit_code == 0, done.output
    counts = json.loads(done.stdout)["mutants"]
    assert counts["survivors"] == [] and counts["total"] == counts["killed"] + counts["equivalent"]
    assert counts["by_checker"] == counts["killed"] > 200 and counts["by_detector"] == counts["by_deadlock"] == counts["by_result"] == 0


def test_a_hole_in_the_checker_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megadsl.check.checker.check_memory", lambda *_: [])
    done = CliRunner().invoke(app, ["check", "llama-tiny", "--max-kv", str(MAX_KV), "--blocks", "4", "--mutants"])
    assert done.exit_code == 1 and "unnoticed: barrier 'gathered' dropped: matrix of qkv_proj (consumer)" in done.output
