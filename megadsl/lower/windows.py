"""What may be in flight while blocks meet, where it differs from op to op.

A block's consumers tell its loaders, in one word of shared memory, that they are about to meet others: from the last tiles of an op until
the next one's input is there. Where some op has a window of its own that word also says how much may be in flight until then: the op
that ends knows whose input comes next. What ends without tiles of its own to tell by, an attention or a map of rows, passes the word on
as it is; the op behind it then says its own when it begins.
"""

from __future__ import annotations

from megadsl.ir.graph import Embed, Graph, Linear, Op
from megadsl.ir.plan import Record, ident
from megadsl.ir.schedule import Schedule
from megadsl.types import ceil_div

UNIT = 128  # bytes; mk::kWindowUnit
PLACE = 18  # bits for an offset in shared memory, below the window; mk::kMeetingPlace
RINGS_OWN = 1  # in place of a window: the loader's ring has it


def own_windows(schedule: Schedule) -> bool:
    """Whether some op has a window of its own."""
    return any(o.meeting_window for o in schedule.ops)


def meeting_word(offset: int, window: int) -> int:
    """Where the consumers tell it, and what: mk::Block::meeting. ``window`` in bytes, 0 for the ring's."""
    assert 0 <= offset < 1 << PLACE
    return offset | (RINGS_OWN + (max(1, window // UNIT) if window else 0)) << PLACE


def following(graph: Graph, op: Op) -> Op | None:
    """Whose input is met for behind ``op``; of the loop's last op, its first one, as in all layers but one."""
    ops = graph.ops
    at = ops.index(op)
    inside = [o for o in ops if o.loop == op.loop]
    if op.loop is not None and inside[-1] is op:
        return inside[0]
    return ops[at + 1] if at + 1 < len(ops) else None


def begins_late(graph: Graph, op: Op) -> Op | None:
    """The op before ``op``, where that leaves the word as it was told before it; else None."""
    found = [o for o in graph.ops if following(graph, o) is op and o.loop == op.loop]
    before = found[-1] if found else None
    return None if before is None or isinstance(before, Embed | Linear) else before


def meeting_records(graph: Graph, schedule: Schedule, offset: int) -> list[Record]:
    """For each op, the word that it tells where its tiles end."""
    found: list[Record] = []
    for op in graph.ops if own_windows(schedule) else ():
        if isinstance(op, Embed):
            continue
        behind = following(graph, op)
        window = schedule.op(behind.name).meeting_window if behind is not None else 0
        found.append(Record("mk::i32", meeting_member(op.name), (meeting_word(offset, window),), _comment(behind, window)))
    return found


def meeting_member(op: str) -> str:
    return f"{ident(op)}_meeting"


def _comment(behind: Op | None, window: int) -> str:
    size = f"{ceil_div(window, 1024)} KiB" if window else "the ring's window"
    return f"{size} in flight until the input of {behind.name} is there" if behind is not None else "the ring's window behind the last op"
