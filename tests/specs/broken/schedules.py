"""Decisions of a schedule that no kernel can follow. How to read the comments: tests/broken_specs.py."""

from typing import Any

from dsl_tools import HIDDEN, head, start

import megadsl as mk
from megadsl.dsl.schedule import ScheduleBlock

KIB = 1024


@mk.kernel
def step(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        h = mk.rms_norm(x, layer.weight("norm", HIDDEN), eps=1e-5)
        q, k, v = mk.linear(h, *(layer.weight(f"{n}_proj", (HIDDEN, HIDDEN)) for n in "qkv"))
        q, k = mk.rope(q, k, head_dim=64, theta=1e4)
        a = mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2)
        x = x + mk.linear(a, layer.weight("o_proj", (HIDDEN, HIDDEN)))
    h = mk.map("x * a + x * b", x=x, a=mk.weight("a", HIDDEN), b=mk.weight("b", HIDDEN))
    return head(h)


def stages(s: ScheduleBlock) -> None:
    s.ring("weights", stages=0)
    # MK150 `s.ring(` | stages = 0 is not an integer of at least 1 | give a whole number
    # mend: stages=0 => stages=2


def l2_in_parts(s: ScheduleBlock) -> None:
    s["o_proj"].prefetch(l2=1e6)
    # MK150 `s["o_proj"].prefetch(` | prefetch l2 = 1000000.0 is not an integer of at least 0 | give a whole number, 0 or more
    # mend: 1e6 => 1000000


def slots_as_text(s: ScheduleBlock) -> None:
    s["o_proj"].sync(mk.Tagged(slots="4"))
    # MK150 `s["o_proj"].sync(` | sync slots = '4' is not an integer of at least 1 | give a whole number
    # mend: "4" => 4


def kind(s: ScheduleBlock) -> None:
    s.role("kv_loader", warps=1, kind="storer")
    # MK151 `s.role(` | role kind = 'storer' is not known | choose one of
    # mend: "storer") => "«loader»")\n    s.ring("kv_loader", stages=2, stage_bytes=8192, window=8192)


def sync_as_text(s: ScheduleBlock) -> None:
    s["o_proj"].sync("tagged")  # type: ignore[arg-type]
    # MK151 `s["o_proj"].sync(` | sync = 'tagged' is not known | choose one of
    # mend: "tagged" => «mk.Sentinel(...)»


def sync_as_class(s: ScheduleBlock) -> None:
    s["o_proj"].sync(mk.Flag)  # type: ignore[arg-type]
    # MK151 `s["o_proj"].sync(` | sync = <class | choose one of
    # mend: mk.Flag => «mk.Flag(...)»


def level_as_text(s: ScheduleBlock) -> None:
    s["o_proj"].sync(mk.Tagged(level="gpu"))  # type: ignore[arg-type]
    # MK151 `s["o_proj"].sync(` | sync level = 'gpu' is not known | choose one of
    # mend: "gpu" => «mk.Level.GPU»


def dry_attention(s: ScheduleBlock) -> None:
    s["attention"].dry_run()
    # MK236 `s["attention"].dry_run(` | 'attention' cannot run dry: it multiplies no tiles | let linears run dry
    # mend: s["attention"] => s["lm_head"].gather("shared")


def dry_and_held(s: ScheduleBlock) -> None:
    s["lm_head"].gather("shared").prefetch(registers=2).dry_run()
    # MK236 `s["lm_head"].gather("shared").prefetch(registers=2).dry_run(` | its first tiles are held in registers | or leave .dry_run() out
    # mend: prefetch(registers=2) => «prefetch(registers=0)»


def large_meeting(s: ScheduleBlock) -> None:
    s["o_proj"].poll(meeting_window=1024 * KIB)
    # MK166 `s["o_proj"].poll(` | meeting_window of 'o_proj', in bytes, is 1048576 | choose a value from 0 to 232448
    # mend: 1024 * KIB => «0 to (\d+)»


def meeting_of_a_table(s: ScheduleBlock) -> None:
    s["embed"].poll(meeting_window=16 * KIB)
    # MK158 `s["embed"].poll(` | 'embed' has no input to poll | poll(...) is for linears and attention
    # mend: embed => qkv_proj


def width_of_parts(s: ScheduleBlock) -> None:
    s.edge("attention", "attention").poll(width=2)
    # MK235 `s.edge("attention", "attention").poll(` | width of 'attention.parts' decides nothing: parts are polled as | leave it out
    # mend: \n    s.edge("attention", "attention").poll(width=2) => \n    s.edge("attention", "attention").poll(back_off=100)


def wide_polls(s: ScheduleBlock) -> None:
    s.edge("qkv_proj", "attention").poll(width=40)
    # MK166 `s.edge("qkv_proj", "attention").poll(` | width of 'qkv_proj' is 40 | choose a value from 0 to 16
    # mend: 40 => «0 to (\d+)»


def long_sleep(s: ScheduleBlock) -> None:
    s.edge("qkv_proj", "attention").poll(back_off=2_000_000)
    # MK166 `s.edge("qkv_proj", "attention").poll(` | back_off of 'qkv_proj', in nanoseconds, is 2000000 | choose a value from 0 to 1000000
    # mend: 2_000_000 => «0 to (\d+)»


def l2_by_something(s: ScheduleBlock) -> None:
    s["o_proj"].prefetch(l2=4096, l2_by="bulk")
    # MK151 `s["o_proj"].prefetch(` | prefetch l2_by = 'bulk' is not known | choose one of: instruction, load
    # mend: bulk => «load»


def code_part(s: ScheduleBlock) -> None:
    s.warm_code("loader", part="half")
    # MK151 `s.warm_code(` | warm_code part = 'half' is not known | choose one of: share, whole
    # mend: half => «share»


def code_by_nobody(s: ScheduleBlock) -> None:
    s.warm_code("storer")
    # MK153 `s.warm_code(` | no role is called 'storer' | the roles are: loader, consumer
    # mend: storer => «loader»


def code_by_more_blocks(s: ScheduleBlock) -> None:
    s.warm_code("loader", blocks=200)
    # MK166 `s.warm_code(` | the number of blocks that read the code is 200 | choose a value from 1 to 4
    # mend: 200 => «1 to (\d+)»


def code_of_one_op(s: ScheduleBlock) -> None:
    s.launch("op")
    s.warm_code("loader")
    # MK234 `s.warm_code(` | the code is read ahead by 'loader', but a launch is one op | or use s.launch("step")
    # mend: s.launch("op") => «s.launch("step")»


def code_ahead_of_layers(s: ScheduleBlock) -> None:
    s.launch("layer")
    s.warm_code("loader")
    # MK234 `s.warm_code(` | the code is read ahead by 'loader', but a launch is one layer | or use s.launch("step")
    # mend: s.launch("layer") => «s.launch("step")»


def level(s: ScheduleBlock) -> None:
    s["o_proj"].sync(mk.Tagged(level=mk.Level.GROUP))
    # MK541 spec `mk.linear(a` | its sync spans a group | or read the value in the block that writes it
    # mend: level=mk.Level.GROUP => «level=mk.Level.GPU»


def op(s: ScheduleBlock) -> None:
    s["o_prj"].prefetch(l2=1024)
    # MK152 `s["o_prj"].prefetch(` | no op is called 'o_prj' | the ops are: embed
    # mend: o_prj => «o_proj»


def op_by_number(s: ScheduleBlock) -> None:
    s["o_proj"].prefetch(l2=1024, ahead_of=3)  # type: ignore[arg-type]
    # MK152 `s["o_proj"].prefetch(` | no op is called 3 | the ops are: embed
    # mend: ahead_of=3 => ahead_of="«attention»"


def role(s: ScheduleBlock) -> None:
    s.role("kv_loader", warps=1)
    # MK153 `s.role(` | no role is called 'kv_loader' | a new role needs
    # mend: warps=1) => warps=1, «kind="loader"»)\n    s.ring("kv_loader", stages=2, stage_bytes=8192, window=8192)


def edge(s: ScheduleBlock) -> None:
    s.edge("qkv_proj", "o_proj").sync(mk.Flag())
    # MK154 `s.edge(` | 'o_proj' reads nothing from 'qkv_proj' | the readers of 'qkv_proj' are
    # mend: "o_proj" => "«attention»"


def ring(s: ScheduleBlock) -> None:
    s.ring("weight", stages=4)
    # MK155 `s.ring(` | no ring or loader role is called 'weight' | the rings are: weights
    # mend: "weight" => "«weights»"


def ring_of_a_new_role(s: ScheduleBlock) -> None:
    s.role("kv_loader", warps=1, kind="loader")
    s.ring("kv_loader", stages=2)
    # MK156 `s.ring(` | role 'kv_loader' has no ring yet | give all of
    # mend: stages=2 => «stages=»2, «stage_bytes=»8192, «window=»8192


def warps(s: ScheduleBlock) -> None:
    s.role("consumer", warps=4)
    s.warps(12)
    # MK157 `s.warps(` | warps(12) does not match the roles: loader 1, consumer 4 | make the roles add up to 12
    # mend: s.warps(12) => s.warps(5)


def split_of_a_linear(s: ScheduleBlock) -> None:
    s["o_proj"].split(kv=4)
    # MK158 `s["o_proj"].split(` | 'o_proj' has no KV range to split | is for attention ops
    # mend: "o_proj" => "«attention»"
    # mend: kv=4 => kv=2


def split_of_too_many_rows(s: ScheduleBlock) -> None:
    s.max_kv(1 << 24)
    s["attention"].split(kv=1)
    # MK212 `s["attention"].split(` | the rows of a split of 'attention' take 4294971392 bytes | or a smaller max_kv
    # mend: kv=1 => «kv=3»


def chunk(s: ScheduleBlock) -> None:
    s["o_proj"].split(chunk=7)
    # MK160 `s["o_proj"].split(` | chunk of 'o_proj' is 7 tiles, a row group of it has 1 | choose a divisor of 1
    # mend: chunk=7 => chunk=«0»


def too_many_warps(s: ScheduleBlock) -> None:
    s.warps(33)
    # MK161 `s.warps(` | asks for 33 warps, sm_90a has room for 32 per block | use fewer consumer or loader warps
    # mend: 33 => 16


def too_few_registers(s: ScheduleBlock) -> None:
    s.role("consumer", warps=16)
    # MK162 `s.role(` | 17 warps leave 120 registers per thread | use fewer warps
    # mend: warps=16 => warps=15


def half_a_warpgroup(s: ScheduleBlock) -> None:
    s.role("consumer", warps=6)
    s.registers("moved")
    # MK245 `s.registers(` | 6 consumer warps are no whole warpgroups | leave s.registers("moved") out, or use 4, 8 or 12 consumer warps
    # mend: warps=6 => warps=8


def one_warp_after_each_launch(s: ScheduleBlock) -> None:
    s.launch("op")
    s.finish("warp")
    # MK246 `s.finish(` | a launch is an op, and ends with it | leave s.finish("warp") out
    # mend: s.finish("warp") => pass


def a_layer_from_outside(s: ScheduleBlock) -> None:
    s.launch("layer", start="embed")
    # MK286 `s.launch(` | 'step' cannot be launched layer by layer: 'embed' is not in its layers | choose for start= one of:
    # mend: "embed" => "«attention»"


def a_trigger_outside(s: ScheduleBlock) -> None:
    s.launch("layer", trigger="embed")
    # MK286 `s.launch(` | 'embed' is not in its layers | choose for trigger= one of:
    # mend: "embed" => "«o_proj»"


def a_start_of_steps(s: ScheduleBlock) -> None:
    s.launch("step", start="attention")
    # MK286 `s.launch(` | start='attention' is about launches of a layer, and here one is a step | or leave start= out
    # mend: "step" => «"layer"»


def a_layer_from_nowhere(s: ScheduleBlock) -> None:
    s.launch("layer", start="atention")
    # MK152 `s.launch(` | no op is called 'atention' | did you mean 'attention'? the ops are:
    # mend: "atention" => "«attention»"


def launches_that_do_not_overlap(s: ScheduleBlock) -> None:
    s.launch("layer")
    s.ring("weights", stages=12)
    # MK287 `s.ring(` | finds no room beside the one before: shared memory: | launches one when the other ends; or use at most
    # mend: "layer" => «"layer", trigger="end"»


def blocks(s: ScheduleBlock) -> None:
    s.blocks(133)
    # MK163 `s.blocks(` | asks for 133 blocks, sm_90a runs at most 132 at once | choose 1 to
    # mend: 133 => «132»


def stage_bytes(s: ScheduleBlock) -> None:
    s.ring("weights", stage_bytes=1000)
    # MK164 `s.ring(` | ring 'weights' has stages of 1000 bytes, but a KV chunk of attention needs 4096 | or a larger multiple of 128
    # mend: stage_bytes=1000 => «stage_bytes=4096»


def scale(s: ScheduleBlock) -> None:
    s["o_proj"].scale("after")
    # MK241 `s["o_proj"].scale(` | 'o_proj' cannot be scaled after | elementwise(one value) times
    # mend: .scale("after") => «.scale("before")»


def slots(s: ScheduleBlock) -> None:
    s["o_proj"].sync(mk.Tagged(slots=3))
    # MK165 `s["o_proj"].sync(` | Tagged on 'x' has 3 slots | a power of two
    # mend: mk.Tagged(slots=3) => «mk.Tagged(slots=4)»


def slots_of_a_sentinel(s: ScheduleBlock) -> None:
    s.edge("qkv_proj", "attention").sync(mk.Sentinel(slots=2))
    # MK165 `s.edge(` | Sentinel on 'qkv_proj' has 2 slots | at least 4
    # mend: mk.Sentinel(slots=2) => «mk.Sentinel(slots=4)»


def absurd_slots(s: ScheduleBlock) -> None:
    s["o_proj"].sync(mk.Tagged(slots=1 << 30))
    # MK165 `s["o_proj"].sync(` | Tagged on 'x' has 1073741824 slots | at least 2 and at most 64
    # mend: 1 << 30 => «at most (\d+), as»


def absurd_window(s: ScheduleBlock) -> None:
    s.ring("weights", window=1 << 30)
    # MK166 `s.ring(` | window of ring 'weights' is 1073741824 | choose a value from 1 to 232448
    # mend: 1 << 30 => «232448»


def absurd_meeting_window(s: ScheduleBlock) -> None:
    s.ring("weights", meeting_window=1 << 40)
    # MK166 `s.ring(` | meeting_window of ring 'weights' is 1099511627776 | choose a value from 0 to 232448
    # mend: 1 << 40 => «232448»


def absurd_l2(s: ScheduleBlock) -> None:
    s["o_proj"].prefetch(l2=1 << 40)
    # MK166 `s["o_proj"].prefetch(` | l2 prefetch of 'o_proj', in bytes, is 1099511627776 | choose a value from 0 to 60000000
    # mend: 1 << 40 => «60000000»


def many_at_once(s: ScheduleBlock) -> None:
    s["o_prj"].prefetch(l2=1024)
    # MK152 `s["o_prj"].prefetch(` | no op is called 'o_prj' | the ops are: embed
    # mend: o_prj => «o_proj»
    s.edge("qkv_proj", "o_proj").sync(mk.Flag())
    # MK154 `s.edge(` | 'o_proj' reads nothing from 'qkv_proj' | the readers of 'qkv_proj' are
    # mend: "qkv_proj", "o_proj" => "qkv_proj", "«attention»"
    s.batch(40)
    # MK166 `s.batch(` | batch is 40 | choose a value from 1 to 32
    # mend: batch(40) => batch(4)
    s["attention"].split(kv=400)
    # MK166 `s["attention"].split(` | kv split of 'attention' is 400 | choose a value from 1 to 4
    # mend: 400 => 2


def kv_split(s: ScheduleBlock) -> None:
    s["attention"].split(kv=400)
    # MK166 `s["attention"].split(` | kv split of 'attention' is 400 | choose a value from 1 to 4
    # mend: 400 => «4»


def share_offset(s: ScheduleBlock) -> None:
    s["o_proj"].split(share_offset=4)
    # MK166 `s["o_proj"].split(` | share_offset of 'o_proj' is 4 | choose a value from 0 to 3
    # mend: share_offset=4 => share_offset=«3»


def batch(s: ScheduleBlock) -> None:
    s.batch(33)
    # MK166 `s.batch(` | batch is 33 | choose a value from 1 to 32
    # mend: 33 => «32»


def max_kv(s: ScheduleBlock) -> None:
    s.max_kv(1 << 30)
    # MK166 `s.max_kv(` | max_kv is 1073741824 | choose a value from 1 to 16777216
    # mend: 1 << 30 => 1 << 12


def too_many_stages(s: ScheduleBlock) -> None:
    s.ring("weights", stages=65, stage_bytes=4 * KIB)
    # MK169 `s.ring(` | ring 'weights' has 65 stages | use at most 64 stages
    # mend: stages=65 => stages=«64» // 2


def ring_too_large(s: ScheduleBlock) -> None:
    s.ring("weights", stages=20)
    # MK170 `s.ring(` | sm_90a gives a block 232448 | ring stages, or fewer tokens
    # mend: stages=20 => stages=«at most (\d+) ring»


def stage_too_large(s: ScheduleBlock) -> None:
    s.ring("weights", stage_bytes=1024 * KIB)
    # MK170 `s.ring(` | sm_90a gives a block 232448 | use stages of at most
    # mend: 1024 * KIB => «at most (\d+) bytes»


def ring_too_short(s: ScheduleBlock) -> None:
    s["lm_head"].prefetch(registers=0)
    s.ring("weights", stages=1)
    # MK177 `s.ring(` | ring 'weights' has 1 stages, but 'lm_head' holds 2 of them at once | use at least 2 stages
    # mend: stages=1 => stages=«2»


def loader_without_a_ring(s: ScheduleBlock) -> None:
    s.role("late", warps=1, kind="loader")
    # MK178 `s.role(` | loader 'late' has no ring | window=...
    # mend: kind="loader")\n => kind="loader")\n    «s.ring('late', stages=..., stage_bytes=..., window=...)»\n


def wide_loader(s: ScheduleBlock) -> None:
    s.role("loader", warps=2)
    # MK179 `s.role(` | the roles are loader (loader, 2 warps), consumer (consumer, 8 warps) | for loaders
    # mend: warps=2 => «warps=1»


def no_consumer(s: ScheduleBlock) -> None:
    s.role("consumer", warps=8, kind="loader")
    # MK179 `s.role(` | consumer (loader, 8 warps) | keep one role of kind
    # mend: kind="loader" => kind=«"consumer"»


def l2_of_odd_bytes(s: ScheduleBlock) -> None:
    s["o_proj"].prefetch(l2=1000)
    # MK188 `s["o_proj"].prefetch(` | l2 prefetch of 'o_proj' is 1000 bytes | use a multiple of 16
    # mend: l2=1000 => l2=1008


def l2_of_a_table(s: ScheduleBlock) -> None:
    s["embed"].prefetch(l2=1024)
    # MK240 `s["embed"].prefetch(` | l2 prefetch of 'embed', which streams nothing | prefetch linears, or the cached rows of attention
    # mend: "embed" => "attention"


def l2_of_cached_rows_in_launches_of_one_op(s: ScheduleBlock) -> None:
    s.launch("op")
    s["attention"].prefetch(l2=1024)
    # MK240 `s["attention"].prefetch(` | whose rows a launch of one op cannot find | prefetch linears
    # mend: "attention" => "o_proj"


def misspelt_keyword(s: ScheduleBlock) -> None:
    s["o_proj"].prefetch(smen="ring")  # type: ignore[call-arg]
    # MK220 `s["o_proj"].prefetch(` | got an unexpected keyword argument 'smen' | call it as OpHandle.prefetch(
    # mend: smen= => «smem=»


def misspelt_method(s: ScheduleBlock) -> None:
    s["o_proj"].prefech(smem="ring")  # type: ignore[attr-defined]
    # MK220 `s["o_proj"].prefech` | has no attribute 'prefech' | it has
    # mend: prefech => «prefetch»


def role_without_warps(s: ScheduleBlock) -> None:
    s.role("consumer")  # type: ignore[call-arg]
    # MK220 `s.role(` | missing 1 required keyword-only argument: 'warps' | call it as ScheduleBlock.role(
    # mend: "consumer") => "consumer", «warps»=8)
