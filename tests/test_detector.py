"""The race detector: planted mistakes are found and described, the right versions are clean, findings replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megadsl.build.host import DETECT
from megadsl.diagnostics import MegadslError
from megadsl.emulate import LaunchReport, Policy, Race, Run, explore, policy_of
from megadsl.emulate.frames import spec_of
from tests.emulator.harness import launch, room

SEEDS = range(10)
SOURCE = (Path(__file__).parent / "emulator" / "detector.cu").read_text().splitlines()

SWAP_WARPS, SWAP_LANES, FENCE, RELEASE, RING, COPY_OWN, PAIR, PLAIN, MIXED, AFTER_READ, PHASES, LANES, SENDS = SCENARIOS = range(13)
ONE_LANE, STALE_PHASE = 1, 2
EARLY_FREE, NO_LANDING_WAIT, NO_EXPECT, NO_INIT_FENCE = range(1, 5)
NO_ROOM_WAIT = 3
NO_ANSWER, NO_ARRIVAL_WAIT = 1, 2


def run(scenario: int, bug: int = 0, seed: int = 0, policy: int = 0) -> tuple[LaunchReport, int]:
    """The report, and the first word of kv."""
    kv = room(1024)
    report = launch(
        "detector",
        [scenario, bug],
        blocks=2,
        threads=64,
        cluster=2 if scenario == SENDS else 1,
        seed=seed,
        policy=policy,
        define=DETECT,
        weights=room(4096),
        kv=kv,
        exchange=room(256),
    )
    return report, int(kv.view(np.uint32)[0])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_right_protocols_are_clean(scenario: int) -> None:
    for seed in SEEDS:
        report, word = run(scenario, seed=seed, policy=policy_of(seed))
        assert report.races == () and report.hangs == (), f"seed {seed}"
        assert scenario != PAIR or word == 1


def race(scenario: int, bug: int = 1) -> Race:
    """The first race of the first seed that shows one."""
    for seed in SEEDS:
        try:
            races = run(scenario, bug, seed)[0].races
        except MegadslError as fault:  # some bugs also break the count of an mbarrier
            assert fault.code == "MK360"
            continue
        if races:
            return races[0]
    raise AssertionError("no seed shows a race")


@pytest.mark.parametrize(
    ("scenario", "bug", "kind", "space", "sides"),
    [
        (SWAP_WARPS, 1, "data race", "shared", {("write", "st_shared(row + ptx::thread_id()"), ("read", "ptx::thread_id() ^ 32")}),
        (SWAP_LANES, 1, "data race", "shared", {("write", "st_shared(row + ptx::thread_id()"), ("read", "ptx::thread_id() ^ 1")}),
        (FENCE, 1, "data race", "kv", {("write", "st_global<u32>(payload, 7u)"), ("read", "ld_global<u32>(payload)")}),
        (RELEASE, 1, "data race", "kv", {("write", "payload + ptx::thread_id(), 7u"), ("read", "ld_global<u32>(payload +")}),
        (RING, EARLY_FREE, "data race", "shared", {("copy write", "bulk_load(slot"), ("read", "ld_shared(slot.at")}),
        (RING, NO_LANDING_WAIT, "data race", "shared", {("copy write", "bulk_load(slot"), ("read", "ld_shared(slot.at")}),
        (RING, NO_EXPECT, "data race", "shared", {("copy write", "bulk_load(slot"), ("read", "ld_shared(slot.at")}),
        (RING, NO_INIT_FENCE, "mbarrier not fenced", "shared", {("copy read", "bulk_load(slot"), ("write", "mbar_init(full, 1)")}),
        (LANES, EARLY_FREE, "data race", "shared", {("copy write", "mbar_arrive_loaded(full)"), ("read", "ld_shared(slot.at")}),
        (LANES, NO_LANDING_WAIT, "data race", "shared", {("copy write", "mbar_arrive_loaded(full)"), ("read", "ld_shared(slot.at")}),
        (LANES, NO_ROOM_WAIT, "data race", "shared", {("copy write", "mbar_arrive_loaded(full)")}),
        (COPY_OWN, 1, "missing proxy fence", "kv", {("copy read", "bulk_load(slot, own"), ("write", "5u")}),
        (PLAIN, 1, "data race", "kv", {("plain write", "volatile u32*"), ("plain write", "volatile u32*")}),
        (MIXED, 1, "mixed sizes", "exchange", {("strong write", "st_relaxed<u64>"), ("strong read", "ld_relaxed<u32>")}),
        (AFTER_READ, 1, "data race", "kv", {("write", "st_global<u32>(word, 1u)"), ("read", "ld_global<u32>(word)")}),
        (SENDS, NO_ANSWER, "data race", "shared", {("copy write", "st_async(ptx::mapa(slot, 1)")}),
        (SENDS, NO_ARRIVAL_WAIT, "data race", "shared", {("copy write", "st_async("), ("read", "ptx::ld_shared(slot).x")}),
        (PHASES, ONE_LANE, "data race", "shared", {("write", "st_shared(row + lane, round)"), ("read", "ld_shared(row + lane % kBars)")}),
        (
            PHASES,
            STALE_PHASE,
            "data race",
            "shared",
            {("write", "st_shared(row + lane, round)"), ("read", "ld_shared(row + lane % kBars)")},
        ),
    ],
)
def test_planted_races_are_described(scenario: int, bug: int, kind: str, space: str, sides: set[tuple[str, str]]) -> None:
    found = race(scenario, bug)
    assert (found.kind, found.space) == (kind, space)
    for how, text in sides:
        assert any(side.how == how and text in side.text and text in SOURCE[side.line - 1] for side in (found.now, found.before)), found
    assert (found.block is None) == (space != "shared")


def test_both_sides_say_who_they_are() -> None:
    found = race(SWAP_WARPS)
    assert {found.now.warp, found.before.warp} == {0, 1} and found.now.block == found.before.block == found.block
    assert found.now.frames[0].function == "swap_warps" and found.now.frames[0].file == "kernel.cu"
    ring = race(RING, EARLY_FREE)
    copy, read = sorted((ring.now, ring.before), key=lambda side: side.how)
    assert copy.warp is None and (copy.site, copy.layer) == (10, 3)
    assert (read.site, read.layer, read.warp, read.width) == (11, 3, 1, 16)
    assert "after the wait of site 11" in str(ring)


SPEC_COMMENTS = """\
// role: consumer
// All warps work together.
void role() {
    // qkv_proj: 960 x 576  [llama.py:20]
    {
      run(
        // x * 2
        gather());
    }
"""


def test_comments_name_role_op_and_spec_line() -> None:
    lines = SPEC_COMMENTS.splitlines()
    assert spec_of(lines, 8) == ("consumer", "qkv_proj", "llama.py:20")
    assert spec_of(lines, 3) == ("consumer", "", "")
    assert spec_of([], 0) == ("", "", "")


@pytest.mark.parametrize(
    ("scenario", "bug", "code"), [(SWAP_WARPS, 1, "MK363"), (COPY_OWN, 1, "MK364"), (MIXED, 1, "MK365"), (RING, NO_INIT_FENCE, "MK366")]
)
def test_a_race_is_a_diagnostic(scenario: int, bug: int, code: str) -> None:
    found = race(scenario, bug)
    diagnostic = found.diagnostic()
    assert diagnostic.code == code and found.where in diagnostic.message and "kernel.cu:" in diagnostic.detail
    spec = replace(found, now=replace(found.now, span="llama.py:20")).diagnostic().span
    assert (spec.file, spec.line) == ("llama.py", 20)


def test_a_lane_knows_what_it_has_learned_and_not_what_its_warp_has() -> None:
    """Lanes share what they learn together."""
    found = race(PHASES, ONE_LANE)
    read = next(side for side in (found.now, found.before) if side.how == "read")
    assert (read.warp, read.lane) == (1, 9)


def test_an_unordered_pair_fails_under_some_seed() -> None:
    words = [run(PAIR, 1, seed)[1] for seed in SEEDS]
    assert 0 in words and 1 in words


def test_assumptions_are_counted() -> None:
    assert run(AFTER_READ)[0].observed > 0  # 4 bytes, read before a relaxed store that the writer observed
    assert run(RING)[0].refilled > 0
    assert run(RELEASE)[0].observed == run(RELEASE)[0].refilled == 0


@pytest.mark.parametrize("policy", list(Policy))
def test_policies_replay_and_differ(policy: Policy) -> None:
    first, again, even = (run(RING, 0, 7, p)[0] for p in (policy, policy, Policy.EVEN))
    assert first == again and (policy == Policy.EVEN or first.fingerprint != even.fingerprint)


def unordered_pair() -> Run:
    def launches(seed: int, policy: Policy) -> Iterator[LaunchReport]:
        report, word = run(PAIR, 1, seed, policy)
        yield report
        if word != 1:
            raise ValueError("stale")

    return launches


def early_free() -> Run:
    return lambda seed, policy: [run(RING, EARLY_FREE, seed, policy)[0]]


def test_explore_collects_findings_that_replay() -> None:
    ticks: list[int] = []
    result = explore(unordered_pair, SEEDS, progress=ticks.append)
    assert ticks == [*range(1, 11)] and result.launches == len(SEEDS) and result.stale > 0
    assert {finding.kind for finding in result.findings} == {"ValueError"}
    for finding in result.findings:
        assert run(PAIR, 1, finding.seed, finding.policy)[1] == 0


def test_explore_over_processes_is_the_same() -> None:
    alone, shared = (explore(early_free, range(4), processes) for processes in (1, 2))
    assert alone.findings == shared.findings != ()
    assert all((finding.kind == "race" and "slot" in finding.text) or finding.kind == "MegadslError" for finding in alone.findings)
