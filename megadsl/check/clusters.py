"""Splits that are added within a cluster: each part is sent to the one block that adds it, and each block expects what it is sent.

Reuse of the place where parts land, and of its barrier, is proved with the exchanges (clocks.py): it has one slot, and is overwritten by
the next layer's parts. Parts land whenever other blocks send them, so that nothing else may lie there for as long as the launch lives.
"""

from __future__ import annotations

from megadsl.check.memory import OUTSIDE
from megadsl.check.model import Cluster, Device
from megadsl.check.report import Findings
from megadsl.check.shares import COVER, MISMATCH
from megadsl.diagnostics import declare
from megadsl.ir.graph import Attention
from megadsl.lower.exchanges import PART_BYTES
from megadsl.lower.memory import landed_name, received_name
from megadsl.lower.scratch import BARRIER_BYTES
from megadsl.lower.tiling import GROUP_ROWS

APART = declare(
    "MK535",
    "{op!r} sends block {block} parts of KV head {head}, whose other splits are in another cluster",
    "launch in clusters of as many blocks as there are splits, and a whole number of them",
)


def check_clusters(device: Device, findings: Findings) -> list[str]:
    """Nothing where no attention adds its splits within a cluster."""
    found = [(op, device.cluster(op.name)) for op in device.ops[1]]
    clusters = [(op, cluster) for op, cluster in found if cluster is not None]
    for op, cluster in clusters:
        _units(device, op, findings)
        _groups(device, op, cluster, findings)
        _areas(device, op, cluster, findings)
    size = device.plan.schedule.cluster
    return [f"clusters of {size} blocks: each part of {len(clusters)} attentions is sent to the one block that adds it"] if clusters else []


def _units(device: Device, op: Attention, findings: Findings) -> None:
    """The splits of a KV head are the ranks of one cluster."""
    heads, size = device.heads(op.name), device.plan.schedule.cluster
    for unit in range(heads.units):
        whole = unit // size == (unit // heads.splits * heads.splits) // size and unit % size == unit % heads.splits
        if unit >= device.blocks or device.blocks % size or not whole:
            rows = [
                (f"consumer of block {unit % device.blocks}", [f"has split {unit % heads.splits} of KV head {unit // heads.splits}"]),
                ("launch", [f"{device.blocks} blocks in clusters of {size}"]),
            ]
            findings.add(APART, op.span, rows, op=op.name, block=unit % device.blocks, head=unit // heads.splits)
            return


def _groups(device: Device, op: Attention, cluster: Cluster, findings: Findings) -> None:
    """Each group of a KV head's features is added by one of its blocks, which publishes it."""
    heads, value = device.heads(op.name), device.exchanges[op.out]
    of_a_head = heads.rows // device.tokens * op.head_dim // GROUP_ROWS
    if cluster.groups * heads.splits != of_a_head:
        rows = [("every block", [f"adds {cluster.groups} groups"]), ("KV head", [f"{of_a_head} groups, {heads.splits} splits"])]
        wrong = f"{heads.splits} blocks add {cluster.groups} of the {of_a_head} groups of a KV head each"
        findings.add(COVER, op.span, rows, op=op.name, what="groups of a cluster", wrong=wrong)
    if (value.owners, value.groups) != (heads.units, heads.units * cluster.groups):
        mine, theirs = f"{cluster.groups} groups to each of {heads.units} blocks", f"{value.groups} groups to {value.owners} blocks"
        sides = [(f"producer {op.name}", [mine]), (f"readers of {value.name}", [theirs])]
        findings.add(MISMATCH, op.span, sides, op=op.name, value=value.name, mine=mine, theirs=theirs)


def _areas(device: Device, op: Attention, cluster: Cluster, findings: Findings) -> None:
    sent = device.heads(op.name).splits * cluster.groups * device.tokens * PART_BYTES
    for name, begin, need in ((received_name(op), cluster.received, sent), (landed_name(op), cluster.landed, BARRIER_BYTES)):
        area = next(a for a in device.plan.areas if a.name == name)
        if begin != area.offset or need > area.bytes or area.overlay:
            rows = [
                ("blocks of the cluster", [f"write {need} bytes from {begin} on"]),
                (name, [f"{area.bytes} bytes from {area.offset} on"]),
            ]
            findings.add(OUTSIDE, op.span, rows, op=op.name, what=name, area=name, begin=begin, end=begin + need)
