"""A layer a launch: the same bits as the megakernel wherever launches begin, and what the plan must keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

import megadsl as mk
from megadsl.build.host import DETECT
from megadsl.check.checker import check_plan
from megadsl.check.mutants import score_plan
from megadsl.diagnostics import MegadslError
from megadsl.driver import Compiled, compile_model
from megadsl.dsl.overrides import SetKernel, in_scope
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.dsl.schedule_file import parse
from megadsl.emulate import LaunchReport
from megadsl.ir.plan import Plan
from megadsl.lower.exchanges import kept_locally
from megadsl.lower.launches import launches
from megadsl.lower.scope import crosses_launches
from megadsl.machine import machine
from megadsl.runtime.control import MegakernelHang
from megadsl.source import UNKNOWN
from tests.check_tools import assert_found, plan, without
from tests.kernels import Bench, Step, compiled, config, explored, one_build, steps
from tests.lower_tools import GPU
from tests.schedules import everywhere, gated, kv_loader

Decide = Callable[[ScheduleBlock], None]
OPS = ("qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj")  # of a layer
SIZES = {1: [(0, 1), (70, 1), (33, 1)], 2: [(0, 2), (70, 1), (33, 2)], 16: [(0, 16), (40, 11)]}


def by_layer(then: Decide | None = None, **how: str) -> Decide:
    """Launches of a layer, and the other decisions."""

    def decide(s: ScheduleBlock) -> None:
        if then is not None:
            then(s)
        s.launch("layer", **how)

    return decide


def finished_by_a_warp(s: ScheduleBlock) -> None:
    everywhere(mk.Sentinel())(s)
    s.finish("warp")


def asked_ahead(s: ScheduleBlock) -> None:
    s["o_proj"].prefetch(l2=4096, ahead_of="attention")
    s["qkv_proj"].prefetch(l2=4096, ahead_of="down_proj")  # the next layer's


# Tokens, blocks, layers, what is decided for the megakernel too, and of the launches
CASES: dict[str, tuple[int, int, int, Decide | None, dict[str, str]]] = {
    "from the attention on": (2, 5, 4, None, {}),
    "one layer": (2, 3, 1, None, {}),
    "two loaders": (2, 5, 3, kv_loader, {"start": "o_proj", "trigger": "down_proj"}),
    "gated": (2, 5, 2, gated, {"start": "gate_up_proj", "trigger": "attention"}),
    "whole layers": (1, 3, 3, finished_by_a_warp, {"start": "qkv_proj", "trigger": "end"}),
    "asked ahead": (2, 3, 3, asked_ahead, {"start": "down_proj"}),
    "16 tokens": (16, 5, 2, None, {"trigger": "qkv_proj"}),
}


def kernel(name: str, decide: Decide | None) -> Compiled:
    tokens, blocks, layers, _, _ = CASES[name]
    return compiled("llama-tiny", tokens=tokens, blocks=blocks, fields=config(num_hidden_layers=layers), configure=decide)


@cache
def made(name: str) -> Compiled:
    *_, then, how = CASES[name]
    return kernel(name, by_layer(then, **how))


@cache
def wholes() -> dict[str, Compiled]:
    """The megakernels beside them."""
    return one_build({name: kernel(name, then) for name, (_, _, _, then, _) in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits(name: str) -> None:
    whole, parts, layers = wholes()[name], made(name), CASES[name][2]
    some, bench = steps(whole, SIZES[CASES[name][0]]), Bench(parts)
    expected = Bench(whole).play(some)
    for seed in (0, 3, 4):
        bench.program.seed = seed
        assert all(a.same(b) for a, b in zip(expected, bench.play(some), strict=True))
    between = [] if layers == 1 else ["megakernel_layer"]
    assert parts.manifest["entries"] == ["megakernel_first", *between, "megakernel_last"]
    last = len(parts.manifest["entries"]) - 1
    assert parts.manifest["launches"] == [(0, 0), *((1, layer) for layer in range(layers - 1)), (last, layers - 1)]
    assert not parts.manifest["several_steps"]


def test_no_schedule_shows_a_race() -> None:
    parts = made("two loaders")
    some, bench = steps(parts, [(0, 2), (30, 1)]), Bench(parts, defines={DETECT: "1"})
    first = bench.play(some)

    result = explored(bench, some, first, range(5))
    assert result.findings == () and result.launches == 10


def test_a_hang_is_told_and_left() -> None:
    """A launch that waits for what nobody publishes says so; the launches behind it return, and the next step is right."""
    bench = Bench(made("from the attention on"))
    (step,) = steps(bench.made, [(33, 2)])
    expected = bench.run(step)
    launch = bench.program.emulator.launch  # type: ignore[union-attr]

    def lame(*args: object, part: tuple[int, int] = (0, 0), **how: object) -> LaunchReport:
        return launch(*args, part=part, **{**how, "step_limit": 200 if part == (1, 1) else 0})  # type: ignore[arg-type]

    bench.program.emulator.launch = lame  # type: ignore[union-attr,method-assign,assignment]
    with pytest.raises(MegakernelHang):
        bench.run(step)
    bench.program.emulator.launch = launch  # type: ignore[union-attr,method-assign]
    assert bench.run(step).same(expected)


@pytest.mark.parametrize("start", OPS)
def test_what_stays_in_a_block(start: str) -> None:
    """Residuals come by exchange where a launch may begin between the two ops, and only there."""
    lowered = plan("llama-tiny", by_layer(start=start), 2, blocks=5)
    kept = kept_locally(lowered.graph, lowered.schedule)
    # o_proj adds x, which the layer before ends with, and down_proj adds o_proj's result
    assert set(kept) == {"qkv_proj": {"o_proj"}, "attention": {"o_proj"}, "o_proj": {"o_proj"}}.get(start, {"x"})
    embed, down = lowered.graph.ops[0], lowered.graph.op("down_proj")
    assert not crosses_launches(down, lowered.graph.op("lm_head"), lowered.graph, lowered.schedule)
    assert crosses_launches(embed, lowered.graph.op("attention"), lowered.graph, lowered.schedule)


@pytest.mark.parametrize("start", OPS)
@pytest.mark.parametrize("trigger", ["begin", "end", "o_proj"])
def test_launches_of_layers_hold(start: str, trigger: str) -> None:
    lowered = plan("llama-tiny", by_layer(start=start, trigger=trigger), 2, blocks=5)
    report = check_plan(lowered, GPU)
    assert not report.findings and any(line.startswith("launches: 3 kernels") for line in report.proved)
    assert lowered.schedule.resident == (1 if trigger == "end" else 2)
    # who lets the next one begin: each at once, none, or each when it comes to the op, and where it never does, at once
    at_once = {"begin": [True] * 3, "end": [False] * 3}
    early = OPS.index("o_proj") < OPS.index(start)
    assert [launch.at_once for launch in launches(lowered)] == at_once.get(trigger, [not early, False, early])


@pytest.mark.parametrize(("name", "tokens"), [("smollm2-135m", 1), ("qwen3-tiny", 5), ("llama-tiny-wide", 2), ("llama-3.2-1b", 1)])
def test_models_hold(name: str, tokens: int) -> None:
    assert not check_plan(plan(name, by_layer(), tokens), GPU).findings


@pytest.fixture(scope="module")
def rotated() -> Plan:
    return plan("llama-tiny", by_layer(kv_loader, start="o_proj"), 2, blocks=3)


@pytest.mark.parametrize(
    ("call", "op", "code", "words"),
    [
        ("join_launch", "o_proj", "MK560", "'o_proj' touches exchange.x before its launch has waited for the one before"),
        ("await_step", "attention", "MK560", "'attention' touches kv.kv before"),
        ("gather_kept", "o_proj", "MK512", "'o_proj' reads 'kept' in shared memory, which holds nothing yet"),
        ("publish", "qkv_proj", "MK500", "'attention' waits for round"),
    ],
)
def test_broken_launches_are_found(rotated: Plan, call: str, op: str, code: str, words: str) -> None:
    assert_found(without(call, op)(rotated), code, words)


@pytest.mark.parametrize("decide", [by_layer(), by_layer(kv_loader, start="gate_up_proj", trigger="o_proj")])
def test_every_mutant_is_found(decide: Decide) -> None:
    verdicts = score_plan(plan("llama-tiny", decide, 2, blocks=3), GPU)
    assert [v.name for v in verdicts if v.survived] == [] and len(verdicts) > 200
    assert {v.code for v in verdicts if v.name.startswith("from ")} == {"MK560"}
    assert {v.code for v in verdicts if v.name.startswith("loaders are not told")} == {"MK521"}


def test_a_file_says_the_same() -> None:
    """The knobs of a file, those of Python, and what ``scope=`` makes of another schedule."""
    file = parse("arch = sm_90a\nlaunch = layer\nlaunch_start = o_proj\nlaunch_trigger = end\n", "some.schedule")
    asked = [
        compile_model("llama-tiny", schedule=file, check=False),
        compiled("llama-tiny", configure=by_layer(start="o_proj", trigger="end")),
    ]
    said = [(c.schedule.scope, c.schedule.start, c.schedule.trigger) for c in asked]
    assert said == [("layer", "o_proj", "end")] * 2
    assert "one layer a launch, from o_proj on, blocks to an SM: 1; the next launch may begin behind its last block" in asked[0].plan_text
    kept = in_scope(file.overrides, "layer", UNKNOWN)
    assert SetKernel((("start", "o_proj"),), UNKNOWN) in kept.records
    scopes = tuple(SetKernel((("scope", scope),), UNKNOWN) for scope in ("layer", "op"))
    assert in_scope(file.overrides, "op", UNKNOWN).records == scopes


@pytest.mark.parametrize(
    ("code", "words", "options"),
    [
        ("MK257", "a launch is a layer", {"tokens": 2, "sequences": 2}),
        ("MK167", "one layer a launch needs 'dependent_launch'", {"on": "older"}),
    ],
)
def test_what_cannot_be_launched_by_layers(code: str, words: str, options: dict[str, object]) -> None:
    if options.pop("on", None):
        options["on"] = replace(machine("sm_90a"), features=machine("sm_90a").features - {"dependent_launch"})
    with pytest.raises(MegadslError) as caught:
        compile_model("llama-tiny", scope="layer", **options)  # type: ignore[arg-type]
    assert caught.value.code == code and words in str(caught.value)


def test_a_model_without_layers() -> None:
    @mk.kernel
    def flat(cfg: object, tokens: int = 1) -> mk.Tensor:
        x = mk.embed(mk.weight("table", (64, 64)), mk.input_ids(tokens))
        return mk.argmax(mk.linear(x, mk.weight("head", (64, 64))))

    with pytest.raises(MegadslError) as caught:
        compile_model(flat, scope="layer")
    assert caught.value.code == "MK286" and "it has no layers" in str(caught.value)


def test_launches_without_room_beside_each_other() -> None:
    """Where half of an SM's shared memory is too little, one may say that launches follow each other."""
    with pytest.raises(MegadslError) as caught:
        compile_model("llama-tiny-wide", tokens=16, scope="layer", check=False)
    assert caught.value.code == "MK287" and 'trigger="end"' in str(caught.value)
    apart = compiled("llama-tiny-wide", tokens=16, configure=by_layer(trigger="end"))
    assert apart.schedule.resident == 1


def test_a_step_at_a_time() -> None:
    """Steps follow each other: rows that one appends are there for the next."""
    bench, other = Bench(made("one layer")), Bench(wholes()["one layer"])
    some = [Step((5, 9), 17, 3), Step((7,), 33, 4)]
    for one in some:
        assert bench.run(one).same(other.run(one))
    with pytest.raises(MegadslError, match=r"MK465.*a step is a chain of launches"):
        bench.program.set_steps(2)
