"""A block's shared memory: accesses in conflict are kept apart by a barrier, and what is read is what was written there.

Between two of the block's barriers its warps run in any order. So two accesses to the same bytes, one of them a write, must
have a barrier between them, unless each thread touches only what it wrote itself. Played for every kind of block (those that
own as much of everything are alike) over three layers: barriers order what lies further apart, and a layer's last accesses
meet the next one's first in every pair of layers alike. So do those of a launch's steps: two of them are played.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from megadsl.check.accesses import Access, Meet
from megadsl.check.areas import CONTROL, FINISHER, Stream
from megadsl.check.model import Device
from megadsl.check.report import Findings, shown
from megadsl.diagnostics import declare
from megadsl.ir.plan import Area
from megadsl.lower.memory import ABORT_BYTES, SEQUENCES_BYTES
from megadsl.lower.steps import progress_bytes
from megadsl.lower.windows import PLACE, own_windows
from megadsl.source import Span

RACE = declare(
    "MK510",
    "{op!r} {does} {area!r} in shared memory while other warps may still be {other} it",
    "let the block meet between the two: a barrier behind the first of them",
)
CLOBBERED = declare(
    "MK511",
    "{op!r} reads {area!r} in shared memory, where {other!r} has been written since",
    "give the two areas bytes of their own: lay only areas of different phases over each other",
)
UNWRITTEN = declare(
    "MK512", "{op!r} reads {area!r} in shared memory, which holds {holds}", "write what it needs in an instruction between the two"
)
OUTSIDE = declare(
    "MK513", "{op!r} touches bytes {begin} to {end} of shared memory, outside of {area!r}", "make the area as large as the op needs"
)
OVERLAP = declare(
    "MK514", "{a!r} and {b!r} lie over each other in shared memory, and both live as long as the launch", "give each bytes of its own"
)
LAYERS = 3
TURNS = 2  # steps of a launch


def check_memory(device: Device, findings: Findings) -> list[str]:
    """Every kind of block: no race, no clobbered area, nothing outside its area."""
    _overlaps(device, findings)
    _reserved(device, findings)
    _meetings(device, findings)
    kinds = block_kinds(device)
    count = 0
    for block in kinds:
        count += _play(device, block, findings)
    layers = min(LAYERS, device.plan.graph.layers)
    return [
        f"shared memory: {count} accesses of {len(kinds)} kinds of block over {layers} layers of {device.turns(TURNS)} steps: a barrier"
        " between every two in conflict",
        f"shared memory: {len(device.plan.areas)} areas, those that live as long as the launch apart from all others",
    ]


def block_kinds(device: Device) -> list[int]:
    """One block of each kind: equal shares of every op, and block 0."""
    seen: dict[tuple[object, ...], int] = {}
    counts = [_counts(device, *split) for split in _splits(device)]
    parts = [[tuple(last - first for _, first, last in p) for p in device.parts(op.name)] for op in device.ops[0]]
    for block in range(device.blocks):
        units = [len(range(block, device.heads(op.name).units, device.blocks)) for op in device.ops[1]]
        fresh = [_takes_fresh(device, op.name, block) for op in device.ops[1]]
        seen.setdefault((block == 0, *(c[block] for c in counts), *(p[block] for p in parts), *units, *fresh), block)
    return list(seen.values())


def _takes_fresh(device: Device, op: str, block: int) -> tuple[bool, ...]:
    heads = device.heads(op)
    return tuple(unit % heads.splits + 1 == heads.splits for unit in range(block, heads.units, device.blocks))


def _splits(device: Device) -> list[tuple[int, int, int]]:
    found = [(e.groups, e.share_offset, e.owners if e.dtype == "bf16" else device.blocks) for e in device.plan.exchanges]
    for op in device.ops[0]:
        m = device.matrix(op.name)
        found.append((m.shared, m.share_offset, device.blocks))
    for attention in device.ops[1]:
        heads = device.heads(attention.name)
        found.append((heads.merge_groups, heads.merge_offset, device.sharers(attention.name)))
    return list(dict.fromkeys(found))


def _counts(device: Device, groups: int, offset: int, sharers: int) -> list[int]:
    shares = device.shares(groups, offset, sharers)
    return [end - begin for begin, end in pairwise(shares)]


@dataclass
class _Last:
    """The last accesses to an area's bytes."""

    access: Access
    meetings: tuple[int, int]  # barriers passed by then: all of them, and those of all consumer warps
    order: int

    def apart(self, then: Access, meetings: tuple[int, int]) -> bool:
        """Whether a barrier of both stands between."""
        return self.meetings[1] != meetings[1] or (FINISHER not in (self.access.solo, then.solo) and self.meetings[0] != meetings[0])


def _play(device: Device, block: int, findings: Findings) -> int:
    """Accesses played."""
    count = 0
    meetings = (0, 0)
    last: dict[tuple[str, int, bool], _Last] = {}
    areas = {a.name: a for a in device.plan.areas}
    for event in Stream(device, block).events(min(LAYERS, device.plan.graph.layers), device.turns(TURNS)):
        if isinstance(event, Meet):
            meetings = (meetings[0] + 1, meetings[1] + (not event.team))
            continue
        count += 1
        _inside(event, areas, findings)
        begin, end = event.begin, event.begin + event.size
        touching = [found for found in last.values() if found.access.begin < end and begin < found.access.begin + found.access.size]
        for found in touching:
            if not found.apart(event, meetings) and _conflict(found.access, event):
                _race(found.access, event, block, findings)
        if not event.write:
            _contents(event, touching, block, findings)
        last[event.area, event.begin, event.write] = _Last(event, meetings, count)
    return count


def _conflict(first: Access, then: Access) -> bool:
    """Threads of one instruction write different bytes; ``own`` accesses follow the same thread's, ``solo`` ones the same warp's."""
    same = first.area == then.area and first.step.instr is then.step.instr and first.step.layer == then.step.layer
    if first.write and then.write and same:
        return False
    return (first.write or then.write) and not (then.own and same) and not (then.solo and first.solo == then.solo)


def _contents(read: Access, touching: list[_Last], block: int, findings: Findings) -> None:
    writes = [found for found in touching if found.access.write]
    if not writes:
        _unwritten(read, "nothing yet", block, findings)
        return
    newest = max(writes, key=lambda found: found.order).access
    if newest.area != read.area:
        rows = [
            (f"consumer of block {block}", [f"writes {newest.area}: {shown(newest.step.instr, newest.step.layer)}", ""]),
            ("the same block, later", ["", f"reads {read.area}: {shown(read.step.instr, read.step.layer)}"]),
        ]
        findings.add(CLOBBERED, read.step.instr.span, rows, op=read.step.instr.op, area=read.area, other=newest.area)
    elif newest.holds != read.holds:
        _unwritten(read, f"what was left there before: {shown(newest.step.instr, newest.step.layer)}", block, findings)


def _unwritten(read: Access, holds: str, block: int, findings: Findings) -> None:
    rows = [(f"consumer of block {block}", [f"holds {holds}", f"reads {read.area}: {shown(read.step.instr, read.step.layer)}"])]
    findings.add(UNWRITTEN, read.step.instr.span, rows, op=read.step.instr.op, area=read.area, holds=holds)


def _race(first: Access, then: Access, block: int, findings: Findings) -> None:
    def line(a: Access) -> str:
        return f"{'writes' if a.write else 'reads'} {a.area}: {shown(a.step.instr, a.step.layer)}"

    rows = [
        (f"consumer of block {block}, one warp", [line(first), "no barrier"]),
        ("consumer, another warp", ["", "no barrier", line(then)]),
    ]
    does, other = ("writes" if then.write else "reads"), ("writing" if first.write else "reading")
    findings.add(RACE, then.step.instr.span, rows, op=then.step.instr.op, area=first.area, does=does, other=other)


def _inside(a: Access, areas: dict[str, Area], findings: Findings) -> None:
    area = areas.get(a.area)
    end = a.begin + a.size
    if a.begin >= CONTROL:
        return
    if area is None or a.begin < area.offset or end > area.offset + area.bytes:
        rows = [
            ("consumer", [shown(a.step.instr, a.step.layer)]),
            (a.area, [f"{area.offset} to {area.offset + area.bytes}" if area else "-"]),
        ]
        findings.add(OUTSIDE, a.step.instr.span, rows, op=a.step.instr.op, area=a.area, begin=a.begin, end=end)


def _meetings(device: Device, findings: Findings) -> None:
    """Where ops tell windows of their own, each tells them in the word that the loaders look at."""
    if not own_windows(device.plan.schedule):
        return
    at = next(a.offset for a in device.plan.areas if a.name == "meeting")
    told = (r for r in device.plan.shape if r.type == "mk::i32" and r.name.endswith("_meeting"))
    words = {r.name: r.words[0] for r in told} | {"smem": device.records["smem"][6]}
    for name, word in words.items():
        place, window = word & ((1 << PLACE) - 1), word >> PLACE
        if place != at or window == 0:
            rows = [("consumer", [f"{name}: byte {place}, {window} units"]), ("loader", [f"byte {at}, 1 unit or more"])]
            span = device.plan.graph.span
            findings.add(OUTSIDE, span, rows, op="every role", what=name, area="meeting", begin=place, end=place + 4)


def _reserved(device: Device, findings: Findings) -> None:
    """Words that every role uses: the abort word with the deadline behind it, a gate per op, whether a meeting is ahead, the
    launch's steps."""
    areas = {a.name: a for a in device.plan.areas}
    for name, need in (
        ("abort", ABORT_BYTES),
        ("gates", 4 * len(device.plan.graph.ops)),
        ("meeting", 4),
        ("progress", progress_bytes(device.plan.graph, device.plan.schedule)),
        *([("sequences", SEQUENCES_BYTES)] if device.sequences > 1 else []),
    ):
        if areas[name].bytes < need:
            begin = areas[name].offset
            rows = [("every role", [f"uses {need} bytes"]), (name, [f"{areas[name].bytes} bytes"])]
            findings.add(OUTSIDE, device.plan.graph.span, rows, op="every role", what=name, area=name, begin=begin, end=begin + need)


def _overlaps(device: Device, findings: Findings) -> None:
    """Areas that are not laid over others on purpose have bytes of their own; the launch's bytes hold them all."""
    areas = [a for a in device.plan.areas if a.bytes]
    span: Span = device.plan.graph.span
    for index, a in enumerate(areas):
        for b in areas[index + 1 :]:
            apart = a.offset + a.bytes <= b.offset or b.offset + b.bytes <= a.offset
            if not apart and not (a.overlay and b.overlay):
                rows = [(a.name, [f"{a.offset} to {a.offset + a.bytes}"]), (b.name, [f"{b.offset} to {b.offset + b.bytes}"])]
                findings.add(OVERLAP, span, rows, what=f"{a.name}, {b.name}", a=a.name, b=b.name)
