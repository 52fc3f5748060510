"""Every knob of mk.schedule on one small model: all give right results, and most give the very same bits.

Changing rounding: the consumer's warps (they share every sum), an attention's kv split and the wire of its parts, chunk, and scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

import megadsl as mk
from megadsl.diagnostics import MegadslError
from megadsl.driver import Compiled
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.ir.schedule import Sync
from megadsl.lower.exchanges import merge_lanes
from tests.kernels import Bench, Configure, Result, Step, attention_of, check, compiled, config, judge, one_build, steps, together
from tests.schedules import LINEARS, VALUES, everywhere, gated, in_two_splits, kv_loader_and_held_shares, scaled_before, settled

TOKENS, BLOCKS = 2, 5
SIZES = [(0, 2), (1, 1), (16, 2), (33, 1), (100, 2), (17, 2)]


def ring_of_two(s: ScheduleBlock) -> None:
    s.ring("weights", stages=2)
    s.batch(1)


def small_stages(s: ScheduleBlock) -> None:
    s.ring("weights", stages=3, stage_bytes=8192, window=8192)
    s.batch(2)


def wide_window(s: ScheduleBlock) -> None:
    s.ring("weights", stages=5, window=1 << 17)
    s.batch(8)


def prefetched(s: ScheduleBlock) -> None:
    for op, hint in zip(LINEARS, ("evict_last", "evict_normal", "evict_first", "evict_last", "evict_normal"), strict=True):
        s[op].prefetch(smem="ring", hint=hint)
    s["attention"].prefetch(hint="evict_first")
    s["o_proj"].prefetch(l2=4096)
    s["down_proj"].prefetch(l2=1 << 20, ahead_of="qkv_proj")
    s["lm_head"].prefetch(l2=1600, ahead_of="embed_tokens")


def prefetched_for_the_next_layer(s: ScheduleBlock) -> None:
    """Cached rows, and tiles of an op that the loader is done with in this layer."""
    s["attention"].prefetch(l2=1024, ahead_of="down_proj")
    s["qkv_proj"].prefetch(l2=4096, ahead_of="gate_up_proj")


def mixed_syncs(s: ScheduleBlock) -> None:
    syncs: tuple[Sync, ...] = (mk.Sentinel(8), mk.Flag(4), mk.Tagged(8), mk.Sentinel(4), mk.Flag(2), mk.Sentinel(8))
    for op, sync in zip(VALUES, syncs, strict=True):
        s[op].sync(sync)


def more_slots(s: ScheduleBlock) -> None:
    s.edge("qkv_proj", "attention").sync(mk.Tagged(4))
    s.edge("attention", "attention").sync(mk.Tagged(8))
    s.edge("gate_up_proj", "down_proj").sync(mk.Tagged(4))


def one_stage_in_flight(s: ScheduleBlock) -> None:
    s.ring("weights", window=1)


def rotated_shares(s: ScheduleBlock) -> None:
    for offset, op in enumerate((*LINEARS[:4], "attention", "lm_head")):
        s[op].split(share_offset=offset % BLOCKS)


def exchanged_residuals(s: ScheduleBlock) -> None:
    for op in ("o_proj", "down_proj"):
        s[op].residual("exchange")


def hold(tiles: int, *ops: str) -> Configure:
    """So many tiles of each op in registers."""

    def configure(s: ScheduleBlock) -> None:
        for op in ops:
            s[op].prefetch(registers=tiles)

    return configure


def nothing_held(s: ScheduleBlock) -> None:
    hold(0, "attention", *LINEARS)(s)


def held_in_a_ring_of_one(s: ScheduleBlock) -> None:
    s.ring("weights", stages=1)


@cache
def default() -> tuple[Sequence[Step], Sequence[Result]]:
    """The steps, and what the default schedule gives for them."""
    made = compiled("llama-tiny", tokens=TOKENS, blocks=BLOCKS)
    bench, some = Bench(made), steps(made, SIZES)
    results = bench.play(some)
    judge(made, bench.weights, some, results)
    return some, results


def tiny(configure: Configure, blocks: int = BLOCKS) -> Compiled:
    return compiled("llama-tiny", tokens=TOKENS, blocks=blocks, configure=configure)


def play(made: Compiled, seeds: Sequence[int] = (0, 1)) -> list[Result]:
    """What a kernel gives for the same steps, under several emulator seeds."""
    some, _ = default()
    bench = Bench(made)
    results = []
    for seed in seeds:
        bench.program.seed = seed
        results.append(bench.play(some))
    assert all(a.same(b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    return results[0]


# Decisions that do not meet are made together: a kernel is a build.
IDENTICAL: list[tuple[Configure, ...]] = [
    (ring_of_two, mixed_syncs, prefetched_for_the_next_layer),
    (small_stages, prefetched, rotated_shares),
    (wide_window, nothing_held),
    (one_stage_in_flight, more_slots),
    (kv_loader_and_held_shares,),
    (gated,),
    (exchanged_residuals, held_in_a_ring_of_one),
]


BUILT_ELSEWHERE = {(one_stage_in_flight, more_slots), (kv_loader_and_held_shares,), (gated,), 17}


def every(configure: tuple[Configure, ...]) -> Configure:
    def decide(s: ScheduleBlock) -> None:
        for one in configure:
            one(s)

    return decide


def fixed_split(blocks: int) -> Configure:
    def decide(s: ScheduleBlock) -> None:
        s.blocks(blocks)
        in_two_splits(settled)(s)

    return decide


@cache
def identical() -> dict[object, Compiled]:
    """By decisions or number of blocks; one build, but for what other tests build as well."""
    made: dict[object, Compiled] = {some: tiny(every(some)) for some in IDENTICAL}
    made |= {blocks: tiny(fixed_split(blocks)) for blocks in (2, 3, 17)}
    made[beside_polls] = tiny(beside_polls, blocks=4)
    return made | one_build({of: one for of, one in made.items() if of not in BUILT_ELSEWHERE})


@pytest.mark.parametrize("configure", IDENTICAL, ids=lambda some: "+".join(f.__name__ for f in some))
def test_knobs_that_keep_the_bits(configure: tuple[Configure, ...]) -> None:
    _, expected = default()
    for ours, theirs in zip(play(identical()[configure]), expected, strict=True):
        assert ours.same(theirs)


@pytest.mark.parametrize("blocks", [2, 3, 17])
def test_blocks_keep_the_bits_of_a_fixed_split(blocks: int) -> None:
    """Seventeen blocks share sixteen row groups of o_proj and down_proj, and the second tile that is held is nobody's."""
    _, expected = default()
    for ours, theirs in zip(play(identical()[blocks]), expected, strict=True):
        assert ours.same(theirs)


LARGE = {
    "hidden_size": 1056,
    "intermediate_size": 2080,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "vocab_size": 64,
}


@cache
def groups_of_several_tiles() -> dict[int, tuple[Compiled, Compiled]]:
    """By tokens: kernels that hold some, and that hold none."""

    def held(tokens: int) -> Configure:
        def configure(s: ScheduleBlock) -> None:
            hold(2, "qkv_proj", "lm_head")(s)
            hold(4, "gate_up_proj")(s)
            hold(5 if tokens < 16 else 0, "down_proj")(s)  # whose input then comes in chunks
            hold(1, "o_proj")(s)

        return configure

    both = [(tokens, configure) for tokens in (1, 5, 16) for configure in (held(tokens), nothing_held)]
    made = together(*(compiled("llama-tiny", tokens=t, fields=config(**LARGE), configure=c) for t, c in both))
    return {1: (made[0], made[1]), 5: (made[2], made[3]), 16: (made[4], made[5])}


@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_groups_of_several_tiles_held_in_part(tokens: int) -> None:
    """Two tiles a row group, three in down_proj: held are one group, two groups, and one and a pair of the next."""
    held, plain = groups_of_several_tiles()[tokens]
    sizes = [(0, tokens), (33, 1)]
    results = check(held, sizes)
    assert all(a.same(b) for a, b in zip(results, Bench(plain).play(steps(plain, sizes)), strict=True))


@pytest.mark.parametrize("slots", [4, 8])
def test_one_sync_everywhere(slots: int) -> None:
    """Sentinel and Flag carry an attention's parts unchanged, so their bits are the same; Tagged rounds them."""
    some, _ = default()
    sentinel, flag = play(tiny(everywhere(mk.Sentinel(slots)))), play(tiny(everywhere(mk.Flag(slots // 2))))
    assert all(a.same(b) for a, b in zip(sentinel, flag, strict=True))
    made = compiled("llama-tiny", tokens=TOKENS, blocks=BLOCKS)
    judge(made, Bench(made).weights, some, sentinel)


def beside_polls(s: ScheduleBlock) -> None:
    for op in VALUES:
        s[op].sync(mk.Sentinel())
    for op in ("attention", *LINEARS):
        s[op].gather("shared")
    hold(2, "qkv_proj", "gate_up_proj", "down_proj", "lm_head")(s)


def test_tiles_are_taken_while_polls_are_under_way() -> None:
    """Four blocks own as many units each, which therefore lie densely."""
    assert tiny(beside_polls, blocks=4).source.count("mk::Meanwhile") == 4
    _, expected = default()
    assert all(a.same(b) for a, b in zip(play(identical()[beside_polls]), expected, strict=True))


def one_split(s: ScheduleBlock) -> None:
    s["attention"].split(kv=1)


def five_splits(s: ScheduleBlock) -> None:
    s["attention"].split(kv=5)
    settled(s)


def three_splits(s: ScheduleBlock) -> None:
    s["attention"].split(kv=3)


def warps_of(count: int) -> Configure:
    def configure(s: ScheduleBlock) -> None:
        s.role("consumer", warps=count)

    return configure


WARPS: dict[int, tuple[int, Configure]] = {2: (16, warps_of(2)), 4: (2, scaled_before), 11: (5, warps_of(11))}  # by consumers' warps


@cache
def rounding() -> dict[object, Compiled]:
    """Kernels that give other bits, as one build."""
    made: dict[object, Compiled] = {
        warps: compiled("llama-tiny", tokens=tokens, blocks=BLOCKS, configure=configure) for warps, (tokens, configure) in WARPS.items()
    }
    made[five_splits] = tiny(five_splits)
    made[three_splits] = compiled("llama-tiny", tokens=16, blocks=3, configure=three_splits)
    return one_build(made)


@pytest.mark.parametrize("splits", [one_split, five_splits])
def test_splits(splits: Configure) -> None:
    check(rounding()[splits] if splits is five_splits else tiny(one_split), SIZES, seeds=(1,))


def test_lanes_that_poll_two_splits_at_once() -> None:
    """More (features, token) items to merge than threads for a lane a split; the second of a lane's splits may not exist."""
    made = rounding()[three_splits]
    assert merge_lanes(attention_of(made), 16, made.schedule) == (2, 2)
    check(made, [(0, 16), (33, 16), (100, 15)], seeds=(1,))


@pytest.mark.parametrize("warps", WARPS)
def test_consumer_warps(warps: int) -> None:
    made, (tokens, _) = rounding()[warps], WARPS[warps]
    assert made.manifest["threads"] == 32 * (warps + 1 + made.plan.tunables.finishes)
    check(made, [(0, tokens), (1, 1), (33, tokens), (100, tokens)], seeds=(1,))


def test_warps_counts_all_roles() -> None:
    made = compiled("llama-tiny", configure=lambda s: s.warps(6))
    assert made.schedule.consumer.warps == 5


def two_warps(s: ScheduleBlock) -> None:
    s.role("loader", warps=2)


def two_consumers(s: ScheduleBlock) -> None:
    s.role("other", warps=2, kind="consumer")


def no_consumer(s: ScheduleBlock) -> None:
    s.role("consumer", warps=1, kind="loader")


def no_ring(s: ScheduleBlock) -> None:
    s.role("kv_loader", warps=1, kind="loader")


def odd_prefetch(s: ScheduleBlock) -> None:
    s["o_proj"].prefetch(l2=1000)


def no_scale(s: ScheduleBlock) -> None:
    s["down_proj"].scale("after")


@pytest.mark.parametrize(
    ("configure", "code", "words"),
    [
        (two_warps, "MK179", "loader (loader, 2 warps)"),
        (two_consumers, "MK179", "other (consumer, 2 warps)"),
        (no_consumer, "MK179", "consumer (loader, 1 warps)"),
        (no_ring, "MK178", "'kv_loader' has no ring"),
        (odd_prefetch, "MK188", "'o_proj' is 1000 bytes"),
        (no_scale, "MK241", "'down_proj' cannot be scaled"),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_what_no_block_can_run(configure: Configure, code: str, words: str) -> None:
    with pytest.raises(MegadslError) as caught:
        compiled("llama-tiny", configure=configure)
    found = next(d for d in caught.value.diagnostics if d.code == code)
    assert words in found.message and found.mend
