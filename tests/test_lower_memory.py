"""Pass ``memory``: areas that do not overlap, rings that take what is left, and what does not fit, itemised."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from dsl_tools import CFG, HIDDEN, check, findings, head, line_of, one, start
from lower_tools import GPU, linears, lowered, model, model_graph, step_kernel, with_op

import megadsl as mk
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.ir.plan import Area
from megadsl.lower.columns import CHUNK_BUDGET
from megadsl.lower.memory import chunk_pieces
from megadsl.lower.operands import needs_whole_rows, prologue_values
from megadsl.lower.pipeline import Lowering
from megadsl.lower.schedule import default_schedule
from megadsl.lower.tiling import tiling
from megadsl.types import KIB


def ring_of(state: Lowering) -> tuple[int, int]:
    ring = state.schedule.ring("loader")
    return ring.stages, ring.stage_bytes


@pytest.mark.parametrize(("tokens", "least"), [(1, 12), (16, 4)])
def test_llama_fits(tokens: int, least: int) -> None:
    """The ring is nearly all of the memory at one token; at 16 tokens activations take their part of it."""
    state = model("llama-3.2-1b", tokens)
    stages, stage_bytes = ring_of(state)
    assert stages >= least and stage_bytes == 16 * KIB
    assert state.memory.bytes <= GPU.smem_per_block
    assert GPU.smem_per_block - state.memory.bytes < stage_bytes  # nothing is left over


@pytest.mark.parametrize(("name", "tokens"), [("llama-3.2-1b", 16), ("smollm2-135m", 5), ("llama-tiny-wide", 16), ("llama-tiny-odd", 1)])
def test_live_areas_do_not_overlap(name: str, tokens: int) -> None:
    memory = model(name, tokens).memory
    areas = [a for a in memory.areas if a.bytes]
    assert all(a.offset % 16 == 0 for a in areas) and all(a.offset % 128 == 0 for a in areas if a.overlay or a.name.startswith("ring."))
    phase = {a.name: _phase(a) for a in areas}
    for a, b in combinations(areas, 2):
        apart = a.offset + a.bytes <= b.offset or b.offset + b.bytes <= a.offset
        in_turn = a.overlay and b.overlay and phase[a.name] != phase[b.name]
        assert apart or in_turn, f"{a.name} overlaps {b.name}"
    assert max(a.offset + a.bytes for a in areas) <= memory.bytes


def _phase(a: Area) -> str:
    """An op's copies of vectors lie behind its own input, over a larger one's; lm_head's candidates come when it has read both."""
    op = a.name.split(".")[0]
    return "" if not a.overlay else f"copies of {op}" if a.name.endswith(".copy") else op if "." in a.name else "linear"


def test_activations_are_gathered_in_chunks_beyond_the_budget() -> None:
    for tokens in (1, 4, 8, 16):
        graph = model_graph("llama-3.2-1b", tokens)
        schedule = with_op(default_schedule(graph, GPU, blocks=None, max_kv=2048), "down_proj", ways=1)
        for op in linears(graph):
            pieces, chunk = tiling(op).pieces, chunk_pieces(op, graph, schedule)
            assert pieces % chunk == 0
            if needs_whole_rows(op):
                assert chunk == pieces, op.name
            else:
                bytes_ = chunk * tiling(op).tile_columns * tokens * 2 * len(prologue_values(op))
                assert bytes_ <= CHUNK_BUDGET or chunk == 1
    assert [chunk_pieces(op, graph, schedule) for op in linears(graph)] == [2, 2, 2, 2, 2]
    in_parts = with_op(schedule, "down_proj", ways=2)
    assert [chunk_pieces(op, graph, in_parts) for op in linears(graph)] == [2, 2, 2, 2, 2]
    assert [chunk_pieces(op, graph, with_op(schedule, "down_proj", ways=8)) for op in linears(graph)] == [2, 2, 2, 1, 2]


def test_rings_of_chosen_sizes_share_with_an_open_one() -> None:
    def decide(s: ScheduleBlock) -> None:
        s.role("kv_loader", warps=1, kind="loader")
        s.ring("kv_loader", stages=3, stage_bytes=8 * KIB, window=8 * KIB)
        s.phase("attention").loader("kv_loader")

    plain, shared = lowered(blocks=2), lowered(decide=decide, blocks=2)
    assert shared.schedule.ring("kv_loader").stages == 3
    assert shared.schedule.ring("loader").stages in (plain.schedule.ring("loader").stages - 2, plain.schedule.ring("loader").stages - 1)


def test_a_ring_that_does_not_fit_is_itemised() -> None:
    kernel = step_kernel()

    def decide(s: ScheduleBlock) -> None:
        s.ring("weights", stages=14, stage_bytes=16 * KIB)  # here

    found = one(findings(lambda: lowered(kernel, decide, blocks=2)), "MK170")
    fit = ring_of(lowered(blocks=2))[0]
    check(found, decide, "# here", f"sm_90a gives a block {GPU.smem_per_block}", f"use at most {fit} ring stages")
    items = {line.split()[0]: int(line.split()[1]) for line in found.detail.splitlines()}
    assert items["ring.loader"] == 14 * 16 * KIB and items["tape.loader"] > 0 and items["activations"] == 2 * HIDDEN
    assert "activations" in found.detail and "(overlay)" in found.detail
    need = int(found.message.split()[2])
    assert need > GPU.smem_per_block and need >= items["ring.loader"]
    assert lowered(decide=lambda s: s.ring("weights", stages=fit, stage_bytes=16 * KIB), blocks=2).memory.bytes <= GPU.smem_per_block


def test_no_room_for_two_stages() -> None:
    small = replace(GPU, smem_per_block=48 * KIB)
    found = one(findings(lambda: model("llama-3.2-1b", 16, on=small)), "MK170")
    assert "sm_90a gives a block 49152" in found.message and found.span.line > 0
    assert "fewer tokens" in found.mend


def test_vectors_that_one_expression_holds_need_a_stage_each() -> None:
    @mk.kernel
    def kernel(cfg: Any) -> mk.Tensor:
        x = start()
        names = ("a", "b", "c")
        scaled = mk.map("x * a + x * b + c", x=x, **{n: mk.weight(n, HIDDEN) for n in names})
        y = mk.linear(scaled, mk.weight("w", (HIDDEN, HIDDEN)))
        return head(y)

    def decide(s: ScheduleBlock) -> None:
        s["w"].prefetch(registers=0)
        s.ring("weights", stages=2)  # ring

    found = one(findings(lambda: lowered(kernel, decide, blocks=2)), "MK177")
    check(found, decide, "# ring", "has 2 stages, but 'w' holds 3 of them at once", "use at least 3 stages")
    assert lowered(kernel, lambda s: s.ring("weights", stages=3), blocks=2).schedule.ring("loader").stages == 3
    assert (
        lowered(kernel, lambda s: s.ring("weights", stages=2), blocks=2).schedule.op("w").prefetch.registers
    )  # which copies them one by one


def test_an_open_ring_has_at_most_64_stages() -> None:
    @mk.kernel
    def kernel(cfg: Any) -> mk.Tensor:
        return head(start())

    state = lowered(kernel, lambda s: s.ring("weights", stage_bytes=2 * KIB), blocks=2)
    assert state.schedule.ring("loader").stages == 64


def test_every_area_of_a_graph_without_attention() -> None:
    @mk.kernel
    def kernel(cfg: Any) -> mk.Tensor:
        return head(start())

    state = lowered(kernel, blocks=2)
    assert state.memory.offset("activations") > 0 and CFG.vocab == state.graph.vocab
    assert not any(a.name.startswith("attention") for a in state.memory.areas)
    assert line_of(kernel, "head(start())") > 0
