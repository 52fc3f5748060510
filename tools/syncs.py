"""Models under one kind of sync, or with pauses before all polls, for tools that go through all kinds."""

from __future__ import annotations

from typing import Any

import megadsl as mk
from megadsl.driver import compile_model
from megadsl.dsl.kernel import Kernel
from megadsl.dsl.registry import load
from megadsl.ir.graph import Attention, Embed, Graph, Linear, kept_values
from megadsl.ir.schedule import Sync
from megadsl.machine import DEFAULT_ARCH

PAUSE = 100  # ns
SYNCS: dict[str, Sync] = {"tagged": mk.Tagged(), "sentinel": mk.Sentinel(), "flag": mk.Flag()}


def _copy(model: str) -> tuple[Kernel, dict[str, Any], Graph]:
    """The model's kernel without its own schedule, its config, and its graph."""
    found, config = load(model)
    kernel = mk.kernel(found.function)
    return kernel, config, compile_model(kernel, config=config, check=False).graph


def synced(model: str, sync: str) -> tuple[Kernel, dict[str, Any]]:
    """A copy of the model's kernel, with ``sync`` (a name in SYNCS) on every edge in place of its own schedule; and its config."""
    kernel, config, graph = _copy(model)
    with mk.schedule(kernel, arch=DEFAULT_ARCH) as s:
        for name in {value.producer for value in graph.values}:
            s[name].sync(SYNCS[sync])
        for op in graph.ops:
            if isinstance(op, Attention):
                s.edge(op.name, op.name).sync(SYNCS[sync])
    return kernel, config


def paused(model: str) -> tuple[Kernel, dict[str, Any]]:
    """A copy of the model's kernel that pauses before each op's first poll and gathers residual rows, in place of its own schedule; and
    its config."""
    kernel, config, graph = _copy(model)
    with mk.schedule(kernel, arch=DEFAULT_ARCH) as s:
        for op in graph.ops:
            if not isinstance(op, Embed):
                s[op.name].poll(pause=PAUSE)
            if isinstance(op, Linear) and kept_values(op):
                s[op.name].residual("exchange")
    return kernel, config
