"""How readers poll a value, where a schedule says so: what would change nothing is refused."""

from __future__ import annotations

from megadsl.diagnostics import Collector, collecting, declare
from megadsl.dsl.overrides import Overrides
from megadsl.ir.graph import Attention, Custom, Graph, Linear, Op, RowMap
from megadsl.ir.schedule import EdgeSchedule, Schedule
from megadsl.lower.exchanges import merges_in_cluster
from megadsl.lower.gathers import in_registers
from megadsl.lower.operands import prologue_values
from megadsl.lower.schedule import BAD_COUNT, LONGEST_PAUSE

NOT_POLLED = declare(
    "MK235",
    "{what} of {value!r} decides nothing: {why}",
    "leave it out{how}",
)
MOST_WIDTH = 16  # vectors of a thread: each is four registers and code


def check_edges(graph: Graph, schedule: Schedule, overrides: Overrides | None = None) -> None:
    """MK235 and MK166, at the line of ``overrides``."""
    asked = overrides or Overrides(schedule.arch, ())
    with collecting() as found:
        for edge in schedule.edges:
            _check_back_off(edge, graph, schedule, asked, found)
            _check_width(edge, graph, schedule, asked, found)


def _check_back_off(edge: EdgeSchedule, graph: Graph, schedule: Schedule, asked: Overrides, found: Collector) -> None:
    producer = graph.op(edge.producer)
    where = asked.said(producer.span, "back_off", edge.producer)
    if edge.back_off > LONGEST_PAUSE:
        what = f"back_off of {edge.value!r}, in nanoseconds,"
        found.add(BAD_COUNT, where, what=what, value=edge.back_off, low=0, high=LONGEST_PAUSE)
    if edge.back_off and edge.value != producer.out and isinstance(producer, Attention) and merges_in_cluster(producer, schedule):
        why, how = "its parts arrive in shared memory, where nobody polls them", ', or use .merge("exchange")'
        found.add(NOT_POLLED, where, what="back_off", value=edge.value, why=why, how=how)


def _check_width(edge: EdgeSchedule, graph: Graph, schedule: Schedule, asked: Overrides, found: Collector) -> None:
    if not edge.width:
        return
    producer = graph.op(edge.producer)
    where = asked.said(producer.span, "width", edge.producer)
    if edge.width > MOST_WIDTH:
        found.add(BAD_COUNT, where, what=f"width of {edge.value!r}", value=edge.width, low=0, high=MOST_WIDTH)
    if edge.value != producer.out:
        why, how = "parts are polled as they are added", ""
    elif not any(_gathers(op, edge.value, schedule) for op in graph.ops):
        why, how = "its readers poll what they multiply, into registers", ', or use .gather("shared") of a reader'
    else:
        return
    found.add(NOT_POLLED, where, what="width", value=edge.value, why=why, how=how)


def _gathers(op: Op, value: str, schedule: Schedule) -> bool:
    """Whether an op gathers the value into shared memory, by all threads of a block."""
    match op:
        case Linear():
            return not in_registers(op, schedule) and any(ref.value == value for _, ref in prologue_values(op))
        case Attention():
            return not in_registers(op, schedule) and op.q.value == value
        case RowMap():
            return op.reduced[1].value == value
        case Custom():
            return any(ref.value == value for _, ref in op.inputs)
    return False
