"""Windows of their own while blocks meet for an op's input: what is told to whom, what the loader makes of it, and that no bit changes."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from megadsl.build.host import DETECT
from megadsl.check.checker import check_plan
from megadsl.check.edits import with_words
from megadsl.driver import Compiled
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.emulate.explore import policy_of
from megadsl.lower.difference import difference
from megadsl.lower.windows import PLACE, begins_late, following
from megadsl.types import KIB
from tests.kernels import Bench, Configure, Result, check_seeds, compiled, one_build, steps
from tests.schedules import kv_loader, settled
from tests.test_detector_models import change_header

BLOCKS, STAGE, USUAL, RINGS = 3, 16 * KIB, 4, 2
SIZES = [(0, 2), (40, 1), (100, 2)]
OWN = {"attention": 1, "o_proj": 3 * STAGE, "down_proj": 12 * STAGE}  # bytes: less than a stage, three, more than the ring has


def plain(s: ScheduleBlock) -> None:
    settled(s)
    s["attention"].split(kv=2)
    s.ring("weights", window=USUAL * STAGE, meeting_window=RINGS * STAGE)


def owned(**windows: int) -> Configure:
    def decide(s: ScheduleBlock) -> None:
        plain(s)
        for op, size in windows.items():
            s[op].poll(meeting_window=size)

    return decide


def two_loaders(s: ScheduleBlock) -> None:
    owned(**OWN)(s)
    kv_loader(s)


def kernel(configure: Configure, model: str = "llama-tiny", tokens: int = 2, arch: str = "sm_90a") -> Compiled:
    return compiled(model, tokens=tokens, blocks=BLOCKS, configure=configure, arch=arch)


@cache
def kernels() -> dict[str, Compiled]:
    forms = {"plain": plain, "owned": owned(**OWN), "two loaders": two_loaders}
    return one_build({name: kernel(form) for name, form in forms.items()})


@cache
def results() -> tuple[Result, ...]:
    return tuple(Bench(kernels()["plain"]).play(steps(kernels()["plain"], SIZES)))


@pytest.mark.parametrize("form", ["owned", "two loaders"])
def test_not_a_bit_changes(form: str) -> None:
    made = kernels()[form]
    assert not check_plan(made.plan).findings
    check_seeds(Bench(made, defines={DETECT: "1"}), steps(made, SIZES), results(), (0, 1, 3))


def test_lanes_agree_about_it() -> None:
    """Where a stage is copied by all lanes of a warp, which look at the word one by one."""

    def few(s: ScheduleBlock) -> None:
        s["o_proj"].poll(meeting_window=STAGE)

    made, beside = kernel(few, arch="sm_80"), kernel(lambda s: None, arch="sm_80")
    bench = Bench(made, defines={DETECT: "1"}, seed=6, policy=policy_of(6))
    for ours, theirs in zip(bench.play(steps(made, SIZES)), Bench(beside).play(steps(beside, SIZES)), strict=True):
        assert ours.same(theirs)


def test_what_the_loader_makes_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Each word that is told is seen, and taken for as many stages as it has bytes: at least one, at most the ring's; 1 for the ring's."""
    told = '(std::fprintf(stderr, "told %u of %u %u\\n", told, usual, at_meetings), told <= 1)'
    change_header(monkeypatch, tmp_path, "ring.h", "(told <= 1)", f"({told})")
    header = tmp_path / "include" / "megadsl" / "ring.h"
    result = "return min_u32(max_u32((told - 1) * kWindowUnit / kStageBytes, 1), most);"
    text = header.read_text()
    assert result in text
    printed = result.replace("return ", "const u32 found = ") + ' std::fprintf(stderr, "found %u %u\\n", told, found); return found;'
    header.write_text(text.replace(result, printed).replace("#pragma once\n", "#pragma once\n#include <cstdio>\n", 1))
    made = kernel(owned(**OWN))
    bench = Bench(made)
    capfd.readouterr()
    bench.play(steps(made, [(40, 2)]))
    shown = capfd.readouterr().err
    seen = Counter(int(word) for word in re.findall(r"told (\d+) of 4 2", shown))
    found = {int(word): int(stages) for word, stages in re.findall(r"found (\d+) (\d+)", shown)}
    stages = dict(made.schedule.rings)["loader"].stages
    wanted = {1 + max(1, size // 128): min(max(1, size // STAGE), stages) for size in OWN.values()}
    assert seen[0] and seen[1] and found.items() <= wanted.items() and len(found) >= 2


def test_who_tells_what() -> None:
    """The op that ends tells the window of the one behind it, and what an attention has passed on is told when the next one begins."""
    made = kernel(owned(**OWN))
    words = {r.name: r.words[0] for r in made.plan.shape if r.name.endswith("_meeting")}
    at = next(a.offset for a in made.plan.areas if a.name == "meeting")
    assert {word & ((1 << PLACE) - 1) for word in words.values()} == {at}
    units = {name.removesuffix("_meeting"): word >> PLACE for name, word in words.items()}
    three, twelve = 1 + 3 * STAGE // 128, 1 + 12 * STAGE // 128
    assert units == {"qkv_proj": 2, "attention": three, "o_proj": 1, "gate_up_proj": twelve, "down_proj": 1, "lm_head": 1}
    assert made.source.count("block.meeting(") == 1 and "block.meeting(s.attention_meeting, true);" in made.source
    graph = kernel(plain, "gemma2-tiny").graph
    inside = [op for op in graph.ops if op.loop is not None]
    assert following(graph, inside[-1]) is inside[0]
    late = begins_late(graph, inside[0])
    assert late is inside[-1] and "if (layer != 0) block.meeting(" in kernel(owned(o_proj=STAGE), "gemma2-tiny").source


def test_numbers_are_data() -> None:
    first, second, none = kernel(owned(o_proj=STAGE)), kernel(owned(gate_up_proj=3 * STAGE, attention=1)), kernel(plain)
    assert first.source == second.source != none.source
    assert "OwnWindows" not in none.source and "with_meeting" not in none.source
    decisions, derived, plan = difference(none, first)
    assert ["op o_proj: meeting_window", "-", "16 KiB"] in decisions[1]
    assert ["op o_proj: meeting_window", "0 B", "16 KiB"] in derived[1] and {"schedule", "shape"} <= {line[0] for line in plan[1]}
    assert "16384 bytes in flight until its input is there" in first.plan_text


def test_a_word_that_is_told_elsewhere() -> None:
    made = kernel(owned(o_proj=STAGE))
    word = next(r.words[0] for r in made.plan.shape if r.name == "qkv_proj_meeting")
    for wrong in (word + 4, word & ((1 << PLACE) - 1)):
        (found,) = check_plan(with_words(made.plan, "qkv_proj_meeting", {0: wrong})).findings
        assert found.code == "MK513" and "outside of 'meeting'" in found.message
