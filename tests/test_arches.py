"""Every architecture: what its table says, kernels that fit it, what it refuses, and rings that are filled without bulk copies."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import megadsl as mk
from megadsl.build.host import DETECT
from megadsl.build.nvcc import build_cubin
from megadsl.check.budgets import needed_features
from megadsl.check.checker import check_plan
from megadsl.diagnostics import MegadslError
from megadsl.driver import Compiled, compile_model
from megadsl.dsl.registry import models
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.emulate.explore import policy_of
from megadsl.machine import ARCHES, DEFAULT_ARCH, MACHINES, code_for, machine, running, runs
from megadsl.resources import include
from megadsl.types import KIB
from tests.kernels import Bench, bits, check, check_seeds, compiled, judge, one_build, steps
from tests.schedules import gated, settled
from tests.test_kernel_steps import singles, together
from tools.regenerate import COMMAND, architectures

OLDER = [arch for arch in ARCHES if not machine(arch).bulk]
LARGE = {"gemma-2b", "gemma-2-2b", "gemma-3-1b", "llama-3.1-8b", "qwen3-8b"}  # not all of their kernels for several tokens fit 99 KB
HOPPER = machine(DEFAULT_ARCH)


# -- the table


@pytest.mark.parametrize(
    ("arch", "smem_per_block", "smem_per_sm"),
    [
        ("sm_80", 163, 164),
        ("sm_86", 99, 100),
        ("sm_89", 99, 100),
        ("sm_90a", 227, 228),
        ("sm_100a", 227, 228),
        ("sm_103a", 227, 228),
        ("sm_120a", 99, 100),
    ],
)
def test_limits_are_those_of_the_programming_guide(arch: str, smem_per_block: int, smem_per_sm: int) -> None:
    its = machine(arch)
    assert (its.smem_per_block, its.smem_per_sm) == (smem_per_block * KIB, smem_per_sm * KIB)
    assert its.smem_for(1) == its.smem_per_block and its.smem_for(2) == its.smem_per_sm // 2 - its.smem_reserved
    assert (its.registers_per_sm, its.registers_per_thread, its.max_warps_per_block, its.named_barriers) == (65536, 255, 32, 16)
    assert 0 < its.bandwidth < 1e13 and its.l2_bytes > 0 and its.sms > 0


def test_the_table_is_closed() -> None:
    assert [m.arch for m in MACHINES.values()] == list(ARCHES) and set(OLDER) == {"sm_80", "sm_86", "sm_89"}
    older, newer = (MACHINES[arch].features for arch in ("sm_80", DEFAULT_ARCH))
    assert older < newer and {m.features for m in MACHINES.values()} == {older, newer}
    assert {arch for arch, m in MACHINES.items() if m.run_on == m.name} == {DEFAULT_ARCH}


def test_which_kernels_run_where() -> None:
    assert runs("sm_90a", "sm_90") and not runs("sm_90a", "sm_100") and not runs("sm_90a", "sm_80")
    assert all(runs("sm_80", on) for on in ("sm_80", "sm_86", "sm_90", "sm_120")) and not runs("sm_86", "sm_80")
    assert (code_for("sm_80", "sm_90"), code_for("sm_90a", "sm_90"), code_for("sm_80", "sm_80")) == ("sm_90", "sm_90a", "sm_80")
    assert running("sm_80", "sm_90").name == "H200" and running("sm_80", "sm_75").arch == "sm_80"


def test_what_was_run_is_said_everywhere(repository: Path) -> None:
    """In the manifest and in the README's table, of every architecture; megadsl doctor and compile print the same words."""
    assert architectures() in (repository / "README.md").read_text(), f"run: {COMMAND}"
    for arch, its in MACHINES.items():
        assert compile_model("llama-tiny", arch=arch, check=False).manifest["proof"] == its.proof and its.proof in architectures()
    assert machine("sm_86").proof.startswith("never run on hardware")
    elsewhere = replace(machine("sm_80"), run_on="H200").proof
    assert elsewhere == "never run on A100 80 GB SXM; its kernels have run on H200, compiled for it from compute_80 PTX"


# -- schedules


@pytest.mark.parametrize("arch", ARCHES)
def test_default_schedules_fit(arch: str) -> None:
    its = machine(arch)
    for name in models():
        for tokens in (1, 5, 16) if name not in LARGE else (1,):
            plan = compile_model(name, arch=arch, tokens=tokens, check=False).plan
            assert plan.smem_bytes <= its.smem_per_block and plan.schedule.blocks <= its.sms
            assert plan.tunables.copies == ("bulk" if its.bulk else "lanes") and set(needed_features(plan)) <= its.features
            assert plan.tunables.threads // 32 <= its.max_warps_per_block


@pytest.mark.parametrize("arch", ARCHES)
def test_plans_are_proved(arch: str) -> None:
    for tokens in (1, 16):
        assert not check_plan(compile_model("llama-tiny-wide", arch=arch, tokens=tokens, check=False).plan).findings


def test_a_plan_for_a_newer_machine_is_refused() -> None:
    plan = compile_model("llama-tiny", check=False).plan
    found = check_plan(plan, replace(HOPPER, features=machine("sm_80").features)).findings
    assert [f.code for f in found] == ["MK550"] and "needs 1 feature 'bulk_copy', sm_90a has 0" in found[0].message


@pytest.mark.parametrize(
    ("decide", "code", "words"),
    [
        (lambda s: s.registers("moved"), "MK245", "sm_86 has no setmaxnreg"),
        (lambda s: s.launch("op"), "MK167", "one op a launch needs 'dependent_launch', which sm_86 does not have"),
        (lambda s: s["o_proj"].prefetch(l2=1024), "MK167", "l2 prefetch by an instruction needs 'l2_bulk_prefetch', which sm_86 does"),
        (lambda s: s.ring("weights", stages=7), "MK170", "sm_86 gives a block 101376"),
        (lambda s: s.blocks(83), "MK163", "sm_86 runs at most 82 at once"),
    ],
)
def test_what_an_older_machine_refuses(decide: Callable[[ScheduleBlock], Any], code: str, words: str) -> None:
    kernel = mk.kernel(models()["llama-tiny"][0].function)
    with mk.schedule(kernel, arch="sm_86") as s:
        decide(s)
    with pytest.raises(MegadslError) as caught:
        compile_model(kernel, config=dict(models()["llama-tiny"][1]), arch="sm_86")
    assert caught.value.code == code and words in str(caught.value) and "mend:" in str(caught.value)


# -- rings that the lanes of a warp fill


@pytest.fixture(scope="module")
def made() -> dict[str, Compiled]:
    windowed = models()["llama-tiny"][1] | {"sliding_window": 40}
    return one_build(
        {
            "one": compiled("llama-tiny", blocks=3, arch="sm_80", configure=settled),
            "bulk": compiled("llama-tiny", blocks=3, configure=settled),
            "loaders": compiled("llama-tiny", tokens=2, blocks=5, arch="sm_80", configure=gated),
            "odd": compiled("llama-tiny-odd", tokens=5, blocks=3, arch="sm_89"),
            "window": compiled("llama-tiny", tokens=16, blocks=2, arch="sm_86", fields=windowed),
        }
    )


SIZES = {
    "one": [(0, 1), (17, 1), (100, 1)],
    "loaders": [(0, 2), (33, 1), (70, 2)],
    "odd": [(0, 5), (16, 3), (60, 5)],
    "window": [(0, 16), (39, 2), (90, 16)],
}


@pytest.mark.parametrize("name", SIZES)
def test_kernels_are_right_under_any_schedule(made: dict[str, Compiled], name: str) -> None:
    assert "mk::LaneCopies" in made[name].source and made[name].plan.tunables.copies == "lanes"
    check(made[name], SIZES[name], seeds=(1, 2, 3))


def test_how_stages_are_filled_changes_no_bit(made: dict[str, Compiled]) -> None:
    lanes, bulk = made["one"], made["bulk"]
    assert bulk.plan.tunables.copies == "bulk"
    some = steps(lanes, SIZES["one"])
    assert all(a.same(b) for a, b in zip(Bench(lanes).play(some), Bench(bulk).play(some), strict=True))


def test_several_steps_a_launch(made: dict[str, Compiled]) -> None:
    bench = Bench(made["loaders"])
    for kv, seed in ((0, 0), (30, 1), (45, 2)):
        bench.program.seed = 0
        expected = singles(bench, 4, kv, tokens=2)
        bench.program.seed, bench.program.policy = seed, policy_of(seed)
        assert together(bench, 4, kv, tokens=2).same(expected)


def test_no_schedule_shows_a_race() -> None:
    kernel = compiled("llama-tiny", tokens=2, blocks=3, arch="sm_80", configure=gated)
    bench = Bench(kernel, defines={DETECT: "1"})
    some = steps(kernel, [(0, 2), (17, 2)])
    first = bench.play(some)
    judge(kernel, bench.weights, some, first)
    check_seeds(bench, some, first, range(5))
    assert together(bench, 3, 17, tokens=2).ids == singles(bench, 3, 17, tokens=2).ids
    assert bits(bench.program.logits).numel() and not bench.program.report.races


# -- machine code


@mk.kernel
def small(cfg: Any, tokens: int = 1) -> mk.Tensor:
    """Little to compile, with all that differs between architectures: both kinds of vectors, several steps a launch, winners."""
    x = mk.embed(mk.weight("embed", (512, 128)), mk.input_ids(tokens))
    for layer in mk.layers(2):
        x = x + mk.linear(mk.rms_norm(x, layer.weight("norm", 128), eps=1e-5), layer.weight("linear", (128, 128)))
    return mk.argmax(mk.linear(x, mk.weight("head", (512, 128))))


@pytest.mark.parametrize(
    ("model", "arch", "on"),
    [*((small, arch, None) for arch in ARCHES), ("llama-tiny", "sm_80", "sm_90")],
    ids=[*ARCHES, "llama-tiny for sm_80 on sm_90"],
)
def test_every_architecture_has_machine_code(model: mk.Kernel | str, arch: str, on: str | None) -> None:
    found = compile_model(model, arch=arch)
    cubin = build_cubin(found.source, arch, [include()], {}, on=on)
    ptx = (cubin.path.parent / "kernel.ptx").read_text()
    assert cubin.spill_bytes == 0 and cubin.registers * found.manifest["threads"] <= machine(arch).registers_per_sm
    assert f".target {arch}" in ptx
    copies = {name: name in ptx for name in ("cp.async.bulk.shared", "cp.async.cg.shared", "cp.async.mbarrier.arrive.noinc")}
    assert list(copies.values()) == ([True, False, False] if machine(arch).bulk else [False, True, True])
    waits = set(re.findall(r"mbarrier\.(try_wait|test_wait)", ptx))
    assert waits == ({"try_wait"} if machine(arch).bulk else {"test_wait"})


def test_stages_follow_shared_memory() -> None:
    """Of one model: the more a machine has, the deeper its ring."""
    rings = {machine(arch).smem_per_block: compile_model("llama-3.2-1b", arch=arch, check=False).schedule.rings[0][1] for arch in ARCHES}
    depths = [rings[smem].stages for smem in sorted(rings)]
    assert len(depths) == 3 and all(a < b for a, b in pairwise(depths))
