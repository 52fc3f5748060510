"""The mutation score: every mistake in a plan is refused, a share of those in a kernel is noticed; arguments are few and used."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from megadsl.check.mutants import EQUIVALENT as PLAN_EQUIVALENT
from megadsl.check.mutants import PlanMutant, judge_plan, plan_mutants, score_plan
from megadsl.cli import app
from megadsl.driver import compile_model
from megadsl.emulate.abi import Point
from megadsl.emulate.equivalent import EQUIVALENT
from megadsl.emulate.mutants import CHANGES, Mutant, Place, mutants, places
from megadsl.machine import machine
from megadsl.resources import include
from megadsl.runtime.explore import Subject
from megadsl.runtime.mutants import DEADLOCK, DETECTOR, RESULT, Judge, MutableSubject
from tests.kernels import MAX_KV, compiled

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


def test_arguments_about_plans_name_mutants_that_exist() -> None:
    plans = [
        compile_model("smollm2-135m", check=False).plan,
        compile_model("llama-tiny", blocks=132, max_kv=64, check=False).plan,
    ]
    found = [(m.what, m.where) for plan in plans for m in plan_mutants(plan)]
    for e in PLAN_EQUIVALENT:
        assert any(what == e.what and where.startswith(e.where) for what, where in found), e


@pytest.fixture(scope="module")
def judge() -> Judge:
    made = compiled("llama-tiny", tokens=1, blocks=3)
    return MutableSubject(Subject(made.manifest, made.source), tuple(range(1, 11)))()


@pytest.fixture(scope="module")
def found(judge: Judge) -> tuple[Place, ...]:
    records, _ = judge.points()
    assert judge.program.emulator is not None
    return places(records, judge.program.emulator.path, judge.subject.source, include())


def test_points_are_those_of_the_kernel(found: tuple[Place, ...]) -> None:
    """Everything but what only other wires have, and what blocks without work do: here each has some."""
    absent = {Point.ACQUIRE, Point.RELEASE, Point.EMPTY, Point.ZERO_TRIP}
    assert {place.kind for place in found} == set(Point) - absent
    for place in found:
        assert place.frames and place.keys and place.text
        assert place.role in ("loader", "consumer", "common")
    waits = {place.op for place in found if place.kind is Point.POLL}
    assert waits >= {"qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj", "lm_head"}
    assert len({(place.kind, place.frames) for place in found}) == len(found)


def test_one_mutant_of_each_sort_is_noticed(judge: Judge, found: tuple[Place, ...]) -> None:
    """The last one of each: ops late in the step."""
    sorts: dict[tuple[Point, str], Mutant] = {}
    for mutant in mutants(found, 10**7):
        if not any(e.kind is mutant.place.kind and mutant.place.within(e.function) for e in EQUIVALENT):
            sorts[mutant.place.kind, mutant.what] = mutant
    verdicts = [judge.judge(mutant) for mutant in sorts.values()]
    assert [v.name for v in verdicts if v.possible and v.survived] == []
    assert {v.killed_by for v in verdicts} >= {DETECTOR, DEADLOCK, RESULT}
    assert all(v.evidence for v in verdicts if v.killed_by)


def test_without_a_mutant_nothing_is_noticed(judge: Judge, found: tuple[Place, ...]) -> None:
    nowhere = Mutant(Place(Point.WAIT, "", "", "", found[0].frames, "", ()), CHANGES[Point.WAIT][0])
    verdict = judge.judge(nowhere)
    assert not verdict.killed_by and not verdict.possible


def test_arguments_about_kernels_name_places_that_exist(found: tuple[Place, ...]) -> None:
    for e in EQUIVALENT:
        assert any(place.kind is e.kind and place.within(e.function) for place in found), e


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
