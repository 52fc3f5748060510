"""What comes into L2 by loads: whose bytes, in which order, that it changes no bit, and what happens where it goes wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megadsl.build.host import DETECT
from megadsl.check.checker import check_plan
from megadsl.check.edits import edited
from megadsl.check.mutants import score_plan
from megadsl.diagnostics import MegadslError
from megadsl.driver import Compiled
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.lower.difference import difference
from megadsl.lower.memory import block_parts
from megadsl.lower.scratch import SLOTS, scratch_region, slot_bytes
from megadsl.machine import machine
from megadsl.runtime.control import MegakernelHang
from tests.kernels import Bench, Configure, check_seeds, compiled, one_build, steps
from tests.schedules import kv_loader, settled
from tests.test_detector_models import change_header

TOKENS, BLOCKS, LAYERS = 2, 3, 2
SIZES = [(0, 2), (40, 1), (100, 2)]
BIG = 64 * 1024


def some(by: str) -> Configure:
    """A small part of an op's share, all of another's for the next layer, cached rows."""

    def decide(s: ScheduleBlock) -> None:
        settled(s)
        s["attention"].split(kv=2).prefetch(l2=1536, l2_by=by, ahead_of="down_proj")
        s["o_proj"].prefetch(l2=BIG, l2_by=by, ahead_of="qkv_proj")
        s["qkv_proj"].prefetch(l2=4096, l2_by="instruction", ahead_of="gate_up_proj")
        s["gate_up_proj"].prefetch(l2=BIG, l2_by=by)

    return decide


def by_two_loaders(s: ScheduleBlock) -> None:
    some("load")(s)
    kv_loader(s)


def one_op_a_launch(s: ScheduleBlock) -> None:
    s.launch("op")
    s.ring("weights", stages=5)
    s["attention"].split(kv=2)
    s["gate_up_proj"].prefetch(l2=BIG, l2_by="load")


def all_by_loads(s: ScheduleBlock) -> None:
    some("load")(s)
    s["qkv_proj"].prefetch(l2_by="load")


@cache
def kernels() -> dict[str, Compiled]:
    forms: dict[str, tuple[Configure, dict[str, Any]]] = {
        "instruction": (some("instruction"), {}),
        "load": (some("load"), {}),
        "two loaders": (by_two_loaders, {}),
        "in pages": (all_by_loads, {"kv_page": 16}),
        "in pages, by lanes": (all_by_loads, {"kv_page": 16, "arch": "sm_80"}),
    }
    size: dict[str, Any] = {"tokens": TOKENS, "blocks": BLOCKS}
    return one_build({name: compiled("llama-tiny", configure=form, **size, **how) for name, (form, how) in forms.items()})


@pytest.mark.parametrize("form", ["load", "two loaders", "in pages", "in pages, by lanes"])
def test_the_bits_are_those_of_instructions(form: str) -> None:
    """Under every policy, watched by the race detector; more copies are made than those of the ring alone."""
    made, plain = kernels()[form], kernels()["instruction"]
    beside = Bench(plain)
    wanted = beside.play(steps(plain, SIZES))
    bench = Bench(made, defines={DETECT: "1"})
    check_seeds(bench, steps(made, SIZES), wanted, range(6))
    assert bench.program.report is not None and beside.program.report is not None
    assert bench.program.report.copies > beside.program.report.copies


def test_how_many_copies_that_are() -> None:
    """Of each block's share, in pieces of half a stage; of cached rows, in the units' pieces; of the layers that are there."""
    plain, made = kernels()["instruction"], kernels()["load"]
    counts = []
    for one in (plain, made):
        bench = Bench(one)
        bench.play(steps(one, [(0, 2)]))
        assert bench.program.report is not None
        counts.append(bench.program.report.copies)
    slot = slot_bytes(dict(made.schedule.rings)["loader"])
    assert slot == 8192
    want = 0
    packs = {record["name"]: record for record in made.manifest["pack"]}
    for op in ("o_proj", "gate_up_proj"):
        for parts in block_parts(made.graph.op(op), made.schedule):  # type: ignore[arg-type]
            groups = sum(last - first for _, first, last in parts)
            size = min(BIG, groups * 8 * packs[op]["columns_padded"] * 2)
            want += LAYERS * -(-size // slot)
    assert counts[1] - counts[0] == want  # no cached rows: there are none


def test_one_op_a_launch() -> None:
    made = compiled("llama-tiny", tokens=TOKENS, blocks=BLOCKS, configure=one_op_a_launch)
    assert "mk::Scratch<2, 8192>" in made.source
    bench = Bench(made, defines={DETECT: "1"}, seed=2)
    plain = kernels()["instruction"]
    for ours, theirs in zip(bench.play(steps(made, SIZES)), Bench(plain).play(steps(plain, SIZES)), strict=True):
        assert ours.same(theirs)


def test_a_launch_that_is_given_up_ends() -> None:
    made = kernels()["load"]
    bench = Bench(made, defines={"MK_LOST_SIGNAL": str(next(s.id for s in made.plan.sites if s.kind == "publish"))})
    with pytest.raises(MegakernelHang):
        bench.play(steps(made, [(0, 2)]))


def test_the_emulator_sees_copies_that_outlive_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_header(monkeypatch, tmp_path, "scratch.h", "copy != issued; ++copy)", "copy == ~0u; ++copy)")
    made = compiled("llama-tiny", tokens=TOKENS, blocks=BLOCKS, configure=last_of_all)
    bench = Bench(made, policy=3, seed=8)

    def launches() -> None:
        for seed in range(8, 60, 5):
            bench.program.seed = seed
            bench.play(steps(made, [(0, 2)]))

    with pytest.raises(MegadslError, match=r"MK360.*on their way into its shared memory"):
        launches()


def last_of_all(s: ScheduleBlock) -> None:
    settled(s)
    s["lm_head"].prefetch(l2=BIG, l2_by="load")


def test_the_detector_sees_slots_that_are_not_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_header(monkeypatch, tmp_path, "scratch.h", "if (issued >= kSlots) {", "if (issued == ~0u) {")
    made = compiled("llama-tiny", tokens=TOKENS, blocks=BLOCKS, configure=last_of_all)
    bench = Bench(made, defines={DETECT: "1"}, seed=3, policy=3)
    found: list[str] = []
    for seed in range(3, 43, 5):
        bench.program.seed = seed
        try:
            bench.play(steps(made, [(0, 2)]))
        except MegadslError as fault:  # a barrier that is a round ahead
            found.append(str(fault))
        else:
            assert bench.program.report is not None
            found += map(str, bench.program.report.races)
    assert any("more arrivals on an mbarrier" in text for text in found) or any("Scratch" in text for text in found)


def test_the_plan_says_so() -> None:
    plain, made = kernels()["instruction"], kernels()["load"]
    decisions, derived, plan = difference(plain, made)
    assert ["op o_proj: l2_by", "instruction", "load"] in decisions[1]
    assert any(line[0].startswith("shared memory") for line in plan[1])
    assert any(line[0] == "shared memory" and line[1] != line[2] for line in derived[1])
    assert re.search(r"op o_proj: .* 65536 bytes into L2 by loads ahead of qkv_proj", made.plan_text)
    assert "writes smem.scratch.loader" in made.plan_text and "smem.scratch" not in plain.plan_text
    assert "scratch_loader" not in compiled("llama-tiny", tokens=TOKENS, blocks=BLOCKS, configure=some("instruction")).source
    assert any(line.startswith("L2: nobody reads scratch.loader") for line in check_plan(made.plan).proved)


def test_a_scratch_that_is_read() -> None:
    made = kernels()["load"].plan
    read = edited(made, lambda i: replace(i, reads=(*i.reads, scratch_region("loader"))) if (i.call, i.op) == ("matrix", "o_proj") else i)
    (found,) = check_plan(read).findings
    assert found.code == "MK525" and "'o_proj' reads 'scratch.loader'" in found.message and "read what the ring holds" in found.mend


def test_no_mutant_of_its_areas_survives() -> None:
    made = kernels()["two loaders"].plan
    verdicts = [v for v in score_plan(made, machine("sm_90a")) if "scratch" in v.name]
    assert len(verdicts) >= 8 and not [v.name for v in verdicts if v.survived]


def test_machines_without_the_instruction_can_load() -> None:
    def decide(s: ScheduleBlock) -> None:
        s["o_proj"].prefetch(l2=4096, l2_by="load")

    made = compiled("llama-tiny", blocks=BLOCKS, configure=decide, arch="sm_80")
    assert f"mk::Scratch<{SLOTS}" in made.source
    bench = Bench(made, defines={DETECT: "1"}, seed=4)
    plain = compiled("llama-tiny", blocks=BLOCKS, arch="sm_80")
    for ours, theirs in zip(bench.play(steps(made, [(0, 1), (20, 1)])), Bench(plain).play(steps(plain, [(0, 1), (20, 1)])), strict=True):
        assert ours.same(theirs)
