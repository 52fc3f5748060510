"""What the tests of lowering share: small kernels, registered models, and lowering under a user's decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dsl_tools import CFG, HIDDEN, head, start

import megadsl as mk
from megadsl.dsl.registry import load
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.ir.graph import Graph, Linear
from megadsl.ir.schedule import OpSchedule, Schedule
from megadsl.lower.fuse import fuse
from megadsl.lower.infer import infer
from megadsl.lower.pipeline import Lowering, lower
from megadsl.machine import DEFAULT_ARCH, Machine, machine

GPU = machine(DEFAULT_ARCH)


def step_kernel() -> mk.Kernel:
    """A small decoder: norm, qkv with rope, attention, a residual; a fresh kernel, so that schedules do not leak."""

    @mk.kernel
    def step(cfg: Any, tokens: int = 1) -> mk.Tensor:
        x = start(tokens)
        for layer in mk.layers(cfg.layers):
            h = mk.rms_norm(x, layer.weight("norm", HIDDEN), eps=1e-5)
            q, k, v = mk.linear(h, *(layer.weight(f"{n}_proj", (HIDDEN, HIDDEN)) for n in "qkv"))
            q, k = mk.rope(q, k, head_dim=64, theta=1e4)
            a = mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2)
            x = x + mk.linear(a, layer.weight("o_proj", (HIDDEN, HIDDEN)))
        return head(x)

    return step


def lowered(
    kernel: mk.Kernel | None = None,
    decide: Callable[[ScheduleBlock], None] | None = None,
    *,
    tokens: int | None = None,
    on: Machine = GPU,
    **options: Any,
) -> Lowering:
    """All passes over a kernel (default: :func:`step_kernel`), with what ``decide`` says about its schedule."""
    kernel = kernel or step_kernel()
    if decide is not None:
        with mk.schedule(kernel, arch=on.arch) as s:
            decide(s)
    return lower(kernel.trace(CFG, tokens=tokens), on, overrides=kernel.overrides_for(on.arch), **options)


def model(name: str, tokens: int = 1, **options: Any) -> Lowering:
    """All passes over a registered model."""
    kernel, values = load(name)
    return lower(kernel.trace(values, tokens=tokens), options.pop("on", GPU), **options)


def model_graph(name: str, tokens: int = 1) -> Graph:
    kernel, values = load(name)
    return fuse(infer(kernel.trace(values, tokens=tokens)))


def linears(graph: Graph) -> list[Linear]:
    return [op for op in graph.ops if isinstance(op, Linear)]


def with_op(schedule: Schedule, name: str, **changes: Any) -> Schedule:
    """The schedule with one op's record changed."""
    found: tuple[OpSchedule, ...] = tuple(replace(o, **changes) if o.op == name else o for o in schedule.ops)
    return replace(schedule, ops=found)
