"""What the tests of the plan checker share: plans under a schedule, and plans with one thing broken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lower_tools import GPU

import megadsl as mk
from megadsl.dsl.registry import load
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.ir.plan import Exchange, Instr, LayerLoop, Phase, Plan, Program
from megadsl.ir.schedule import Sync
from megadsl.lower.pipeline import lower
from megadsl.lower.shape import ident

VALUES = ("embed_tokens", "qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj")
LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")

Decide = Callable[[ScheduleBlock], None]
Edit = Callable[[Instr], Instr | None]


def plan(name: str, decide: Decide | None = None, tokens: int = 1, *, fields: Mapping[str, Any] | None = None, **options: Any) -> Plan:
    """The plan of a model, or of ``file.py:function`` with ``fields``, under what ``decide`` says; the kernel keeps no decision."""
    kernel, values = load(name)
    with mk.schedule(kernel, arch=GPU.arch) as s:
        if decide is not None:
            decide(s)
    overrides = kernel.overrides_for(GPU.arch)
    with mk.schedule(kernel, arch=GPU.arch):
        pass
    return lower(kernel.trace({**values, **(fields or {})}, tokens=tokens), GPU, overrides=overrides, **options).plan


def every(sync: Sync) -> Decide:
    """One kind of sync on every edge of a Llama."""

    def decide(s: ScheduleBlock) -> None:
        for op in VALUES:
            s[op].sync(sync)
        s.edge("attention", "attention").sync(sync)

    return decide


def kv_loader(s: ScheduleBlock) -> None:
    s.role("kv_loader", warps=1, kind="loader")
    s.ring("kv_loader", stages=3, stage_bytes=8192, window=8192)
    s.phase("attention").loader("kv_loader")
    s.ring("weights", stages=4)


def gated(s: ScheduleBlock) -> None:
    kv_loader(s)
    for op in ("attention", *LINEARS):
        s[op].prefetch(smem=None)


def prefetched(s: ScheduleBlock) -> None:
    s["o_proj"].prefetch(l2=4096)
    s["down_proj"].prefetch(l2=1 << 20, ahead_of="qkv_proj")


def chunked(s: ScheduleBlock) -> None:
    for op in ("o_proj", "down_proj"):
        s[op].split(chunk=1)


PIECES = {"intermediate_size": 3000}  # of llama-tiny: a down projection of three tiles a row group


def split(sync: Sync | None = None, **ways: int) -> Decide:
    """Columns of linears in parts, with one kind of sync everywhere."""

    def decide(s: ScheduleBlock) -> None:
        if sync is not None:
            every(sync)(s)
        for op, count in ways.items():
            s[op].columns(ways=count)
            if sync is not None:
                s.edge(op, op).sync(sync)

    return decide


def edited(of: Plan, edit: Edit, role: str | None = None) -> Plan:
    """The plan with every instruction (of a role) replaced by what ``edit`` gives for it, or dropped."""

    def many(body: tuple[Instr, ...]) -> tuple[Instr, ...]:
        found = (edit(i) for i in body)
        return tuple(replace(i, body=many(i.body)) for i in found if i is not None)

    def item(it: Phase | LayerLoop) -> Phase | LayerLoop:
        if isinstance(it, LayerLoop):
            return replace(it, body=tuple(replace(p, body=many(p.body)) for p in it.body))
        return replace(it, body=many(it.body))

    def program(p: Program) -> Program:
        return p if role not in (None, p.role) else replace(p, body=tuple(item(i) for i in p.body))

    return replace(of, programs=tuple(program(p) for p in of.programs))


def without(call: str, op: str | None = None) -> Callable[[Plan], Plan]:
    """Drops an instruction."""
    return lambda of: edited(of, lambda i: None if i.call == call and op in (None, i.op) else i)


def unmet(call: str, *names: str) -> Callable[[Plan], Plan]:
    """Takes barriers out of a call."""
    return lambda of: edited(of, lambda i: replace(i, syncs=tuple(s for s in i.syncs if s not in names)) if i.call == call else i)


def arguments(call: str, op: str | None = None, **changes: object) -> Callable[[Plan], Plan]:
    """Changes what a call is given."""
    return lambda of: edited(of, lambda i: replace(i, args={**i.args, **changes}) if i.call == call and op in (None, i.op) else i)


def with_words(of: Plan, name: str, changes: Mapping[int, int]) -> Plan:
    """Changes words of one member of Shape."""
    words = {r.name: tuple(changes.get(i, w) for i, w in enumerate(r.words)) for r in of.shape if r.name == name}
    assert words
    return replace(of, shape=tuple(replace(r, words=words.get(r.name, r.words)) for r in of.shape))


def with_exchange(of: Plan, name: str, **changes: Any) -> Plan:
    """Changes an exchange, in the plan and in what the kernel reads."""
    before = of.exchange(name)
    e: Exchange = replace(before, **changes)
    made = replace(of, exchanges=tuple(e if x is before else x for x in of.exchanges))
    words = {0: e.offset // 16, 1: e.owners * e.vectors, 2: e.slots, 3: e.vectors, 4: e.units, 5: e.groups, 7: e.share_offset}
    return with_words(made, f"{ident(name)}_exchange", words)


def with_area(of: Plan, name: str, **changes: Any) -> Plan:
    """Moves or resizes an area of shared memory, in the plan alone."""
    return replace(of, areas=tuple(replace(a, **changes) if a.name == name else a for a in of.areas))


def area(of: Plan, name: str) -> int:
    return next(a.offset for a in of.areas if a.name == name)
