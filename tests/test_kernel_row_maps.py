"""Maps of rows (norms behind linears) in the emulator: every wire, who finishes, residuals kept and gathered, one op a launch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import megadsl as mk
from megadsl.check.checker import check_plan
from megadsl.check.edits import edited, with_words
from megadsl.driver import Compiled
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.ir.graph import RowMap
from megadsl.lower.exchanges import kept_locally
from megadsl.lower.explain import rows as explained
from megadsl.lower.programs import instructions
from megadsl.machine import DEFAULT_ARCH, machine
from megadsl.ops.cost import cost
from megadsl.reference import ReferenceModel
from megadsl.reference.plain import PlainModel
from tests.kernels import Bench, Configure, check, check_races, compiled, distance, steps, weights_for
from tests.specs import row_maps

MAPS = ("after", "map")
VALUES = ("embed", "up", "down", "after", "mix", "map")


def fields(**changed: int) -> dict[str, Any]:
    return {"hidden": 128, "inter": 192, "layers": 3, "vocab": 256} | changed


def by(sync: mk.Sentinel | mk.Tagged | mk.Flag, **residuals: str) -> Configure:
    def configure(s: ScheduleBlock) -> None:
        for op in VALUES:
            s[op].sync(sync)
        for op, kept in residuals.items():
            s[op].residual(kept)

    return configure


def whole_block(s: ScheduleBlock) -> None:
    by(mk.Sentinel())(s)
    s.finish("block")


CASES: dict[str, tuple[int, int, dict[str, Any], Configure | None]] = {
    "tagged": (1, 2, fields(), None),
    "sentinel": (1, 3, fields(), by(mk.Sentinel())),
    "flag": (2, 5, fields(), by(mk.Flag())),
    "words": (1, 3, fields(), lambda s: (by(mk.Sentinel())(s), s["after"].publish("registers"))[0]),
    "the block finishes": (1, 3, fields(), whole_block),
    "idle blocks": (2, 20, fields(), by(mk.Sentinel())),
    "gathered residuals": (4, 3, fields(), by(mk.Tagged(), after="exchange", map="exchange")),
    "kept residuals": (5, 2, fields(), by(mk.Sentinel(), after="block", map="block")),
    "16 tokens": (16, 5, fields(), by(mk.Sentinel())),
    "no whole groups": (3, 2, fields(hidden=100), None),
    "an op a launch": (2, 3, fields(), lambda s: s.launch("op")),
    "a layer a launch": (2, 3, fields(), lambda s: s.launch("layer")),
}


def made(name: str) -> Compiled:
    tokens, blocks, cfg, configure = CASES[name]
    return compiled(row_maps.behind, tokens=tokens, blocks=blocks, fields=cfg, configure=configure)


@pytest.mark.parametrize("name", CASES)
def test_maps_of_rows(name: str) -> None:
    tokens = CASES[name][0]
    check(made(name), [(0, tokens), (0, 1), (0, tokens)], seeds=(1,))


def test_neither_wire_nor_blocks_change_a_bit() -> None:
    """The sums are taken in the order of the units, whoever sends them and however."""
    kernels = [
        compiled(row_maps.behind, tokens=2, blocks=blocks, fields=fields(), configure=by(sync))
        for blocks, sync in ((2, mk.Tagged()), (3, mk.Sentinel()), (7, mk.Sentinel()), (5, mk.Flag()))
    ]
    weights = weights_for(kernels[0])
    results = [Bench(kernel, weights).run(steps(kernel, [(0, 2)])[0]).logits for kernel in kernels]
    assert all(result.equal(results[0]) for result in results[1:])


@pytest.mark.parametrize("name", ["tagged", "kept residuals"])
def test_races(name: str) -> None:
    check_races(made(name), steps(made(name), [(0, CASES[name][0]), (0, 1)]))


@cache
def plain() -> Compiled:
    return compiled(row_maps.behind, fields=fields())


def test_what_becomes_of_the_spec() -> None:
    """Two ops a layer, named after their vectors, whose own features stay in the block; the norm before a linear stays its prologue."""
    graph, schedule = plain().graph, plain().schedule
    maps = [op for op in graph.ops if isinstance(op, RowMap)]
    assert [op.name for op in maps] == list(MAPS) and [op.out for op in maps] == ["after", "x"]
    assert [op.reduced[1].value for op in maps] == ["down", "mix"] and [len(op.reductions) for op in maps] == [1, 2]
    assert len({schedule.op(op).share_offset for op in ("down", *MAPS, "mix")}) == 1
    assert set(kept_locally(graph, schedule)) == {"x", "down", "after", "mix"}
    assert cost(maps[0], 1, 0).weight_bytes == 256 and cost(maps[1], 1, 0).weight_bytes == 0
    table = {line[0]: line for line in explained(plain())[0][1]}
    assert table["after"][8].endswith("of 128 features")


@pytest.mark.parametrize("finish", ["block", "warp"])
def test_the_checker_notices(finish: str) -> None:
    """A meeting left out, a gather left out, and features shared out otherwise than the exchange says."""

    def configure(s: ScheduleBlock) -> None:
        s.finish(finish)

    target, tokens = machine(DEFAULT_ARCH), 5 if finish == "block" else 2
    plan = compiled(row_maps.behind, tokens=tokens, fields=fields(), configure=configure).plan
    calls = [i for p in plan.programs for i in instructions(p.body) if i.call == "row_map"]
    meetings = {"block": ("gathered", "partials", "end"), "warp": ("input", "gathered", "partials")}[finish]
    assert [i.syncs for i in calls] == [meetings, meetings] and not check_plan(plan, target).findings
    for left_out in meetings:
        broken = edited(plan, lambda i, m=left_out: replace(i, syncs=tuple(s for s in i.syncs if s != m)) if i.call == "row_map" else i)  # type: ignore[misc]
        assert "MK510" in {d.code for d in check_plan(broken, target).findings}, left_out
    deaf = edited(plan, lambda i: replace(i, body=()) if i.call == "row_map" else i)
    assert check_plan(deaf, target).findings
    shifted = with_words(plan, "after", {3: 1})
    assert "MK531" in {d.code for d in check_plan(shifted, target).findings}


def test_in_torch() -> None:
    weights = weights_for(plain())
    exact = ReferenceModel(plain().graph, weights, 8, "fp32").step([3, 77])
    model = PlainModel(plain().graph, weights, 8, 2)
    model.set_inputs([3, 77], 0)
    logits, _ = model.step(2, "grouped")()
    assert distance(logits, exact) < 0.05
