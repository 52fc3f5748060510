"""Decisions about a Llama that several tests make."""

from __future__ import annotations

from collections.abc import Callable

from megadsl.dsl.schedule import ScheduleBlock
from megadsl.ir.schedule import Sync

VALUES = ("embed_tokens", "qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj")  # by their producers
LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")


def settled(s: ScheduleBlock) -> None:
    """What defaults choose by shapes and the number of blocks: kernels that differ in nothing else are one build."""
    s.ring("weights", stages=6)
    s.batch(3)
    for op in LINEARS:
        s[op].prefetch(registers=2)


def scaled_before(s: ScheduleBlock) -> None:
    """Row scales multiply the inputs, not the sums; by four warps."""
    s.role("consumer", warps=4)
    for op in ("qkv_proj", "gate_up_proj", "lm_head"):
        s[op].scale("before")


def kv_loader(s: ScheduleBlock) -> None:
    """A loader of its own for cached rows. Blocks pause before they poll some inputs."""
    s.role("kv_loader", warps=1, kind="loader")
    s.ring("kv_loader", stages=3, stage_bytes=8192, window=8192)
    s.phase("attention").loader("kv_loader")
    s.ring("weights", stages=4)
    s["attention"].poll(pause=100)
    s["o_proj"].poll(pause=300).residual("exchange")


def kv_loader_and_held_shares(s: ScheduleBlock) -> None:
    """``kv_loader``; of five blocks none has more than four row groups of these ops, and some have fewer."""
    kv_loader(s)
    s.batch(4)
    for op in ("o_proj", "down_proj", "qkv_proj"):
        s[op].prefetch(registers=4)


def gated(s: ScheduleBlock) -> None:
    """``kv_loader``, and nothing is loaded before its op has begun."""
    kv_loader(s)
    for op in ("attention", *LINEARS):
        s[op].prefetch(smem=None)


def alone(s: ScheduleBlock) -> None:
    """Every op a launch of its own; with as many stages as fit, kernels of several block counts would not be one build."""
    s.launch("op")
    s.ring("weights", stages=5)


def in_two_splits(*then: Callable[[ScheduleBlock], None]) -> Callable[[ScheduleBlock], None]:
    """An attention's cached rows in two splits, whatever the number of blocks, and the other decisions."""

    def decide(s: ScheduleBlock) -> None:
        s["attention"].split(kv=2)
        for one in then:
            one(s)

    return decide


def everywhere(sync: Sync) -> Callable[[ScheduleBlock], None]:
    """One kind of sync on every edge, an attention's parts included."""

    def decide(s: ScheduleBlock) -> None:
        for op in VALUES:
            s[op].sync(sync)
        s.edge("attention", "attention").sync(sync)

    return decide
