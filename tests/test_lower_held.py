"""Tiles in registers: how many are held by default, where in the program they are taken, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from check_tools import plan, without
from lower_tools import GPU, model
from schedules import LINEARS, gated

from megadsl.check.checker import check_plan
from megadsl.diagnostics import MegadslError
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.ir.plan import Instr, LayerLoop, Phase, Plan
from megadsl.lower.tiling import tiling

LLAMA = "llama-3.2-1b"


def held(of: Plan) -> dict[str, int | None]:
    return {op: of.schedule.op(op).prefetch.registers for op in LINEARS}


def phases(of: Plan) -> list[Phase]:
    items = of.program("consumer").body
    return [phase for item in items for phase in (item.body if isinstance(item, LayerLoop) else (item,))]


def calls(phase: Phase) -> list[str]:
    return [f"{i.op}.{i.call}" for i in phase.body]


@pytest.mark.parametrize(("tokens", "expected"), [(1, (0, 4, 4, 0, 0)), (5, (0, 4, 4, 0, 0)), (16, (0, 4, 0, 0, 0))])
def test_ops_behind_small_ones_hold_tiles(tokens: int, expected: tuple[int, ...]) -> None:
    """What comes behind down_proj or gate_up_proj finds no full ring. Sixteen tokens leave no room for gate_up_proj's vector."""
    assert tuple(held(model(LLAMA, tokens).plan).values()) == expected


def test_every_block_has_what_is_held() -> None:
    plan = model("smollm2-135m").plan
    assert any(held(plan).values())
    for op, tiles in held(plan).items():
        t = tiling(plan.graph.op(op))  # type: ignore[arg-type]
        assert tiles is not None and tiles <= t.shares // plan.schedule.blocks * t.fold * t.pieces


def test_tiles_are_taken_before_the_first_wait_for_other_blocks() -> None:
    merge, o_proj, gate_up = phases(model(LLAMA).plan)[3:6]
    assert calls(merge)[:2] == ["o_proj.hold_tiles", "attention.merge"]  # attention's stages are behind it, its splits are not
    assert "o_proj.hold_tiles" not in calls(o_proj)
    assert calls(gate_up)[:4] == [f"gate_up_proj.{c}" for c in ("copy_vector", "hold_tiles", "matrix", "publish")]
    assert not {"wait_vector", "release_vector"} & {i.call for i in gate_up.body[2].body}


def test_gates_open_before_tiles_are_held() -> None:
    """The loader fills nothing of an op before."""

    def decide(s: ScheduleBlock) -> None:
        gated(s)
        s["o_proj"].prefetch(registers=2)

    _, merge, o_proj = phases(plan("llama-tiny", decide, blocks=3))[2:5]
    assert calls(merge)[:3] == ["o_proj.open_gate", "o_proj.hold_tiles", "attention.merge"]
    assert calls(o_proj)[:2] == ["o_proj.meet_finisher", "o_proj.gather_kept"]  # it pauses, and takes residual rows meanwhile


def test_copies_of_vectors_lie_behind_the_input() -> None:
    areas = {a.name: a for a in model(LLAMA).plan.areas}
    copy = areas["gate_up_proj.post_attention_layernorm.copy"]
    assert copy.overlay and copy.offset == areas["activations"].offset + 4096 and copy.bytes == 4096
    assert model(LLAMA).plan.schedule.ring("loader").stages == 13  # the copy costs none


def held_by(name: str, tiles: int) -> Callable[[ScheduleBlock], Any]:
    return lambda s: s[name].prefetch(registers=tiles)


@pytest.mark.parametrize(
    ("op", "tiles", "tokens", "why", "mend"),
    [
        ("attention", 2, 1, "each warp holds one chunk at most, in 32 registers of a thread", "use registers=1 or registers=0"),
        ("embed_tokens", 1, 1, "it streams no weights of its own", "hold tiles of the linears"),
        ("o_proj", 3, 1, "a row group has 2 tiles, which are multiplied in pairs", "use registers=2"),
        ("o_proj", 8, 1, "a tile takes 16 registers of a thread, a batch of row groups has 6", "use at most 6"),
        ("down_proj", 8, 1, "a tile takes 16 registers of a thread", "use at most 6"),
        ("down_proj", 2, 16, "its columns are split", "use registers=0, or .columns(ways=1)"),
    ],
)
def test_what_cannot_be_held(op: str, tiles: int, tokens: int, why: str, mend: str) -> None:
    with pytest.raises(MegadslError) as caught:
        plan(LLAMA, held_by(op, tiles), tokens)
    found = caught.value.diagnostics[0]
    assert (found.code, found.span.line) == ("MK243", held_by.__code__.co_firstlineno + 1)
    assert f"{op!r} cannot hold {tiles} tiles in registers: {why}" in found.message and mend in found.mend


@pytest.mark.parametrize("ring", [1, 2, 3])
def test_short_rings_hold_as_well(ring: int) -> None:
    def decide(s: ScheduleBlock) -> None:
        s.ring("weights", stages=ring)
        for op in LINEARS:
            s[op].prefetch(registers=3)

    made = plan("llama-tiny", decide, blocks=5)
    assert not check_plan(made, GPU).findings and set(held(made).values()) == {3}


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (without("hold_tiles", "o_proj"), "MK520"),
        (without("copy_vector", "gate_up_proj"), "MK520"),
        (without("sync", "gate_up_proj"), "MK510"),
    ],
)
def test_the_checker_sees_what_is_missing(spoil: Callable[[Plan], Plan], code: str) -> None:
    whole = plan("llama-tiny", lambda s: s.finish("block"), blocks=3)
    assert not check_plan(whole, GPU).findings
    assert code in {f.code for f in check_plan(spoil(whole), GPU).findings}


def test_instructions_say_whether_all_blocks_have_them() -> None:
    def taken(of: Plan) -> dict[str, tuple[object, object]]:
        found: list[Instr] = [i for phase in phases(of) for i in phase.body if i.call == "hold_tiles"]
        return {i.op: (i.args["everywhere"], i.args["whole"]) for i in found}

    assert taken(model(LLAMA).plan) == {"o_proj": (True, True), "gate_up_proj": (True, False)}
    few = plan("llama-tiny", lambda s: [s[op].prefetch(registers=2) for op in ("o_proj", "lm_head")] and None, blocks=17)
    assert taken(few)["o_proj"] == (False, True) and taken(few)["lm_head"] == (True, False)


def test_chunks_are_not_held() -> None:
    def decide(s: ScheduleBlock) -> None:
        s["down_proj"].split(chunk=4).prefetch(registers=2)

    with pytest.raises(MegadslError) as caught:
        plan(LLAMA, decide)
    found = caught.value.diagnostics[0]
    assert found.code == "MK243" and "its input comes in 2 chunks" in found.message and "registers=0, or .split(chunk=8)" in found.mend
