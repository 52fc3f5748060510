"""Layers of several kinds in one loop: windows and rotations that differ from layer to layer, in the emulator, against torch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import megadsl as mk
from megadsl.check.checker import check_plan
from megadsl.check.model import Device, attention_unit
from megadsl.check.ring import first_layers
from megadsl.driver import Compiled
from megadsl.dsl.registry import load
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.ir.graph import Rope
from megadsl.ir.plan import Record
from megadsl.lower.printer import print_graph
from megadsl.lower.shape import ALL_ROWS, ROPE_TABLES, WINDOWS
from megadsl.machine import DEFAULT_ARCH, machine
from megadsl.ops.cost import total_cost
from megadsl.reference import ReferenceModel
from megadsl.reference.plain import ATTENTION_FORMS, PlainModel
from megadsl.runtime.generate import Generator
from megadsl.runtime.kv import rope_of, rope_table
from megadsl.runtime.weights import TensorSource
from megadsl.types import PerLayer
from tests.kernels import (
    Bench,
    Configure,
    bits,
    check,
    check_races,
    compiled,
    config,
    distance,
    judge,
    one_build,
    steps,
    together,
    weights_for,
)
from tests.schedules import everywhere, kv_loader
from tests.specs import layers
from tests.test_kernel_window import edges

WINDOW = 24  # a chunk and a half
LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def direct(s: ScheduleBlock) -> None:
    everywhere(mk.Sentinel())(s)


def sentinels(s: ScheduleBlock) -> None:
    for op in ("embed", "qkv_proj", "attention", "o_proj"):
        s[op].sync(mk.Sentinel())


def of_model(model: str, windows: list[int | None], **fields: Any) -> dict[str, Any]:
    return load(model)[1] | {"num_hidden_layers": len(windows), "sliding_window": windows} | fields


def rotated(windows: list[int | None], thetas: list[float] | float, scalings: Any = None) -> dict[str, Any]:
    """A configuration of tests/specs/layers.py."""
    return {"hidden": 128, "heads": 4, "kv_heads": 2, "vocab": 256, "windows": windows, "thetas": thetas, "scalings": scalings}


# Model, tokens, blocks, window, configuration, schedule
CASES: list[tuple[str, int, int, int, dict[str, Any], Configure | None]] = [
    ("llama-tiny", 1, 2, WINDOW, {"windows": [WINDOW, None, 16]}, None),
    ("llama-tiny", 1, 3, WINDOW, {"windows": [None, WINDOW]}, direct),
    ("llama-tiny", 1, 5, 1, {"windows": [1, None]}, kv_loader),
    ("llama-tiny", 4, 3, WINDOW, {"windows": [WINDOW, None]}, None),  # FewRows
    ("llama-tiny-odd", 16, 5, 17, {"windows": [None, 17]}, None),  # Softmax
    ("qwen3-tiny", 5, 3, WINDOW, {"windows": [WINDOW, None]}, None),  # heads are mapped
    ("qwen3-tiny", 1, 2, WINDOW, {"windows": [None, WINDOW]}, direct),
]
ROTATED: list[tuple[int, int, dict[str, Any], Configure | None]] = [
    (1, 2, rotated([None] * 3, [1e4, 1e6, 1e4], [None, LINEAR, None]), None),
    (4, 3, rotated([WINDOW, None, WINDOW], [1e4, 1e6, 1e4]), sentinels),
    (16, 5, rotated([None, WINDOW], 1e4, [YARN, None]), None),
    (2, 3, rotated([WINDOW, None], [1e4, 1e6]), lambda s: s.launch("op")),
    (2, 3, rotated([WINDOW, None, WINDOW], [1e4, 1e6, 1e4]), lambda s: s.launch("layer")),
]


@cache
def kernels() -> list[Compiled]:
    """Those of CASES."""
    some = [
        compiled(model, tokens=tokens, blocks=blocks, fields=of_model(model, fields["windows"]), configure=configure)
        for model, tokens, blocks, _, fields, configure in CASES
    ]
    return list(together(*some))


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{CASES[i][1]}-{CASES[i][4]['windows']}")
def test_windows_by_layer(index: int) -> None:
    _, tokens, _, window, _, _ = CASES[index]
    check(kernels()[index], edges(window, tokens), seeds=(1,))


@pytest.mark.parametrize(("tokens", "blocks", "fields", "configure"), ROTATED, ids=lambda v: str(v) if isinstance(v, int) else "")
def test_rotations_by_layer(tokens: int, blocks: int, fields: dict[str, Any], configure: Configure | None) -> None:
    made = compiled(layers.step, tokens=tokens, blocks=blocks, fields=fields, configure=configure)
    results = check(made, [(0, tokens), (30, 1), (100, tokens)])
    if configure is None:
        bench, some = Bench(made), steps(made, [(0, tokens), (30, 1), (100, tokens)])
        table = bench.program.buffers["rope"].view(torch.float32).view(2, -1)
        table[1].copy_(table[0].clone())  # as if all layers were rotated alike
        assert distance(bench.play(some)[2].logits, results[2].logits) > 0.05


def test_each_layer_sees_through_its_own_window() -> None:
    """Behind the window, results are those of neither all layers with it nor all without; the layer without reads every chunk."""
    made = kernels()[3]  # [WINDOW, None]
    bench, (step,) = Bench(made), steps(made, [(100, 4)])
    mixed = bench.run(step).logits
    for windows in ([WINDOW, WINDOW], [None, None], [None, WINDOW]):
        other = compiled("llama-tiny", tokens=4, fields=of_model("llama-tiny", windows))
        assert distance(mixed, Bench(other, bench.weights).run(step).logits) > 0.02


def test_a_tree_of_tokens() -> None:
    made = kernels()[5]
    some = [
        replace(step, positions=tuple(step.kv + depth for depth in (0, 1, 1, 2, 2)), ancestors=(0b1, 0b11, 0b101, 0b1011, 0b10101))
        for step in steps(made, [(kv, 5) for kv in (WINDOW - 2, WINDOW, WINDOW + 7, WINDOW + 22, 90)])
    ]
    bench = Bench(made)
    judge(made, bench.weights, some, bench.play(some))


def test_several_steps_a_launch() -> None:
    """The same text step by step, several steps a launch, and at once in torch."""
    made = kernels()[3]
    weights, prompt = weights_for(made), [i * 37 % 512 for i in range(40)]
    generator = Generator(made, TensorSource(weights), "cpu", progress=False)
    ids = list(generator.generate(prompt, 12).ids)
    logits = bits(generator.program.logits[:1]).clone()
    several = Generator(made, TensorSource(weights), "cpu", progress=False, steps_per_launch=4)
    assert list(several.generate(prompt, 12).ids) == ids and bits(several.program.logits[:1]).equal(logits)
    exact = ReferenceModel(made.graph, {k: v.float() for k, v in weights.items()}, 64, "fp32").step([*prompt, *ids[:-1]])
    assert [int(i) for i in exact[len(prompt) - 1 :].argmax(-1)] == ids


@pytest.mark.parametrize("tokens", [1, 5])
def test_races(tokens: int) -> None:
    made = watched()[tokens]
    check_races(made, steps(made, [(WINDOW + 9, tokens), (100, 1)]))


@cache
def watched() -> dict[int, Compiled]:
    """Kernels for the race detector, which is a build of its own, by tokens."""
    return one_build({n: compiled(layers.step, tokens=n, fields=rotated([WINDOW, None], [1e4, 1e6])) for n in (1, 5)})


def test_layers_that_are_alike_are_a_constant() -> None:
    """The same kernel as that of one window, none, or one rotation."""
    for many, one in (([WINDOW] * 2, WINDOW), ([None] * 2, None), ([1024, None], None)):
        lists, single = (compiled("llama-tiny", fields=config(sliding_window=w)) for w in (many, one))
        assert lists.source == single.source and lists.manifest["shape"] == single.manifest["shape"]
    lists, single = (compiled(layers.step, fields=rotated([None] * 2, t)) for t in ([1e4] * 2, 1e4))
    assert lists.source == single.source and lists.manifest["shape"] == single.manifest["shape"]
    assert WINDOWS not in single.source and "LayerTable" not in single.source and "layer_angles" not in single.source


def test_the_kernel_does_not_depend_on_how_many_layers_there_are() -> None:
    few, many = (compiled("llama-tiny", fields=of_model("llama-tiny", [WINDOW, None] * n)) for n in (1, 3))
    assert few.source == many.source
    words = {r.name: r.words for r in many.plan.shape}[WINDOWS]
    assert words[:6] == (WINDOW, ALL_ROWS) * 3 and not any(words[6:])


def test_what_it_costs_and_covers() -> None:
    made, whole, all_of_them = (
        compiled("llama-tiny", fields=of_model("llama-tiny", w), max_kv=1024) for w in ([WINDOW, None], [None, None], [WINDOW, WINDOW])
    )
    bytes_at = [[total_cost(m.graph, 1, kv).kv_bytes for kv in (WINDOW - 1, 1000)] for m in (made, whole, all_of_them)]
    assert bytes_at[0][0] == bytes_at[1][0] == bytes_at[2][0]
    assert 2 * bytes_at[0][1] == bytes_at[1][1] + bytes_at[2][1]
    heads = Device(made.plan).heads("attention")
    assert heads.windows == (WINDOW, 0)
    for kv_len in range(0, 200):
        units = [attention_unit(heads.splits, split, kv_len, ALL_ROWS) for split in range(heads.splits)]
        assert units == [attention_unit(heads.splits, split, kv_len, 0) for split in range(heads.splits)]  # as mk::attention_unit is told


def test_the_checker_reads_the_table() -> None:
    """It plays every sequence of windows, and a table that says something else than the spec is refused."""
    made = compiled("llama-tiny", fields=of_model("llama-tiny", [WINDOW] * 5 + [None] + [WINDOW] * 5 + [None]))
    assert first_layers(Device(made.plan), 3) == [0, 3, 4, 5]
    target = machine(DEFAULT_ARCH)
    assert not check_plan(made.plan, target).findings

    def wrong(record: Record) -> Record:
        return replace(record, words=(WINDOW + 16, *record.words[1:])) if record.name == WINDOWS else record

    found = check_plan(replace(made.plan, shape=tuple(map(wrong, made.plan.shape))), target).findings
    assert [d.code for d in found] == ["MK530"] and "windows" in found[0].message


def test_tables_of_angles() -> None:
    made = compiled(layers.step, fields=rotated([None] * 3, [1e4, 1e6, 1e4], [None, LINEAR, None]))
    rope = rope_of(made.manifest["rope"])
    assert isinstance(rope.theta, PerLayer) and [rope.tables.index(rope.at(i)) for i in range(3)] == [0, 1, 0]
    assert {r.name: r.words for r in made.plan.shape}[ROPE_TABLES][:3] == (0, 1, 0)
    program = Bench(made).program
    table = program.buffers["rope"].view(torch.float32).view(2, -1, 32, 2)
    assert table[0].equal(rope_table(Rope(64, 1e4, "half"), 128)) and not table[1].equal(table[0])
    assert "theta=10000 | theta=1e+06 linear scaling by 8 by layer 0, 1, 0" in print_graph(made.graph)


def test_in_torch() -> None:
    made = compiled(layers.step, tokens=2, fields=rotated([6, None], [1e4, 1e6], [None, YARN]))
    weights = weights_for(made)
    exact = ReferenceModel(made.graph, weights, 32, "fp32").step(range(12))[-2:]
    for form in ATTENTION_FORMS:
        plain = PlainModel(made.graph, weights, 32, 2)
        for first in range(0, 12, 2):
            plain.set_inputs([first, first + 1], first)
            logits, _ = plain.step(first + 2, form)()
        assert distance(logits, exact) < 0.05
