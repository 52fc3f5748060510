"""Splits of an attention that are added within a cluster of blocks (templates/include/megadsl/cluster.h).

A hop through L2 takes 0.7 us and more while weights stream, for it queues behind what is in flight; one through distributed shared memory
does not. A KV head's splits are the blocks of a cluster, so that what they exchange never leaves it. The whole launch is then in
clusters of that size, of which not every SM can be a part.
"""

from __future__ import annotations

from megadsl.diagnostics import Collector, collecting, declare
from megadsl.dsl.overrides import Overrides
from megadsl.ir.graph import Attention, Graph
from megadsl.ir.schedule import OpSchedule, Schedule, Sentinel
from megadsl.lower.exchanges import merges_in_cluster
from megadsl.lower.heads import in_halves
from megadsl.lower.scope import LAUNCHES
from megadsl.lower.tiling import GROUP_ROWS
from megadsl.machine import Machine

NO_CLUSTER = declare("MK248", "{op!r} cannot add its splits within a cluster: {why}", "{how}")

SIZES = (2, 4, 8)  # of the clusters that every GPU with clusters can launch
FEATURES = ("cluster", "st_async")


def check_clusters(graph: Graph, schedule: Schedule, machine: Machine, overrides: Overrides | None = None) -> None:
    """MK248, at the line of ``overrides``, for each attention that is to add its splits within a cluster and cannot."""
    asked = overrides or Overrides(schedule.arch, ())
    with collecting() as found:
        for how in schedule.ops:
            op = graph.op(how.op)
            if isinstance(op, Attention) and merges_in_cluster(op, schedule):
                _check(op, how, graph, schedule, machine, asked, found)


def _check(op: Attention, how: OpSchedule, graph: Graph, schedule: Schedule, machine: Machine, asked: Overrides, found: Collector) -> None:
    refused = _why_machine(how, schedule, machine) or _why_blocks(op, how, schedule, machine) or _why_value(op, how, graph, schedule)
    if refused is not None:
        found.add(NO_CLUSTER, asked.said(op.span, "merge", op.name), op=op.name, why=refused[0], how=refused[1])


def _why_machine(how: OpSchedule, schedule: Schedule, machine: Machine) -> tuple[str, str] | None:
    elsewhere = 'use .merge("exchange")'
    if missing := [name for name in FEATURES if name not in machine.features]:
        return f"{machine.arch} has no {missing[0]}", elsewhere
    if schedule.scope != "step":
        return f"a launch is {LAUNCHES[schedule.scope]}, and its blocks begin one by one", elsewhere
    if schedule.sequences > 1:
        return "a split of a batch has chunks of several sequences", elsewhere
    if how.splits not in SIZES:
        return f"it has {how.splits} splits", f"use .split(kv=n) with one of: {', '.join(map(str, SIZES))}"
    others = sorted({o.splits for o in schedule.ops if o.merge == how.merge} - {how.splits})
    if others:
        return f"a launch has clusters of one size, and another op has {others[0]} splits", "use as many splits for both"
    return None


def _why_blocks(op: Attention, how: OpSchedule, schedule: Schedule, machine: Machine) -> tuple[str, str] | None:
    units, most = op.kv_heads * how.splits, machine.clustered_blocks(how.splits)
    if units > schedule.blocks:
        return f"its {units} units find {schedule.blocks} blocks", "use fewer splits or more blocks"
    if schedule.blocks % how.splits:
        return f"{schedule.blocks} blocks are no clusters of {how.splits}", "use a multiple of that for the blocks"
    if schedule.blocks > most:
        return f"{machine.name} runs {most} blocks in clusters of {how.splits} at once, not {schedule.blocks}", f"use at most {most} blocks"
    return None


def _why_value(op: Attention, how: OpSchedule, graph: Graph, schedule: Schedule) -> tuple[str, str] | None:
    groups = op.heads // op.kv_heads * op.head_dim // GROUP_ROWS
    if groups % how.splits:
        return f"{how.splits} blocks cannot add equally many of a KV head's {groups} groups of features", "use fewer splits"
    if not isinstance(schedule.edge(op.out).sync, Sentinel):
        return f"{op.out!r} is not dense", "use mk.Sentinel() for it"
    if how.share_offset:
        return "its features are shared out by KV heads, not by an offset", "use .split(share_offset=0)"
    if in_halves(op, graph.tokens, schedule.consumer.warps):
        return "two warps have each tile of its queries, and publish halves", "use fewer tokens, or other consumer warps"
    return None
