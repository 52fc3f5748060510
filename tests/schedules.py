"""Decisions about a Llama that several tests make."""

from __future__ import annotations

from collections.abc import Callable

from megadsl.dsl.schedule import ScheduleBlock
from megadsl.ir.schedule import Sync

VALUES = ("embed_tokens", "qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj")  # by their producers
LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")


def kv_loader(s: ScheduleBlock) -> None:
    """A loader of its own for cached rows."""
    s.role("kv_loader", warps=1, kind="loader")
    s.ring("kv_loader", stages=3, stage_bytes=8192, window=8192)
    s.phase("attention").loader("kv_loader")
    s.ring("weights", stages=4)


def gated(s: ScheduleBlock) -> None:
    """``kv_loader``, and nothing is loaded before its op has begun."""
    kv_loader(s)
    for op in ("attention", *LINEARS):
        s[op].prefetch(smem=None)


def everywhere(sync: Sync) -> Callable[[ScheduleBlock], None]:
    """One kind of sync on every edge, an attention's parts included."""

    def decide(s: ScheduleBlock) -> None:
        for op in VALUES:
            s[op].sync(sync)
        s.edge("attention", "attention").sync(sync)

    return decide
