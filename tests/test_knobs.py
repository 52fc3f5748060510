"""What the table of knobs says of each: whether turning it keeps the kernel's code, and every bit of the results.

All knobs that keep bits are turned together here, those that keep the code one by one as well; ``pytest --all-knobs`` turns each alone,
which builds an emulated kernel for each.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from megadsl.driver import Compiled, compile_model
from megadsl.dsl.knobs import KNOBS, Knob
from megadsl.dsl.registry import load
from megadsl.dsl.schedule_file import parse
from tests.kernels import MAX_KV, Bench, Result, config, steps
from tests.knob_samples import ALL, BLOCKS, SAMPLES, TOGETHER, TOKENS, Sample, text
from tools.knobs import PAGE, page

SIZES = [(0, 2), (1, 1), (16, 2), (33, 1), (100, 2), (17, 2)]
KEEP_BITS = [(knob, sample) for knob, sample in ALL if knob.same_bits]


@cache
def made(lines: str, fields: tuple[tuple[str, int], ...] = ()) -> Compiled:
    """llama-tiny under the lines of a schedule file; its source without comments, which name shapes that the code takes as data."""
    file, own = parse(text(lines), "knobs.schedule"), config(**dict(fields))
    compiled = compile_model(load("llama-tiny")[0], config=own, tokens=TOKENS, blocks=BLOCKS, max_kv=MAX_KV, schedule=file, check=False)
    return replace(compiled, source=re.sub(r"[ \t]*//.*", "", compiled.source))


def results(compiled: Compiled) -> list[Result]:
    return Bench(compiled).play(steps(compiled, SIZES))


@cache
def beside(lines: str) -> list[Result]:
    return results(made(lines))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "turned" in metafunc.fixturenames:
        some = KEEP_BITS if metafunc.config.getoption("--all-knobs") else [(k, s) for k, s in KEEP_BITS if not k.code]
        metafunc.parametrize(("knob", "turned"), some, ids=[f"{k.of}-{k.name}-{i}" for i, (k, _) in enumerate(some)])


def test_a_knob_that_keeps_the_bits(knob: Knob, turned: Sample) -> None:
    compiled = made(f"{turned.beside}\n{turned.turned}")
    for ours, theirs in zip(results(compiled), beside(turned.beside), strict=True):
        assert ours.same(theirs), f"{knob.of} {knob.name} is said to change no bit"


def test_knobs_that_keep_the_bits_together() -> None:
    for ours, theirs in zip(results(made(TOGETHER)), beside(""), strict=True):
        assert ours.same(theirs)


def test_all_that_keep_the_bits_are_among_them() -> None:
    """Other launches have tests of their own, tests/test_kernel_launches.py and tests/test_kernel_layer_launches.py; so have results that
    leave from registers, which need a finisher: tests/test_lower_publish.py."""
    decided = {(knob.of, knob.name) for knob, _ in KEEP_BITS if knob.code and not knob.name.startswith("launch")} - {("op", "publish")}
    there = {(of if ":" in left else "kernel", left.rpartition(": ")[2]) for left, of in lefts(TOGETHER)}
    assert decided <= there


def lefts(lines: str) -> list[tuple[str, str]]:
    return [(line.partition(" = ")[0], line.partition(" ")[0]) for line in lines.splitlines() if line]


@pytest.mark.parametrize("knob", KNOBS, ids=lambda k: f"{k.of}-{k.name}")
def test_knobs_that_keep_the_code(knob: Knob) -> None:
    """What is data changes no line of it; of what is not, some way of turning it does. All change the plan."""
    changed = []
    for sample in SAMPLES[knob.of, knob.name]:
        before, after = made(sample.beside, sample.fields), made(f"{sample.beside}\n{sample.turned}", sample.fields)
        assert before.plan_text != after.plan_text, "the sample turns nothing"
        changed.append(before.source != after.source)
    assert any(changed) == knob.code


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m tools.knobs"
