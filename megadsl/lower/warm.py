"""The kernel's own code, read ahead: when a launch begins, lanes that have nothing else to do ask L2 for it.

Code that no SM has run lately comes from L2 or from HBM, wherever the streams of weights have left it. A line of it is prefetched as
data, to be evicted last; nobody waits for it, and no result depends on it. How many bytes it has is known when it is compiled: the runtime
fills that word in (runtime/cuda.py).
"""

from __future__ import annotations

from megadsl.diagnostics import collecting, declare
from megadsl.dsl.overrides import Overrides
from megadsl.ir.graph import Graph
from megadsl.ir.plan import Instr, Record, Region, Verb
from megadsl.ir.schedule import WHOLE, Schedule
from megadsl.lower.schedule import BAD_COUNT
from megadsl.types import Level

NOT_WARM = declare(
    "MK234",
    "the code is read ahead by {role!r}, but a launch is one {launch}",
    'leave s.warm_code(...) out, or use s.launch("step")',
)
CODE = "code"  # Shape's member


def check_warm_up(graph: Graph, schedule: Schedule, overrides: Overrides | None = None) -> None:
    """MK234 and MK166, at the line of ``overrides``."""
    asked = overrides or Overrides(schedule.arch, ())
    with collecting() as found:
        if schedule.warm_up is not None and schedule.scope != "step":
            found.add(NOT_WARM, asked.said(graph.span, "warm_up"), role=schedule.warm_up, launch=schedule.scope)
        if schedule.warm_blocks is not None and schedule.warm_blocks > schedule.blocks:
            where, most = asked.said(graph.span, "warm_blocks"), schedule.blocks
            found.add(BAD_COUNT, where, what="the number of blocks that read the code", value=schedule.warm_blocks, low=1, high=most)


def warm_up(graph: Graph, schedule: Schedule, role: str) -> tuple[Instr, ...]:
    """What a role begins with."""
    if schedule.warm_up != role:
        return ()
    return (Instr(Verb.PREFETCH, "warm_code", graph.name, graph.span, reads=(Region("code", graph.name, Level.GPU),)),)


def code_shape(schedule: Schedule) -> list[Record]:
    """mk::CodeShape. Its bytes are 0 until the kernel is compiled: then nothing is read."""
    if schedule.warm_up is None:
        return []
    words = (0, warm_blocks(schedule), int(schedule.warm_part == WHOLE), schedule.warm_every)
    return [Record("mk::CodeShape", CODE, words, "the kernel's own code, read ahead")]


def code_word(shape: tuple[Record, ...]) -> int | None:
    """Which of all words of Shape are those bytes; None for a kernel that does not read its code."""
    before = 0
    for record in shape:
        if record.name == CODE:
            return before
        before += len(record.words)
    return None


def warm_blocks(schedule: Schedule) -> int:
    """How many blocks read it."""
    return schedule.blocks if schedule.warm_blocks is None else schedule.warm_blocks
