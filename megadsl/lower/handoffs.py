"""What ops of all kinds do with values: publish their own, keep a share of it, gather others'."""

from __future__ import annotations

from collections.abc import Iterator

from megadsl.ir.graph import Attention, Custom, Embed, Linear, Op, RowMap, ValueRef
from megadsl.ir.plan import Instr, Region, Verb
from megadsl.lower.builder import Builder, sequence
from megadsl.lower.exchanges import kept_locally, merge_lanes, merges_in_cluster
from megadsl.lower.finish import finishers
from megadsl.lower.publish import by_words, staged
from megadsl.lower.threads import WARP_THREADS
from megadsl.lower.tiling import tiling
from megadsl.types import Level


def publish(builder: Builder, op: Op, role: str, value: str) -> Instr:
    """Sends what the op has staged of ``value``, or where it leaves word by word, empties the slot for a later round."""
    exchange = builder.exchange(value)
    site = builder.site(role, op.name, "publish", "", op.span)
    round_ = sequence(builder, value, op.name, publishing=True)
    args: dict[str, object] = {"value": value, "wire": exchange.wire, "round": round_}
    into = Region("exchange", value, exchange.level, round_)
    alone = stages_alone(builder, op)
    syncs = ("flag",) if exchange.wire == "Flag" else ("done",) if alone and not finishers(builder.schedule) else ()
    # table: of those who multiply, who also publish it; raw: bits that nobody vouches for, rather than results of conversions
    raw = isinstance(op, Custom) or (isinstance(op, Embed) and op.expr is None)
    args |= {"solo": alone, "table": staged_by_all(op), "raw": raw}
    args |= {"cluster": isinstance(op, Attention) and merges_in_cluster(op, builder.schedule)}
    args |= {"words": by_words(builder, op), "kept": value in kept_locally(builder.graph, builder.schedule)}
    reads = () if args["words"] and not args["kept"] else (staged(),)
    return Instr(Verb.SIGNAL, "publish", op.name, op.span, site, reads, (into,), syncs=syncs, args=args)


def staged_by_all(op: Op) -> bool:
    """Whether those who multiply stage an op's results, rather than whoever finishes partial sums or splits."""
    return isinstance(op, Embed | Custom)


def stages_alone(builder: Builder, op: Op) -> bool:
    """Whether a block's first warp ends up with all of an op's results: it then publishes them alone, before the block meets.

    A flag stands for what all warps have stored: it needs a barrier in between anyway.
    """
    if staged_by_all(op) or op.out is None or builder.exchange(op.out).wire == "Flag":
        return False
    if finishers(builder.schedule):
        return True
    units = builder.exchange(op.out).units
    if isinstance(op, RowMap):
        return units * 4 <= WARP_THREADS  # mk::finish_rows: a thread for each pair of features
    if not isinstance(op, Linear):
        assert isinstance(op, Attention)
        return units * merge_lanes(op, builder.graph.tokens, builder.schedule)[0] <= WARP_THREADS
    if builder.schedule.op(op.name).ways > 1:
        return units * tiling(op).fold * 2 <= WARP_THREADS  # mk::add_parts: four rows of a token each
    return 4 * builder.graph.tokens * builder.schedule.batch <= WARP_THREADS  # mk::finish_batch: four pairs of rows a group


def end_meetings(builder: Builder, op: Op) -> tuple[str, ...]:
    """The block's meeting behind an op's results, where one warp does not have them all."""
    alone = op.out is None or stages_alone(builder, op) or finishers(builder.schedule) > 0
    return () if alone else ("end",)


def keep(builder: Builder, op: Op, value: str) -> Iterator[Instr]:
    """Keeps the block's share of ``value`` where a later op adds to it."""
    if value in kept_locally(builder.graph, builder.schedule):
        kept = Region("smem", f"kept.{value}", Level.BLOCK)
        args = {"value": value, "table": staged_by_all(op)}
        yield Instr(Verb.STORE, "keep", op.name, op.span, None, (staged(),), (kept,), args=args)


def gather(builder: Builder, op: Op, role: str, call: str, ref: ValueRef, into: str, **args: object) -> Instr:
    """Waits for a value, or for features of it, and takes them ``into`` an area or the warps' registers."""
    exchange = builder.exchange(ref.value)
    round_ = sequence(builder, ref.value, op.name)
    site = builder.site(role, op.name, "exchange", f"tag of {ref.value} in round {round_}", op.span)
    region = Region("exchange", ref.value, exchange.level, round_)
    found = {"value": ref.value, "wire": exchange.wire, "round": round_, "begin": ref.begin, "features": ref.features, "into": into, **args}
    to = Region("registers", f"{op.name}.input", Level.WARP) if into == "registers" else Region("smem", into, Level.BLOCK)
    return Instr(Verb.WAIT, call, op.name, op.span, site, (region,), (to,), args=found)
