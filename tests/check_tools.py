"""What the tests of the plan checker share: plans under a schedule, and plans with one thing broken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lower_tools import GPU
from schedules import everywhere

import megadsl as mk
from megadsl.check.checker import check_plan
from megadsl.check.edits import edited
from megadsl.dsl.registry import load
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.ir.plan import Plan
from megadsl.ir.schedule import Sync
from megadsl.lower.pipeline import lower

Decide = Callable[[ScheduleBlock], None]


def plan(name: str, decide: Decide | None = None, tokens: int = 1, *, fields: Mapping[str, Any] | None = None, **options: Any) -> Plan:
    """The plan of a model, or of ``file.py:function`` with ``fields``, under what ``decide`` says in place of its own schedule."""
    found, values = load(name)
    kernel = mk.kernel(found.function)  # the model's own keeps its schedule
    with mk.schedule(kernel, arch=GPU.arch) as s:
        if decide is not None:
            decide(s)
    overrides = kernel.overrides_for(GPU.arch)
    return lower(kernel.trace({**values, **(fields or {})}, tokens=tokens), GPU, overrides=overrides, **options).plan


def assert_found(broken: Plan, code: str, words: str) -> None:
    """The checker refuses a plan with this code among others, says these words, and how to mend it."""
    found = check_plan(broken).findings
    assert code in [f.code for f in found] and words in " ".join(map(str, found)) and "mend:" in str(found[0])


def by_block(decide: Decide | None = None) -> Decide:
    """Kernels whose warps finish what they multiply, beside what else is decided."""

    def both(s: ScheduleBlock) -> None:
        s.finish("block")
        if decide is not None:
            decide(s)

    return both


def prefetched(s: ScheduleBlock) -> None:
    s["o_proj"].prefetch(l2=4096)
    s["down_proj"].prefetch(l2=1 << 20, ahead_of="qkv_proj")


def chunked(s: ScheduleBlock) -> None:
    for op in ("o_proj", "down_proj"):
        s[op].split(chunk=1).poll(pause=50)


PIECES = {"intermediate_size": 3000}  # of llama-tiny: a down projection of three tiles a row group


def split(sync: Sync | None = None, **ways: int) -> Decide:
    """Columns of linears in parts, with one kind of sync everywhere."""

    def decide(s: ScheduleBlock) -> None:
        if sync is not None:
            everywhere(sync)(s)
        for op, count in ways.items():
            s[op].columns(ways=count)
            if sync is not None:
                s.edge(op, op).sync(sync)

    return decide


def without(call: str, op: str | None = None) -> Callable[[Plan], Plan]:
    """Drops an instruction."""
    return lambda of: edited(of, lambda i: None if i.call == call and op in (None, i.op) else i)


def unmet(call: str, *names: str) -> Callable[[Plan], Plan]:
    """Takes barriers out of a call."""
    return lambda of: edited(of, lambda i: replace(i, syncs=tuple(s for s in i.syncs if s not in names)) if i.call == call else i)


def arguments(call: str, op: str | None = None, **changes: object) -> Callable[[Plan], Plan]:
    """Changes what a call is given."""
    return lambda of: edited(of, lambda i: replace(i, args={**i.args, **changes}) if i.call == call and op in (None, i.op) else i)


def area(of: Plan, name: str) -> int:
    return next(a.offset for a in of.areas if a.name == name)
