"""How an op's results leave a block: staged in shared memory as the vectors that travel, or word by word from registers.

Between the last sum and the store lie then no shared memory, no barrier and no load. A word is two neighbouring features; by Sentinel each
says by itself that it is there, since a reader looks at all four words of a vector. Where one warp finishes what the others multiply,
results wait for nothing else.
"""

from __future__ import annotations

from megadsl.diagnostics import Collector, collecting, declare
from megadsl.dsl.overrides import Overrides
from megadsl.ir.graph import Custom, Graph, Linear, Op
from megadsl.ir.plan import Region
from megadsl.ir.schedule import REGISTERS, Schedule
from megadsl.lower.builder import Builder, sequence
from megadsl.lower.direct import not_dense
from megadsl.lower.exchanges import kept_locally
from megadsl.lower.finish import finishers, why_block
from megadsl.types import Level

NOT_AT_ONCE = declare("MK247", "{op!r} cannot publish from registers: {why}", "{how}")


def check_publications(graph: Graph, schedule: Schedule, overrides: Overrides | None = None) -> None:
    """MK247, at the line of ``overrides``, for each op that is to publish from registers and cannot."""
    asked = overrides or Overrides(schedule.arch, ())
    with collecting() as found:
        for how in schedule.ops:
            if how.publish == REGISTERS:
                _check(graph, schedule, how.op, asked, found)


def _check(graph: Graph, schedule: Schedule, name: str, asked: Overrides, found: Collector) -> None:
    op = graph.op(name)
    if (refused := _why_staged(op, graph, schedule)) is not None:
        why, how = refused
        found.add(NOT_AT_ONCE, asked.said(op.span, "publish", name), op=name, why=why, how=how)


def _why_staged(op: Op, graph: Graph, schedule: Schedule) -> tuple[str, str] | None:
    """Why an op's results must be staged, and what would mend it; None where they need not."""
    if isinstance(op, Custom):
        return "its function stages them", 'use .publish("staged")'
    if not finishers(schedule):
        why = why_block(graph, schedule)
        return "no warp of its own finishes" + (f": {why}" if why else ""), 'use .publish("staged")' if why else 'use s.finish("warp")'
    if isinstance(op, Linear) and op.epilogue is not None and len(op.parts) > 1:
        return "its threads have single features, half a word each", 'use .publish("staged")'
    return not_dense(str(op.out), graph, schedule)


def staged() -> Region:
    """Where a block's results wait to be published."""
    return Region("smem", "staged", Level.BLOCK)


def by_words(builder: Builder, op: Op) -> bool:
    """Whether an op's results leave word by word."""
    return builder.schedule.op(op.name).publish == REGISTERS


def results_of(builder: Builder, op: Op) -> tuple[Region, ...]:
    """Where an op's results go: staged, or word by word to where they are read; both, where the block keeps them."""
    if op.out is None or not by_words(builder, op):
        return (staged(),)
    exchange = builder.exchange(op.out)
    sent = Region("exchange", op.out, exchange.level, sequence(builder, op.out, op.name, publishing=True))
    return (sent, staged()) if op.out in kept_locally(builder.graph, builder.schedule) else (sent,)
