"""What turning each knob of a schedule means on one small model, as lines of a schedule file: tests try what the table says of it."""

from __future__ import annotations

from dataclasses import dataclass

from megadsl.dsl.knobs import KNOBS, Knob
from megadsl.machine import DEFAULT_ARCH


@dataclass(frozen=True)
class Sample:
    """Lines that turn a knob; ``beside``: what stands in both schedules that are compared, where the knob says nothing alone.
    ``fields``: of the model's configuration."""

    turned: str
    beside: str = ""
    fields: tuple[tuple[str, int], ...] = ()


KV_LOADER = """
role kv_loader: kind = loader
ring kv_loader: stages = 3
ring kv_loader: stage_bytes = 8 KiB
ring kv_loader: window = 8 KiB
ring weights: stages = 4"""
ALL_SENTINELS = "".join(
    f"\nop {op}: sync = sentinel" for op in ("embed_tokens", "qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj")
)
L2 = "op o_proj: l2 = 4 KiB"

# On llama-tiny, 2 tokens, 5 blocks.
TOKENS, BLOCKS = 2, 5
TWO_TILES = (("intermediate_size", 1040),)  # a row group of the down projection
SAMPLES: dict[tuple[str, str], tuple[Sample, ...]] = {
    ("kernel", "launch"): (Sample("launch = op"), Sample("launch = layer")),
    ("kernel", "launch_start"): (Sample("launch_start = o_proj", "launch = layer"),),
    ("kernel", "launch_trigger"): (Sample("launch_trigger = down_proj", "launch = layer"),),
    ("kernel", "block_registers"): (Sample("block_registers = moved"),),
    ("kernel", "finish"): (Sample("finish = block"),),
    ("kernel", "blocks"): (Sample("blocks = 3", "op attention: split_kv = 2\nfinish = block"),),
    ("kernel", "warps"): (Sample("warps = 5"),),
    ("kernel", "batch"): (Sample("batch = 1"), Sample("batch = 5")),
    ("kernel", "max_kv"): (Sample("max_kv = 160"),),
    ("kernel", "warm_code"): (Sample("warm_code = loader"), Sample("warm_code = consumer")),
    ("kernel", "warm_code_blocks"): (Sample("warm_code_blocks = 2", "warm_code = loader"),),
    ("kernel", "warm_code_part"): (Sample("warm_code_part = whole", "warm_code = loader"),),
    ("kernel", "warm_code_every"): (Sample("warm_code_every = 3", "warm_code = consumer"),),
    ("role", "kind"): (Sample(KV_LOADER),),
    ("role", "warps"): (Sample("role consumer: warps = 5"),),
    ("ring", "stages"): (Sample("ring weights: stages = 3"), Sample("ring weights: stages = 1")),
    ("ring", "stage_bytes"): (Sample("ring weights: stage_bytes = 8 KiB"),),
    ("ring", "window"): (Sample("ring weights: window = 1 B"), Sample("ring weights: window = 128 KiB")),
    ("ring", "meeting_window"): (Sample("ring weights: meeting_window = 2 KiB"),),
    ("op", "loader"): (Sample("op attention: loader = kv_loader", KV_LOADER),),
    ("op", "smem"): (Sample("op o_proj: smem = none\nop attention: smem = none"),),
    ("op", "registers"): (Sample("op o_proj: registers = 2\nop qkv_proj: registers = 2\nop attention: registers = 0"),),
    ("op", "l2"): (Sample(L2), Sample("op down_proj: l2 = 1 KiB", "op down_proj: l2 = 2 KiB\nop down_proj: ahead_of = qkv_proj")),
    ("op", "l2_by"): (Sample("op o_proj: l2_by = load", L2),),
    ("op", "ahead_of"): (Sample("op o_proj: ahead_of = qkv_proj", L2),),
    ("op", "hint"): (Sample("op o_proj: hint = evict_last\nop attention: hint = evict_first"),),
    ("op", "split_kv"): (Sample("op attention: split_kv = 1"), Sample("op attention: split_kv = 3")),
    ("op", "share_offset"): (Sample("op qkv_proj: share_offset = 3\nop lm_head: share_offset = 1"),),
    ("op", "chunk"): (Sample("op down_proj: chunk = 1", fields=TWO_TILES),),
    ("op", "columns"): (Sample("op down_proj: columns = 2", fields=TWO_TILES),),
    ("op", "scale"): (Sample("op qkv_proj: scale = before"),),
    ("op", "gather"): (Sample("op qkv_proj: gather = shared\nop o_proj: gather = shared", ALL_SENTINELS),),
    ("op", "residual"): (Sample("op o_proj: residual = exchange\nop down_proj: residual = exchange"),),
    ("op", "publish"): (
        Sample("op qkv_proj: publish = registers\nop attention: publish = registers\nop down_proj: publish = registers", ALL_SENTINELS),
    ),
    ("op", "merge"): (Sample("op attention: merge = cluster", ALL_SENTINELS + "\nblocks = 4\nop attention: split_kv = 2"),),
    ("op", "pause"): (Sample("op o_proj: pause = 300\nop attention: pause = 100\nop down_proj: pause = 1"),),
    ("op", "meeting_window"): (
        Sample("op o_proj: meeting_window = 8 KiB"),
        Sample("op down_proj: meeting_window = 96 KiB", "op down_proj: meeting_window = 1 B"),
    ),
    ("op", "dry_run"): (Sample("op gate_up_proj: dry_run = yes\nop down_proj: dry_run = yes\nop lm_head: dry_run = yes"),),
    ("op", "sync"): (Sample("op o_proj: sync = flag(slots = 4)\nop qkv_proj: sync = sentinel"),),
    ("edge", "sync"): (
        Sample("edge qkv_proj -> attention: sync = sentinel"),
        Sample("edge attention -> attention: sync = sentinel", "edge attention -> attention: sync = flag"),
    ),
    ("edge", "back_off"): (Sample("edge o_proj -> gate_up_proj: back_off = 100\nedge attention -> attention: back_off = 50"),),
    ("edge", "width"): (Sample("edge gate_up_proj -> down_proj: width = 1", fields=TWO_TILES),),
}


def text(lines: str) -> str:
    """A schedule file of these lines; of a knob that is turned twice, the later line."""
    last = {line.partition(" = ")[0]: line for line in lines.splitlines() if line}
    return "\n".join([f"arch = {DEFAULT_ARCH}", *last.values()]) + "\n"


def samples(knob: Knob) -> tuple[Sample, ...]:
    """How the knob can be turned."""
    assert (knob.of, knob.name) in SAMPLES, f"say in tests/knob_samples.py how {knob.of} {knob.name} is turned"
    return SAMPLES[knob.of, knob.name]


ALL = [(knob, sample) for knob in KNOBS for sample in samples(knob)]

# All knobs that change code and no bits, but for other launches.
TOGETHER = f"""{KV_LOADER}
block_registers = moved
finish = block
blocks = 3
batch = 2
warm_code = consumer
ring weights: stage_bytes = 8 KiB
op attention: loader = kv_loader
op attention: smem = none
op o_proj: smem = ring
op qkv_proj: registers = 2
{L2}
op o_proj: ahead_of = qkv_proj
op o_proj: l2_by = load
op o_proj: hint = evict_last
op o_proj: residual = exchange
op o_proj: pause = 200
op gate_up_proj: meeting_window = 16 KiB
op down_proj: dry_run = yes
op attention: split_kv = 2
op o_proj: sync = flag(slots = 4)
edge qkv_proj -> attention: sync = sentinel(slots = 8)
edge o_proj -> gate_up_proj: back_off = 100
edge o_proj -> gate_up_proj: width = 1
"""
