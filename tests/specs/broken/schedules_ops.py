"""Decisions about one op's inputs, results and parts that no kernel can follow. How to read the comments: tests/broken_specs.py."""

import megadsl as mk
from megadsl.dsl.schedule import ScheduleBlock


def held_rows(s: ScheduleBlock) -> None:
    s["attention"].prefetch(registers=2)
    # MK243 `s["attention"].prefetch(` | each warp holds one chunk at most | use registers=1 or registers=0
    # mend: registers=2 => registers=«1»


def more_held_than_a_batch(s: ScheduleBlock) -> None:
    s["o_proj"].prefetch(registers=9)
    # MK243 `s["o_proj"].prefetch(` | a tile takes 4 registers of a thread, a batch of row groups has 3 | use at most 3
    # mend: registers=9 => registers=«at most (\d+)»


def gathered_by_an_embedding(s: ScheduleBlock) -> None:
    s["qkv_proj"].sync(mk.Sentinel())
    s["embed"].gather("registers")
    # MK244 `s["embed"].gather(` | 'embed' cannot gather its input into registers: it gathers nothing | use it for linears and attention
    # mend: "embed" => "attention"


def gathered_behind_a_sum(s: ScheduleBlock) -> None:
    s["lm_head"].gather("registers")
    # MK244 `s["lm_head"].gather(` | its prologue is neither one value nor factored | use .gather("shared")
    # mend: .gather("registers") => «.gather("shared")»


def gathered_under_tags(s: ScheduleBlock) -> None:
    s["qkv_proj"].sync(mk.Tagged(slots=4))
    s["attention"].gather("registers")
    # MK244 `s["attention"].gather(` | 'qkv_proj' is not dense | use mk.Sentinel() for it and at most
    # mend: mk.Tagged(slots=4) => «mk.Sentinel()»


def published_under_tags(s: ScheduleBlock) -> None:
    s["o_proj"].publish("registers")
    # MK247 `s["o_proj"].publish(` | 'o_proj' cannot publish from registers: 'x' is not dense | use mk.Sentinel() for it and at most
    # mend: s["o_proj"].publish("registers")\n => s["o_proj"].publish("registers").sync(mk.Sentinel())\n


def published_by_the_block(s: ScheduleBlock) -> None:
    s.finish("block")
    s["o_proj"].sync(mk.Sentinel()).publish("registers")
    # MK247 `s["o_proj"].sync(` | 'o_proj' cannot publish from registers: no warp of its own finishes | use s.finish("warp")
    # mend: s.finish("block") => «s.finish("warp")»


def merged_under_tags(s: ScheduleBlock) -> None:
    s.blocks(4)
    s["attention"].split(kv=2).merge("cluster")
    # MK248 `s["attention"].split(` | 'attention' cannot add its splits within a cluster: 'attention' is not dense | use mk.Sentinel() for it
    # mend: .merge("cluster") => .merge("cluster").sync(mk.Sentinel())


def merged_in_threes(s: ScheduleBlock) -> None:
    s.blocks(12)
    s["attention"].split(kv=3).merge("cluster").sync(mk.Sentinel())
    # MK248 `s["attention"].split(` | it has 3 splits | use .split(kv=n) with one of: 2, 4, 8
    # mend: kv=3 => kv=4


def merged_by_blocks_that_are_no_clusters(s: ScheduleBlock) -> None:
    s.blocks(5)
    s["attention"].split(kv=2).merge("cluster").sync(mk.Sentinel())
    # MK248 `s["attention"].split(` | 5 blocks are no clusters of 2 | use a multiple of that for the blocks
    # mend: s.blocks(5) => s.blocks(6)


def parts_of_one_tile(s: ScheduleBlock) -> None:
    s["o_proj"].columns(ways=2)
    # MK242 `s["o_proj"].columns(` | 'o_proj' cannot be split in 2 parts: they are one tile | here 1 parts are possible
    # mend: ways=2 => ways=«1»


def parts_behind_a_norm(s: ScheduleBlock) -> None:
    s["qkv_proj"].columns(ways=2)
    # MK242 `s["qkv_proj"].columns(` | in 2 parts: its prologue must see whole rows | split a linear without a norm in front
    # mend: ways=2 => ways=1


def no_parts(s: ScheduleBlock) -> None:
    s["o_proj"].columns(ways=0)
    # MK150 `s["o_proj"].columns(` | columns ways = 0 is not an integer of at least 1 | give a whole number
    # mend: ways=0 => ways=1
