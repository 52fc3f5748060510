"""Overrides: every knob of a Schedule can be set, unknown names and bad values are reported at the user's line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from dsl_tools import HIDDEN, check, findings, graph_of, head, one, start

import megadsl as mk
from megadsl.diagnostics import collecting
from megadsl.driver import compile_model
from megadsl.dsl.overrides import Overrides, SetCount
from megadsl.dsl.registry import models
from megadsl.dsl.schedule import ScheduleBlock, apply
from megadsl.ir.graph import Attention, Graph
from megadsl.ir.schedule import EdgeSchedule, OpSchedule, Prefetch, Ring, Role, Schedule
from megadsl.types import MIB, Level


def kernel() -> mk.Kernel:
    @mk.kernel
    def step(cfg: Any) -> mk.Tensor:
        x = start()
        for layer in mk.layers(cfg.layers):
            q, k, v = mk.linear(x, *(layer.weight(f"{n}_proj", (HIDDEN, HIDDEN)) for n in "qkv"))
            a = mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2)
            x = x + mk.linear(a, layer.weight("o_proj", (HIDDEN, HIDDEN)))
        return head(x)

    return step


def default(graph: Graph) -> Schedule:
    """A schedule such as lower/ makes, with nothing machine-dependent in it."""
    parts = [EdgeSchedule(f"{op.name}.parts", op.name, mk.Tagged()) for op in graph.ops if isinstance(op, Attention)]
    return Schedule(
        arch="sm_90a",
        blocks=8,
        roles=(Role("loader", "loader", 1), Role("consumer", "consumer", 8)),
        rings=(("loader", Ring("weights", 4, 16384, 65536)),),
        ops=tuple(OpSchedule(op.name, "loader") for op in graph.ops),
        edges=(*(EdgeSchedule(v.name, v.producer, mk.Tagged()) for v in graph.values), *parts),
        batch=4,
        max_kv=512,
    )


def applied(before: Schedule, graph: Graph, step: mk.Kernel) -> Schedule:
    with collecting() as found:
        return apply(before, graph, step.overrides_for("sm_90a"), found)


def scheduled(decide: Callable[[ScheduleBlock], None]) -> tuple[Schedule, Schedule]:
    """The default schedule, and the one after the decisions."""
    step = kernel()
    with mk.schedule(step) as s:
        decide(s)
    graph = graph_of(step)
    before = default(graph)
    return before, applied(before, graph, step)


def test_split_columns_have_an_edge_of_their_own() -> None:
    def decide(s: ScheduleBlock) -> None:
        s.edge("o_proj", "o_proj").sync(mk.Flag(4))
        s["o_proj"].columns(ways=2)

    before, after = scheduled(decide)
    assert after.op("o_proj") == replace(before.op("o_proj"), ways=2)
    assert after.edges == (*before.edges, EdgeSchedule("o_proj.parts", "o_proj", mk.Flag(4)))
    assert scheduled(lambda s: s["o_proj"].columns(ways=2).columns(ways=1) and None)[1] == before


def test_nothing_said_changes_nothing() -> None:
    before, after = scheduled(lambda s: None)
    assert after == before
    assert kernel().overrides_for("sm_90a") == Overrides("sm_90a", ())


def test_counts() -> None:
    def decide(s: ScheduleBlock) -> None:
        s.blocks(128)
        s.batch(2)
        s.max_kv(4096)

    before, after = scheduled(decide)
    assert after == replace(before, blocks=128, batch=2, max_kv=4096)


def test_warps_go_to_the_consumer() -> None:
    _, after = scheduled(lambda s: s.warps(13))
    assert [(r.name, r.warps) for r in after.roles] == [("loader", 1), ("consumer", 12)]


def test_a_new_role_with_its_ring_loads_a_phase() -> None:
    def decide(s: ScheduleBlock) -> None:
        s.phase("attention").loader("kv_loader")  # named before it is declared: order does not matter
        s.role("kv_loader", warps=1, kind="loader")
        s.ring("kv_loader", stages=2, stage_bytes=4096, window=8192)
        s.role("consumer", warps=4)
        s.ring("weights", window=1024)
        s.ring("loader", stages=3)
        s.warps(6)

    before, after = scheduled(decide)
    assert after.roles == (Role("loader", "loader", 1), Role("consumer", "consumer", 4), Role("kv_loader", "loader", 1))
    assert after.ring("kv_loader") == Ring("kv_loader", 2, 4096, 8192)
    assert after.ring("loader") == Ring("weights", 3, 16384, 1024)
    assert after.op("attention") == replace(before.op("attention"), loader="kv_loader")


def test_prefetch_keeps_what_is_not_named() -> None:
    def decide(s: ScheduleBlock) -> None:
        s["o_proj"].prefetch(l2=8 * MIB, ahead_of="attention").prefetch(hint="evict_last")
        s["qkv_proj"].prefetch(smem=None)
        s["lm_head"].prefetch(smem="ring", ahead_of=None)

    _, after = scheduled(decide)
    assert after.op("o_proj").prefetch == Prefetch(True, None, 8 * MIB, "attention", "evict_last")
    assert after.op("qkv_proj").prefetch == Prefetch(smem=False)
    assert after.op("lm_head").prefetch == Prefetch()


def test_splits() -> None:
    def decide(s: ScheduleBlock) -> None:
        s["attention"].split(kv=16, chunk=32)
        s["o_proj"].split(share_offset=0).split(share_offset=5)

    before, after = scheduled(decide)
    assert after.op("attention") == replace(before.op("attention"), splits=16, chunk=32)
    assert after.op("o_proj").share_offset == 5


def test_scale() -> None:
    before, after = scheduled(lambda s: s["qkv_proj"].scale("before").scale("after"))
    assert after.op("qkv_proj") == replace(before.op("qkv_proj"), scale="after")


def test_syncs() -> None:
    sentinel, flag, tagged = mk.Sentinel(slots=8), mk.Flag(), mk.Tagged(slots=4, level=Level.GROUP)

    def decide(s: ScheduleBlock) -> None:
        s.edge("qkv_proj", "attention").sync(tagged)
        s["o_proj"].sync(sentinel)
        s.edge("attention", "attention").sync(flag)

    before, after = scheduled(decide)
    assert {e.value: e.sync for e in after.edges} == {
        "x": sentinel,  # o_proj gives the loop variable
        "qkv_proj": tagged,
        "attention": before.edge("attention").sync,
        "attention.parts": flag,
    }


def test_later_records_win_and_a_second_block_replaces_the_first() -> None:
    step = kernel()
    with mk.schedule(step) as s:
        s.batch(2)
    with mk.schedule(step) as s:
        s.blocks(16)
        s.blocks(32)
    graph = graph_of(step)
    after = applied(default(graph), graph, step)
    assert (after.blocks, after.batch) == (32, 4)


def test_one_architecture_goes_before_all() -> None:
    """In whichever order the blocks stand."""
    decisions: dict[str | None, Callable[[ScheduleBlock], Any]] = {
        None: lambda s: (s.batch(2), s.blocks(8)),
        "sm_80": lambda s: s.batch(4),
    }
    for order in (None, "sm_80"), ("sm_80", None):
        step = kernel()
        for arch in order:
            with mk.schedule(step, arch) as s:
                decisions[arch](s)
        graph = graph_of(step)
        for arch, batch in (("sm_80", 4), ("sm_90a", 2)):
            with collecting() as found:
                after = apply(default(graph), graph, step.overrides_for(arch), found)
            assert (after.batch, after.blocks) == (batch, 8) and step.overrides_for(arch).arch == arch


def test_what_an_architecture_lacks_is_refused_where_it_was_said_for_all() -> None:
    llama, config = models()["llama-tiny"]
    step = mk.kernel(llama.function)
    with mk.schedule(step) as s:
        s["o_proj"].prefetch(l2=1024)  # here
        s.registers("moved")

    def compiled(arch: str) -> Any:
        return compile_model(step, config=dict(config), arch=arch, blocks=2, check=False)

    assert compiled("sm_90a").schedule.op("o_proj").prefetch.l2_bytes == 1024
    found = findings(lambda: compiled("sm_86"))
    assert {d.code for d in found} == {"MK167", "MK245"} and all("mk.schedule(kernel, arch=...)" in d.mend for d in found)
    lacking = one(found, "MK167")
    assert lacking.message == "l2 prefetch by an instruction needs 'l2_bulk_prefetch', which sm_86 does not have"
    assert "# here" in lacking.span.text


def test_a_block_that_fails_leaves_the_kernel_alone() -> None:
    step = kernel()
    with mk.schedule(step) as s:
        s.batch(2)
    with pytest.raises(ZeroDivisionError), mk.schedule(step) as s:
        s.batch(1 // 0)
    findings(lambda: bad_count(step))
    (record,) = step.overrides_for("sm_90a").records
    assert isinstance(record, SetCount) and record.value == 2


def bad_count(step: mk.Kernel) -> None:
    with mk.schedule(step) as s:
        s.blocks(0)


def test_unknown_arch() -> None:
    def decide() -> None:
        mk.schedule(kernel(), arch="sm_70")  # here

    check(one(findings(decide), "MK001"), decide, "# here", "unknown architecture 'sm_70'", "sm_90a")


def test_what_is_no_kernel() -> None:
    def plain(cfg: Any) -> None: ...

    def decide() -> None:
        mk.schedule(plain)  # type: ignore[arg-type]  # here

    check(one(findings(decide), "MK224"), decide, "# here", "the function 'plain' is no kernel", "@mk.kernel")
    assert one(findings(lambda: compile_model(plain)), "MK224").mend == "decorate the function with @mk.kernel"  # type: ignore[arg-type]


@pytest.mark.parametrize(("what", "value"), [("max_kv", "x"), ("max_kv", 1.5), ("blocks", "x"), ("blocks", True)])
def test_counts_that_are_none(what: str, value: Any) -> None:
    found = one(findings(lambda: compile_model(kernel(), **{what: value})), "MK150")
    assert found.message == f"{what} = {value!r} is not an integer of at least 1"


BAD_VALUES: list[tuple[Callable[[ScheduleBlock], Any], str, str, str]] = [
    (lambda s: s.blocks(0), "MK150", "blocks = 0", "1 or more"),
    (lambda s: s.warps(2.5), "MK150", "warps = 2.5", "1 or more"),  # type: ignore[arg-type]
    (lambda s: s.batch(True), "MK150", "batch = True", "1 or more"),
    (lambda s: s.max_kv(-1), "MK150", "max_kv = -1", "1 or more"),
    (lambda s: s.role("consumer", warps=0), "MK150", "role warps = 0", "1 or more"),
    (lambda s: s.ring("weights", stages=0), "MK150", "stages = 0", "1 or more"),
    (lambda s: s["o_proj"].prefetch(l2=-1), "MK150", "prefetch l2 = -1", "0 or more"),
    (lambda s: s["attention"].split(kv=0), "MK150", "splits = 0", "1 or more"),
    (lambda s: s["o_proj"].split(share_offset=-1), "MK150", "share_offset = -1", "0 or more"),
    (lambda s: s["o_proj"].sync(mk.Tagged(slots=0)), "MK150", "sync slots = 0", "1 or more"),
    (lambda s: s.role("x", warps=1, kind="storer"), "MK151", "role kind = 'storer'", "loader, consumer"),
    (lambda s: s["o_proj"].prefetch(smem="l2"), "MK151", "prefetch smem = 'l2'", "ring, None"),
    (lambda s: s["o_proj"].prefetch(hint="sticky"), "MK151", "prefetch hint = 'sticky'", "evict_first, evict_normal, evict_last"),
    (lambda s: s["o_proj"].scale("never"), "MK151", "scale = 'never'", "before, after"),
    (lambda s: s["o_proj"].sync("tagged"), "MK151", "sync = 'tagged'", "mk.Tagged(...)"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("decide", "code", "message", "mend"), BAD_VALUES)
def test_bad_values(decide: Callable[[ScheduleBlock], Any], code: str, message: str, mend: str) -> None:
    found = one(findings(lambda: scheduled(decide)), code)
    assert message in found.message and mend in found.mend
    assert (found.span.file, found.span.line) == (__file__, decide.__code__.co_firstlineno)


UNKNOWN: list[tuple[Callable[[ScheduleBlock], Any], str, str, str]] = [
    (lambda s: s["o_prj"].prefetch(l2=1), "MK152", "no op is called 'o_prj'", "did you mean 'o_proj'? the ops are: embed, qkv_proj"),
    (lambda s: s["o_proj"].prefetch(ahead_of="atention"), "MK152", "'atention'", "did you mean 'attention'?"),
    (lambda s: s["qkv_prj"].scale("after"), "MK152", "'qkv_prj'", "did you mean 'qkv_proj'?"),
    (lambda s: s["zzz"].sync(mk.Tagged()), "MK152", "'zzz'", "the ops are: embed"),
    (lambda s: s.edge("o_proj", "gate").sync(mk.Tagged()), "MK152", "'gate'", "the ops are: embed"),
    (lambda s: s.role("consumr", warps=4), "MK153", "no role is called 'consumr'", "did you mean 'consumer'?"),
    (lambda s: s["attention"].loader("kv_loader"), "MK153", "'kv_loader'", 'a new role needs kind="loader"'),
    (lambda s: s["attention"].loader("consumer"), "MK153", "'consumer'", "the roles are: loader"),
    (lambda s: s.edge("qkv_proj", "o_proj").sync(mk.Tagged()), "MK154", "'o_proj' reads nothing from 'qkv_proj'", "are: attention"),
    (lambda s: s.edge("qkv_proj", "qkv_proj").sync(mk.Tagged()), "MK154", "'qkv_proj' reads nothing from 'qkv_proj'", "are: attention"),
    (lambda s: s["lm_head"].sync(mk.Tagged()), "MK154", "'any op' reads nothing from 'lm_head'", "are: none"),
    (lambda s: s.ring("weight", stages=2), "MK155", "'weight'", "did you mean 'weights'?"),
    (lambda s: s.warps(1), "MK157", "warps(1) does not match the roles: loader 1, consumer 8", "leave the consumer's warps out"),
    (lambda s: (s.ring("weights", stages=2), s.ring("loader", stages=3)), "MK260", "'loader' and 'weights' are one ring", "keep one"),
    (lambda s: s["o_proj"].split(kv=4), "MK158", "'o_proj' has no KV range to split", "attention ops"),
    (lambda s: s["attention"].residual("block"), "MK158", "'attention' has no rows of another op to add", "linears that add to"),
    (lambda s: s["qkv_proj"].residual("exchange"), "MK158", "'qkv_proj' has no rows of another op to add", "linears that add to"),
    (lambda s: s["embed"].poll(pause=5), "MK158", "'embed' has no input to poll", "poll(...) is for linears and attention"),
]


@pytest.mark.parametrize(("decide", "code", "message", "mend"), UNKNOWN)
def test_unknown_names(decide: Callable[[ScheduleBlock], Any], code: str, message: str, mend: str) -> None:
    found = one(findings(lambda: scheduled(decide)), code)
    assert message in found.message and mend in found.mend
    assert (found.span.file, found.span.line) == (__file__, decide.__code__.co_firstlineno)


def test_a_new_ring_needs_all_of_it() -> None:
    def decide(s: ScheduleBlock) -> None:
        s.role("kv_loader", warps=1, kind="loader")
        s.ring("kv_loader", stages=2)  # here

    check(one(findings(lambda: scheduled(decide)), "MK156"), decide, "# here", "'kv_loader' has no ring yet", "stage_bytes=")


def test_warps_that_contradict_the_roles() -> None:
    def decide(s: ScheduleBlock) -> None:
        s.role("consumer", warps=4)
        s.warps(12)  # here

    check(one(findings(lambda: scheduled(decide)), "MK157"), decide, "# here", "loader 1, consumer 4", "add up to 12")


def test_all_unknown_names_at_once() -> None:
    def decide(s: ScheduleBlock) -> None:
        s["a"].prefetch(l2=1)
        s.role("b", warps=1)
        s.edge("qkv_proj", "o_proj").sync(mk.Flag())

    assert [d.code for d in findings(lambda: scheduled(decide))] == ["MK153", "MK152", "MK154"]
