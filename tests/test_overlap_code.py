"""Code that is read ahead: each line as often as the schedule says, by whom and when it says, and not a bit of a result changed."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megadsl.build.cubin import function_bytes
from megadsl.build.host import DETECT
from megadsl.build.nvcc import build_cubin, disassemble
from megadsl.build.report import INSTRUCTION_BYTES
from megadsl.check.checker import check_plan
from megadsl.check.edits import with_words
from megadsl.driver import Compiled
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.lower.difference import difference
from megadsl.machine import DEFAULT_ARCH, machine
from megadsl.resources import include
from megadsl.runtime.cuda import shape_of
from tests.kernels import Bench, compiled, one_build, steps
from tests.schedules import settled

TOKENS, BLOCKS, WARPS = 2, 3, 8
LINES = machine(DEFAULT_ARCH).hot_code_bytes // 128
SIZES = [(0, 2), (17, 1), (40, 2)]
FORMS: dict[str, dict[str, Any]] = {
    "none": {},
    "loader": {"role": "loader"},
    "loader, 2 blocks": {"role": "loader", "blocks": 2},
    "consumer": {"role": "consumer"},
    "consumer, whole": {"role": "consumer", "part": "whole"},
    "consumer, every 3": {"role": "consumer", "every": 3, "blocks": 1},
}
PREFETCHES = {
    "none": 0,
    "loader": LINES,
    "loader, 2 blocks": LINES,
    "consumer": LINES,
    "consumer, whole": BLOCKS * LINES,
    "consumer, every 3": LINES,
}


def kernel(form: str, blocks: int = BLOCKS) -> Compiled:
    def decide(s: ScheduleBlock) -> None:
        settled(s)
        s["attention"].split(kv=min(2, blocks))
        if FORMS[form]:
            s.warm_code(**FORMS[form])

    return compiled("llama-tiny", tokens=TOKENS, blocks=blocks, configure=decide)


@cache
def kernels() -> dict[str, Compiled]:
    return one_build({form: kernel(form) for form in FORMS})


@pytest.mark.parametrize("form", [form for form in FORMS if form != "none"])
def test_who_reads_what_and_when(form: str) -> None:
    made, plain = kernels()[form], kernels()["none"]
    bench, beside = Bench(made, defines={DETECT: "1"}, seed=3), Bench(plain)
    for index, (ours, theirs) in enumerate(zip(steps(made, SIZES * 2), steps(plain, SIZES * 2), strict=True)):
        assert bench.run(ours).same(beside.run(theirs))
        report = bench.program.report
        assert report is not None and not report.races and not report.hung
        due = index % 3 == 0 or form != "consumer, every 3"  # the first launch, and each that begins a multiple of three steps behind it
        assert (report.code_prefetches, report.code_lines) == ((PREFETCHES[form], LINES) if due else (0, 0))
    assert beside.program.report is not None and beside.program.report.code_prefetches == 0


def test_what_is_data() -> None:
    assert kernel("loader").source == kernel("loader, 2 blocks").source != kernel("none").source
    assert kernel("consumer").source == kernel("consumer, whole").source == kernel("consumer, every 3").source
    (decisions, derived, plan) = difference(kernel("none"), kernel("consumer, whole"))
    assert ["warm_code", "-", "consumer"] in decisions[1] and ["warm_code_part", "-", "whole"] in decisions[1]
    assert {"schedule", "role consumer"} <= {line[0] for line in plan[1]} and derived[1]
    assert "code is read ahead by consumer of all blocks, each the whole of it" in kernel("consumer, whole").plan_text


def test_its_size_is_known_when_it_is_compiled() -> None:
    made = kernel("loader")
    word = made.manifest["code_word"]
    assert made.manifest["shape"][word] == 0 and shape_of(made.manifest, 12_345)[word] == 12_345
    bare = kernel("none").manifest
    assert bare["code_word"] is None and shape_of(bare, 12_345) == bare["shape"]


@pytest.mark.parametrize("blocks", [1, 3, 17, 132])
@pytest.mark.parametrize("form", ["loader", "consumer, whole", "consumer, every 3"])
def test_the_checker_deals_the_lines_out(form: str, blocks: int) -> None:
    made = kernel(form, blocks)
    report = check_plan(made.plan)
    assert not report.findings and any(line.startswith("code: ") for line in report.proved)


def test_a_share_for_a_block_that_is_not_there() -> None:
    made = kernel("loader")
    (found,) = check_plan(with_words(made.plan, "code", {1: BLOCKS + 1})).findings
    assert found.code == "MK551" and "line 96 is read by 0 of them, not by 1" in found.message and "as many blocks" in found.mend
    whole = with_words(kernel("consumer, whole").plan, "code", {1: BLOCKS + 1})
    assert [d.code for d in check_plan(whole).findings] == ["MK551"]


def test_machine_code_reads_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel that does nothing else: the address of its entry, prefetches to be evicted last, and its size as nvcc has it."""
    monkeypatch.setenv("MEGADSL_CACHE_DIR", str(tmp_path))
    source = """#include "megadsl/code.h"
extern "C" __global__ void megakernel(const mk::CodeShape s, mk::Control* control) {
  mk::Context cx = {control, mk::ptx::smem_base().at<mk::u32>(0), mk::ptx::block_id(), {3, 0}, 0};
  mk::warm_code(cx, s, 1, mk::ptx::thread_id(), 32);
}
"""
    made = build_cubin(source, DEFAULT_ARCH, [include()], {})
    assert "prefetch.global.L2::evict_last" in (made.path.parent / "kernel.ptx").read_text()
    sass = disassemble(made.path)
    assert re.search(r"CCTL\.E\.PML2", sass)
    count = len(re.findall(r"/\*[0-9a-f]{4,}\*/\s+\S", sass))
    size = function_bytes(made.path, "megakernel")
    assert count * INSTRUCTION_BYTES == size and size % 128 == 0 and function_bytes(made.path, "other") == 0


def test_other_kernels_have_none_of_it() -> None:
    assert "warm_code" not in kernel("none").source and "CodeShape" not in kernel("none").source
