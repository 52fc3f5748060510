"""Pass ``schedule``: what it suggests, how it levels the blocks' loads, and what it refuses, each at the user's line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from check_tools import plan
from dsl_tools import findings, line_of, one
from lower_tools import GPU, linears, lowered, model_graph, step_kernel, with_op

from megadsl.diagnostics import Diagnostic, collecting
from megadsl.dsl.overrides import Overrides
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.ir.graph import Graph, Linear
from megadsl.ir.schedule import Prefetch, Ring, Role, Schedule
from megadsl.lower.columns import largest_share, parts_of, share_begin, share_owner
from megadsl.lower.memory import block_parts
from megadsl.lower.schedule import (
    MEETING_BYTES,
    SMALL_STAGE,
    WINDOW_BYTES,
    balance,
    best_blocks,
    default_schedule,
    verify_schedule,
)
from megadsl.lower.tiling import tiling
from megadsl.machine import MACHINES
from megadsl.types import KIB, MIB


def default(graph: Graph, blocks: int | None = None) -> Schedule:
    return default_schedule(graph, GPU, blocks=blocks, max_kv=2048)


def verify(graph: Graph, schedule: Schedule) -> None:
    with collecting() as found:
        verify_schedule(graph, schedule, GPU, Overrides(GPU.arch, ()), found)


def test_defaults_come_from_the_machine() -> None:
    graph = model_graph("llama-3.2-1b")
    schedule = default(graph)
    assert schedule.blocks == best_blocks(graph, GPU) and schedule.consumer.warps == 8
    assert schedule.ring("loader") == Ring("weights", 0, 16 * KIB, WINDOW_BYTES, MEETING_BYTES)
    assert schedule.op("attention").splits == schedule.blocks // 8 and schedule.op("attention").prefetch.hint == "evict_normal"
    assert {e.value for e in schedule.edges} == {*(v.name for v in graph.values), "attention.parts"}
    assert default(graph, blocks=4).op("attention").splits == 1
    verify(graph, schedule)


def largest_bytes(graph: Graph, blocks: int) -> int:
    """What the busiest block reads of every linear, added up over a step."""
    each = ((tiling(op), graph.layers if op.loop else 1) for op in linears(graph))
    return sum(largest_share(tiles.shares, blocks, 0) * tiles.share_bytes * times for tiles, times in each)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-tiny"])
def test_blocks_are_as_few_as_cost_nothing(name: str) -> None:
    """Never busier than one block per SM by more than 1%, and no fewer blocks than HBM needs."""
    graph = model_graph(name)
    blocks = best_blocks(graph, GPU)
    assert 0.89 * GPU.sms <= blocks <= GPU.sms
    assert largest_bytes(graph, blocks) <= 1.01 * largest_bytes(graph, GPU.sms)


def test_small_models_get_as_many_blocks_as_have_a_share_of_every_linear() -> None:
    graph = model_graph("smollm2-135m")
    blocks = best_blocks(graph, GPU)
    assert blocks == min(tiling(op).shares for op in linears(graph)) == 72
    schedule = default(graph)
    assert schedule.batch == 6  # of gate_up_proj's: all of a block's row groups
    ring = schedule.ring("loader")
    assert ring.stage_bytes == SMALL_STAGE and blocks * ring.window <= GPU.sms * WINDOW_BYTES < blocks * (ring.window + KIB)


def test_blocks_that_divide_what_the_sms_do_not() -> None:
    assert best_blocks(model_graph("llama-3.2-1b"), GPU) == 128


@pytest.mark.parametrize(("n", "parts"), [(256, 132), (16032, 132), (5, 12), (12, 12), (1, 3), (7, 1), (0, 4)])
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_shares_cover_everything_once(n: int, parts: int, offset: int) -> None:
    offset %= parts
    begins = [share_begin(n, parts, offset, i) for i in range(parts + 1)]
    sizes = [b - a for a, b in pairwise(begins)]
    assert begins[0] == 0 and begins[-1] == n
    assert max(sizes) == largest_share(n, parts, offset) <= -(-n // parts)
    assert max(sizes) - min(sizes) <= 1
    assert [share_owner(n, parts, offset, g) for g in range(n)] == [i for i, size in enumerate(sizes) for _ in range(size)]


def loads(graph: Graph, schedule: Schedule) -> list[list[int]]:
    """Cumulative bytes of each block after each linear."""
    blocks = schedule.blocks
    total = [0] * blocks
    found = []
    for op in linears(graph):
        tiles, offset = tiling(op), schedule.op(op.name).share_offset
        begins = [share_begin(tiles.shares, blocks, offset, i) for i in range(blocks + 1)]
        total = [have + (end - begin) * tiles.share_bytes for have, (begin, end) in zip(total, pairwise(begins), strict=True)]
        found.append(list(total))
    return found


@pytest.mark.parametrize("name", ["llama-3.2-1b", "smollm2-135m"])
@pytest.mark.parametrize("blocks", [132, 128, 7, 2])
def test_balance_keeps_blocks_level_at_every_meeting(name: str, blocks: int) -> None:
    """After each linear, the busiest block is ahead of the mean by about one share, and no busier than without rotation."""
    graph = model_graph(name)
    plain = default(graph, blocks)
    share = 0
    for op, total, unrotated in zip(linears(graph), loads(graph, balance(graph, plain)), loads(graph, plain), strict=True):
        share = max(share, tiling(op).share_bytes)
        assert max(total) - sum(total) / blocks <= 1.5 * share, op.name
        assert max(total) <= max(unrotated), op.name


def test_balance_beats_no_rotation_and_keeps_what_the_user_set() -> None:
    graph = model_graph("smollm2-135m")
    plain = default(graph, 7)
    assert max(loads(graph, balance(graph, plain))[-1]) < max(loads(graph, plain)[-1])
    assert balance(graph, with_op(plain, "o_proj", share_offset=5)).op("o_proj").share_offset == 5


def test_parts_of_columns_are_whole_tiles() -> None:
    graph = model_graph("llama-3.2-1b")
    schedule = with_op(default(graph), "down_proj", ways=3)
    found = one(findings(lambda: verify(graph, schedule)), "MK242")
    assert "in 3 parts: they are 8 tiles" in found.message and "here 1, 2, 4, 8 parts are possible" in found.mend
    found = one(findings(lambda: verify(graph, with_op(schedule, "down_proj", ways=4, chunk=8))), "MK160")
    assert "chunk of 'down_proj' is 8 tiles, a row group of it has 2 in each of the 4 parts of its columns" in found.message


SPLITS = [(256, 8, 128, 1), (256, 8, 132, 1), (32, 3, 7, 2), (5, 2, 30, 1), (16, 8, 3, 2)]


@pytest.mark.parametrize(("groups", "ways", "blocks", "fold"), SPLITS)
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_parts_cover_every_row_group_once(groups: int, ways: int, blocks: int, fold: int, offset: int) -> None:
    shares = groups // fold * ways
    begins = [share_begin(shares, blocks, offset, i) * fold for i in range(blocks + 1)]
    found = [parts_of(groups, ways, begin, end) for begin, end in pairwise(begins)]
    rows = [(part, row) for parts in found for part, first, last in parts for row in range(first, last)]
    assert rows == [(part, row) for part in range(ways) for row in range(groups)]
    assert all(parts and all(0 <= part < ways for part, _, _ in parts) for parts in found)
    assert all(first < last for parts in found for _, first, last in parts if len(parts) > 1)


def test_decisions_reach_the_plan() -> None:
    def decide(s: ScheduleBlock) -> None:
        s.blocks(4)
        s.role("kv_loader", warps=1, kind="loader")
        s.ring("kv_loader", stages=2, stage_bytes=8 * KIB, window=8 * KIB)
        s.phase("attention").loader("kv_loader")
        s["o_proj"].prefetch(smem=None, l2=MIB, ahead_of="attention")

    state = lowered(decide=decide)
    assert [(p.role, p.first_warp, p.warps) for p in state.programs] == [("loader", 9, 1), ("kv_loader", 10, 1), ("consumer", 0, 8)]
    assert state.plan.tunables.threads == 352
    assert "o_proj" in {i.op for item in state.programs[0].body for phase in getattr(item, "body", (item,)) for i in phase.body}
    assert [s.kind for s in state.plan.sites if s.op == "o_proj" and s.role == "loader"] == ["gate", "ring.empty"]


def refused(change: Callable[[Schedule], Schedule], tokens: int = 1) -> list[Diagnostic]:
    graph = model_graph("llama-tiny", tokens)
    schedule = change(default(graph, 4))
    return findings(lambda: verify(graph, schedule))


def with_roles(*roles: Role) -> Callable[[Schedule], Schedule]:
    return lambda s: replace(s, roles=roles)


def with_ring(**changes: int) -> Callable[[Schedule], Schedule]:
    return lambda s: replace(s, rings=((s.rings[0][0], replace(s.rings[0][1], **changes)),))  # type: ignore[arg-type]


LOADER, CONSUMER = Role("loader", "loader", 1), Role("consumer", "consumer", 8)


@pytest.mark.parametrize(
    ("code", "change", "message", "mend"),
    [
        ("MK161", with_roles(LOADER, Role("consumer", "consumer", 32)), "asks for 33 warps, sm_90a has room for 32", "fewer consumer or"),
        ("MK162", with_roles(LOADER, Role("consumer", "consumer", 16)), "17 warps leave 120 registers per thread", "use fewer warps"),
        ("MK163", lambda s: replace(s, blocks=133), "asks for 133 blocks, sm_90a runs at most 132 at once", "choose 1 to 132 blocks"),
        ("MK163", lambda s: replace(s, blocks=0), "asks for 0 blocks", "choose 1 to 132 blocks"),
        ("MK164", with_ring(stage_bytes=2048), "a KV chunk of attention needs 4096", "stage_bytes=4096 or a larger multiple of 128"),
        ("MK164", with_ring(stage_bytes=16400), "stages of 16400 bytes", "a larger multiple of 128"),
        ("MK166", lambda s: replace(s, batch=33), "batch is 33", "choose a value from 1 to 32"),
        ("MK166", lambda s: replace(s, max_kv=0), "max_kv is 0", "choose a value from 1 to"),
        ("MK166", lambda s: with_op(s, "attention", splits=5), "kv split of 'attention' is 5", "choose a value from 1 to 4"),
        ("MK166", lambda s: with_op(s, "o_proj", share_offset=4), "share_offset of 'o_proj' is 4", "choose a value from 0 to 3"),
        ("MK166", lambda s: with_op(s, "o_proj", pause=1_000_001), "pause of 'o_proj', in nanoseconds, is 1000001", "from 0 to 1000000"),
        ("MK168", lambda s: with_op(s, "o_proj", prefetch=Prefetch(hint="later")), "hint 'later' for 'o_proj'", "use evict_first"),
        ("MK160", lambda s: with_op(s, "down_proj", chunk=3), "chunk of 'down_proj' is 3 tiles, a row group of it has 1", "a divisor of 1"),
        ("MK242", lambda s: with_op(s, "down_proj", ways=2), "'down_proj' cannot be split in 2 parts: they are one tile", "here 1"),
        ("MK242", lambda s: with_op(s, "qkv_proj", ways=2), "in 2 parts: its prologue must see whole rows", "without a norm in front"),
        ("MK242", lambda s: with_op(s, "lm_head", ways=2), "in 2 parts: its products leave as logits", "split a linear"),
        ("MK242", lambda s: with_op(s, "attention", ways=2), "in 2 parts: it is no linear", "split a linear"),
        ("MK160", lambda s: with_op(s, "attention", chunk=1), "chunk of 'attention' is 1 tiles", "or 0 to let the compiler choose"),
        ("MK178", with_roles(LOADER, Role("late", "loader", 1), CONSUMER), "loader 'late' has no ring", "s.ring('late', stages="),
        ("MK179", with_roles(Role("loader", "loader", 2), CONSUMER), "the roles are loader (loader, 2 warps)", "use warps=1 for loaders"),
        ("MK188", lambda s: with_op(s, "o_proj", prefetch=Prefetch(l2_bytes=40)), "'o_proj' is 40 bytes", "a multiple of 16"),
        (
            "MK240",
            lambda s: with_op(s, "embed_tokens", prefetch=Prefetch(l2_bytes=64)),
            "l2 prefetch of 'embed_tokens'",
            "prefetch linears",
        ),
        ("MK169", with_ring(stages=65), "ring 'weights' has 65 stages", "use at most 64 stages"),
    ],
)
def test_refusals(code: str, change: Callable[[Schedule], Schedule], message: str, mend: str) -> None:
    found = [d for d in refused(change) if d.code == code]
    assert found and message in "\n".join(d.message for d in found)
    assert all(d.span.line > 0 and d.span.file.endswith("llama.py") for d in found)
    assert mend in found[0].mend


def test_few_consumer_warps_for_many_tokens() -> None:
    found = one(refused(with_roles(LOADER, Role("consumer", "consumer", 1)), tokens=16), "MK166")
    assert "the number of consumer warps is 1" in found.message and "from 2 to 31" in found.mend


@pytest.mark.parametrize(
    ("feature", "what"), [("async_copy", "the ring"), ("mbarrier", "the ring"), ("l2_bulk_prefetch", "l2 prefetch by an instruction")]
)
def test_an_architecture_that_lacks_something(feature: str, what: str) -> None:
    lacking = replace(GPU, features=GPU.features - {feature})
    kernel = step_kernel()
    found = one(findings(lambda: lowered(kernel, lambda s: s["o_proj"].prefetch(l2=MIB) and None, on=lacking)), "MK167")
    assert found.message == f"{what} needs {feature!r}, which sm_90a does not have"
    alone = (
        "" if what == "the ring" else '; or use .prefetch(l2_by="load"); mk.schedule(kernel, arch=...) decides for one architecture alone'
    )
    assert found.mend == f"compile for one of: {', '.join(a for a, m in MACHINES.items() if feature in m.features)}{alone}"
    if what == "the ring":
        assert found.span.line == line_of(kernel, "@mk.kernel")
    else:
        assert found.span.file == __file__ and found.span.column


def test_every_finding_at_once() -> None:
    found = refused(lambda s: replace(with_op(s, "o_proj", share_offset=-1), blocks=500, batch=0))
    assert sorted(d.code for d in found) == ["MK163", "MK166", "MK166"]


@pytest.mark.parametrize(("name", "tokens"), [("llama-3.2-1b", 1), ("llama-3.2-1b", 16), ("llama-3.1-8b", 1)])
def test_blocks_have_streamed_alike_at_each_meeting(name: str, tokens: int) -> None:
    """A block that has more bytes behind it makes all others wait: the large models' blocks differ by one row group at most, and by
    nothing from layer to layer, which would add up."""
    made = plan(name, tokens=tokens)
    streamed, differences = [0] * made.schedule.blocks, []
    for op in (op for op in made.graph.ops if isinstance(op, Linear)):
        row_group, ways = tiling(op).group_bytes, made.schedule.op(op.name).ways
        for block, parts in enumerate(block_parts(op, made.schedule)):
            streamed[block] += sum(last - first for _, first, last in parts) * row_group // ways
        differences.append((op, max(streamed) - min(streamed), row_group * tiling(op).fold // ways))
    assert all(difference <= one for _, difference, one in differences)
    assert all(difference == 0 for op, difference, _ in differences if op.loop is not None)
