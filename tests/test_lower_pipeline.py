"""The list of passes: what runs when, what every size lowers to, and that nothing can be changed afterwards."""

from __future__ import annotations

import dataclasses
import types
from dataclasses import FrozenInstanceError

import pytest
from lower_tools import GPU, lowered, model

from megadsl.driver import compile_model
from megadsl.ir import graph, plan, schedule, spec
from megadsl.lower.pipeline import PASSES, Lowering
from megadsl.lower.shape import kv_bytes

MODULES = (spec, graph, schedule, plan)


def test_between_is_called_after_each_pass_with_what_it_set() -> None:
    set_by = {
        "fuse": "graph", "schedule": "schedule", "exchange": "exchanges", "pack": "packed", "memory": "memory",
        "program": "programs", "shape": "shape", "plan": "plan",
    }  # fmt: skip
    seen: list[str] = []

    def look(name: str, state: Lowering) -> None:
        seen.append(name)
        done = [s.name for s in PASSES[: len(seen)]]
        assert [hasattr(state, field) for p, field in set_by.items()] == [p in done for p in set_by]

    lowered(between=look)
    assert seen == [p.name for p in PASSES] == list(set_by)
    assert all(p.contract for p in PASSES)


def test_the_driver_hands_the_callback_on() -> None:
    seen: list[str] = []
    compile_model("llama-tiny", blocks=2, between=lambda name, state: seen.append(name))
    assert seen[0] == "fuse" and seen[-1] == "plan"


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.2-1b"])
def test_every_number_of_tokens_lowers(name: str) -> None:
    for tokens in range(1, 17):
        state = model(name, tokens)
        assert state.plan.tunables.tokens == tokens
        assert state.plan.smem_bytes <= GPU.smem_per_block
        assert state.plan.buffers["logits"] == tokens * state.graph.vocab * 4


@pytest.mark.parametrize("blocks", [1, 2, 3, 131])
def test_any_number_of_blocks_lowers(blocks: int) -> None:
    state = model("llama-tiny-odd", 2, blocks=blocks)
    assert state.schedule.blocks == blocks


def test_buffers() -> None:
    state = model("llama-tiny", 2, blocks=2, max_kv=33)
    buffers = state.plan.buffers
    assert buffers["control"] == 512 and buffers["pages"] == 0
    assert buffers["kv"] == kv_bytes(state.graph, state.schedule)
    assert buffers["kv"] == 2 * 2 * 3 * 16 * 64 * 2 * 2  # layers, heads, chunks of 16 rows of K and V
    assert buffers["rope"] == 33 * 32 * 8 and buffers["logits"] == 2 * 512 * 4
    assert buffers["weights"] == state.packed.bytes and buffers["exchange"] == state.exchange_bytes


def dataclasses_of(module: types.ModuleType) -> list[type]:
    found = [t for t in vars(module).values() if isinstance(t, type) and t.__module__ == module.__name__]
    return [t for t in found if dataclasses.is_dataclass(t)]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_ir_nodes_are_frozen(module: types.ModuleType) -> None:
    nodes = dataclasses_of(module)
    assert nodes
    for node in nodes:
        assert node.__dataclass_params__.frozen, node  # type: ignore[attr-defined]


def test_a_plan_cannot_be_changed() -> None:
    state = model("llama-tiny", blocks=2)
    with pytest.raises(FrozenInstanceError):
        state.plan.smem_bytes = 0  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        state.schedule.batch = 1  # type: ignore[misc]


def test_lowering_twice_gives_equal_plans() -> None:
    first, second = model("smollm2-135m", 4), model("smollm2-135m", 4)
    assert first.plan.shape == second.plan.shape and first.plan.sites == second.plan.sites
    assert first.plan.areas == second.plan.areas and first.plan.packs == second.plan.packs
    assert first.schedule == second.schedule
