"""Decisions about a Llama that several tests make."""

from __future__ import annotations

from collections.abc import Callable

from megadsl.dsl.schedule import ScheduleBlock
from megadsl.ir.schedule import Sync

VALUES = ("embed_tokens", "qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj")  # by their producers
LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")


def everywhere(sync: Sync) -> Callable[[ScheduleBlock], None]:
    """One kind of sync on every edge, an attention's parts included."""

    def decide(s: ScheduleBlock) -> None:
        for op in VALUES:
            s[op].sync(sync)
        s.edge("attention", "attention").sync(sync)

    return decide
