"""Dry runs of loops of products: the same bits under every schedule, no race, no code of their own, and what cannot run dry is refused."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from megadsl.build.host import DETECT
from megadsl.build.nvcc import build_cubin, disassemble
from megadsl.check.checker import check_plan
from megadsl.driver import Compiled
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.emulate.explore import policy_of
from megadsl.lower.difference import difference
from megadsl.machine import DEFAULT_ARCH
from megadsl.resources import include
from tests.kernels import Bench, Configure, Result, check_seeds, compiled, config, one_build, steps
from tests.test_detector_models import change_header

BLOCKS = 5
SIZES = [(0, 2), (40, 1), (100, 2)]
LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")
TWO_TILES = config(intermediate_size=1040)  # a row group of the down projection


def shape(s: ScheduleBlock) -> None:
    s.ring("weights", stages=6)
    s.batch(2)
    s["attention"].split(kv=2)
    for op in LINEARS:
        s[op].gather("shared").prefetch(registers=0)


def dry(s: ScheduleBlock) -> None:
    shape(s)
    for op in LINEARS:
        s[op].dry_run()


def in_parts(s: ScheduleBlock) -> None:
    """Scales before the products, so that vectors lie in front of the tiles; split columns; a block finishes by itself."""
    shape(s)
    s.finish("block")
    s["qkv_proj"].scale("before")
    s["down_proj"].columns(ways=2)


def dry_in_parts(s: ScheduleBlock) -> None:
    in_parts(s)
    for op in LINEARS:
        s[op].dry_run()


def kernel(configure: Configure) -> Compiled:
    return compiled("llama-tiny", tokens=2, blocks=BLOCKS, fields=TWO_TILES, configure=configure)


@cache
def kernels() -> dict[str, Compiled]:
    return one_build({form.__name__: kernel(form) for form in (shape, dry, in_parts, dry_in_parts)})


@cache
def results(form: str) -> tuple[Result, ...]:
    return tuple(Bench(kernels()[form]).play(steps(kernels()[form], SIZES)))


@pytest.mark.parametrize(("form", "beside"), [("dry", "shape"), ("dry_in_parts", "in_parts")])
def test_not_a_bit_changes(form: str, beside: str) -> None:
    made = kernels()[form]
    assert not check_plan(made.plan).findings
    check_seeds(Bench(made, defines={DETECT: "1"}), steps(made, SIZES), results(beside), (0, 1, 2, 3))


def test_what_runs_dry_has_landed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the race detector sees reads of what is still on its way; so dry runs do happen."""
    change_header(monkeypatch, tmp_path, "dry.h", "return ptx::all(there);", "return true;")
    made = kernel(dry)
    bench = Bench(made, defines={DETECT: "1"})
    found: list[str] = []
    for seed in (1, 3, 8):
        bench.program.seed, bench.program.policy = seed, policy_of(seed)
        bench.play(steps(made, SIZES[:1]))
        assert bench.program.report is not None
        found += map(str, bench.program.report.races)
    assert any("multiply" in text or "copy" in text for text in found)


def test_the_loop_is_the_same_code() -> None:
    """As many products in the kernel as without: a copy of the loop would fetch the copy."""
    counts = [
        len(re.findall(r"\bHMMA\.", disassemble(build_cubin(kernel(form).source, DEFAULT_ARCH, [include()], {}).path)))
        for form in (shape, dry)
    ]
    assert counts[0] == counts[1] > 0


def test_what_the_plan_says() -> None:
    plain, made = kernel(shape), kernel(dry)
    assert "a dry run of its products ahead of its input" in made.plan_text and "dry run" not in plain.plan_text
    decisions, derived, plan = difference(plain, made)
    assert ["op o_proj: dry_run", "-", "yes"] in decisions[1] and ["op o_proj: dry_run", "no", "yes"] in derived[1]
    assert ["kernel code", "its own", "its own"] in derived[1] and [line[0] for line in plan[1]] == ["schedule"]
