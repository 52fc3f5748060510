"""Steps of several launches: what a launch may do before the one before has ended, and what it may expect to find.

A launch begins while the one before still works, and the one before that may still be ending. So until it has waited (join_launch) a
role may touch only what no launch writes: weights, and its own block's shared memory and registers. Those do not outlive a launch, and
its rings begin anew: shared memory and rings of each launch are proved as those of a program of its own. Behind the join all that
earlier launches did is over; the exchanges' proofs know it as a meeting of all blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megadsl.check.memory import check_memory
from megadsl.check.model import Device
from megadsl.check.report import Findings, shown
from megadsl.check.ring import check_rings
from megadsl.diagnostics import declare
from megadsl.ir.plan import Instr, Item, Phase, Plan
from megadsl.lower.launches import AWAIT, JOIN, Launch, items, launches
from megadsl.lower.programs import instructions

BEFORE = declare(
    "MK560",
    "{op!r} touches {what} before its launch has waited for the one before",
    "move the access behind join_launch: before it, a role may read weights alone",
)
_CONSTANT, _LOCAL = frozenset({"weights"}), frozenset({"smem", "registers", "ring"})


def check_launches(device: Device, findings: Findings) -> list[str]:
    """Each launch alone: its accesses before the join, what it finds in its block, its rings."""
    found = launches(device.plan)
    for launch in found:
        for role, parts in (*launch.loads, ("consumer", launch.parts)):
            _early(role, [instr for part in parts for instr in part.phase.body], findings)
        own = Device(alone(device.plan, launch))
        check_memory(own, findings)
        check_rings(own, findings)
    return [
        f"launches: {len(found)} kernels: each reads weights alone before the launch before it has ended, finds in its block what it has"
        " written itself, and takes all that it loads"
    ]


def alone(plan: Plan, launch: Launch) -> Plan:
    """A plan whose step is this launch."""
    bodies: dict[str, tuple[Item, ...]] = {p.role: () for p in plan.programs}
    bodies.update({role: items(parts) for role, parts in launch.loads})
    bodies[next(p.role for p in plan.programs if p.kind == "consumer")] = items(launch.parts)
    return replace(plan, programs=tuple(replace(p, body=bodies[p.role]) for p in plan.programs))


def _all(body: Iterable[Instr]) -> list[Instr]:
    return list(instructions([Phase("", "", instr.span, (instr,)) for instr in body]))


def _early(role: str, body: Sequence[Instr], findings: Findings) -> None:
    joined = False
    for instr in body:
        joined = joined or instr.call in (JOIN, AWAIT)
        for each in _all((instr,)):
            for region in () if joined else (*each.reads, *each.writes):
                if region.space not in _CONSTANT | _LOCAL or (region.space in _CONSTANT and region in each.writes):
                    rows = [(role, [shown(each), "joins later, or never"]), ("launch before", ["still works"])]
                    findings.add(BEFORE, each.span, rows, op=each.op, what=f"{region.space}.{region.name}")
