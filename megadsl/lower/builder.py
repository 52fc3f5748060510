"""What the programs of all roles are built with: the numbers of their sites, the rounds of their values, the forms of their polls."""

from __future__ import annotations

from dataclasses import dataclass, field

from megadsl.ir.graph import Custom, Embed, Graph, Linear, Op, RowMap, ValueRef
from megadsl.ir.plan import Exchange, Site
from megadsl.ir.schedule import Schedule
from megadsl.lower.memory import copies_vectors
from megadsl.lower.threads import WARP_THREADS
from megadsl.lower.tiling import GROUP_ROWS
from megadsl.source import Span
from megadsl.types import ceil_div

MAX_UNITS = 5  # 16-byte loads per thread: more would cost registers, and code for each
MAX_DENSE_UNITS = 8  # where their addresses are constant steps


@dataclass
class Builder:
    """Numbers sites while the programs are built, in program order: ids are stable for a given plan."""

    graph: Graph
    schedule: Schedule
    exchanges: tuple[Exchange, ...]
    chunks: dict[str, int]  # tiles per row group between two gathers of activations, by linear
    sites: list[Site] = field(default_factory=list)
    full: dict[tuple[str, str], int] = field(default_factory=dict)

    def site(self, role: str, op: str, kind: str, expects: str, span: Span) -> int:
        self.sites.append(Site(len(self.sites), role, op, kind, expects, span))
        return len(self.sites) - 1

    def exchange(self, name: str) -> Exchange:
        return next(e for e in self.exchanges if e.name == name)

    def position(self, op: str) -> int:
        return next(i for i, o in enumerate(self.graph.ops) if o.name == op)

    def polls(self, ref: ValueRef, whole: bool) -> dict[str, int]:
        """Units and extra vectors that a thread polls together while it gathers ``ref``: all of them, up to a limit, in equal rounds;
        whether units lie densely, and whether all threads then have as many (mk::DensePoll)."""
        exchange = self.exchange(ref.value)
        threads = self.schedule.consumer.warps * WARP_THREADS
        units = ceil_div(ref.features, GROUP_ROWS) * self.graph.tokens
        if whole and exchange.groups < exchange.owners and exchange.wire != "Tagged":
            units += exchange.owners  # blocks that own nothing are asked for their presence
        dense = exchange.dense
        each = max(1, ceil_div(units, threads))
        most = self.schedule.edge(ref.value).width or (MAX_DENSE_UNITS if dense else MAX_UNITS)
        at_once = ceil_div(each, ceil_div(each, most))
        share = ceil_div(ref.features * exchange.owners, self.graph.value(ref.value).features) + 3
        extras = min(exchange.owners, share) * (exchange.vectors - exchange.units)
        rounds = ceil_div(units, threads * at_once)
        return {
            "units": at_once,
            "extras": max(1, ceil_div(extras, threads * rounds)),
            "dense": dense,
            "even": units == rounds * threads * at_once,
            "rounds": rounds,
        }

    def site_of(self, role: str, op: Op, arg: str = "") -> int:
        """Where the consumers wait for the stages of a linear's tiles, or of one of its vectors: numbered at the first call."""
        key = (op.name, arg)
        if key not in self.full:
            self.full[key] = self.site(role, op.name, "ring.full", "parity of the stage's round", op.span)
        return self.full[key]

    def held(self, op: Op) -> int:
        """Tiles (of an attention: chunks of each warp) that the consumers take before the op's input is there."""
        return self.schedule.op(op.name).prefetch.registers or 0

    def copies(self, op: Linear) -> bool:
        """Whether the op's vectors leave the ring before its input comes."""
        return copies_vectors(op, self.graph, self.schedule)

    def gated(self, op: Op) -> bool:
        loaded = bool(op.weights) if isinstance(op, Custom) else not isinstance(op, Embed | RowMap)
        return loaded and not self.schedule.op(op.name).prefetch.smem


def sequence(builder: Builder, value: str, reader: str, *, publishing: bool = False) -> str:
    """The value's round, as an expression over ``epoch``, ``layers`` and ``layer``, where ``reader`` reads or writes it.

    Rounds of one value are consecutive from launch to launch, so slots alternate without gaps.
    """
    graph = builder.graph
    found = next((v for v in graph.values if v.name == value), None)
    producer = graph.op(found.producer if found else value.rsplit(".", 1)[0])
    if producer.loop is None:
        return "epoch"
    inside = graph.op(reader).loop is not None
    if found is None or found.initial is None:
        return "epoch * layers + layer" if inside else "epoch * layers + layers - 1"
    base = "epoch * (layers + 1)"
    if not inside:
        return base if builder.position(reader) < builder.position(producer.name) else f"{base} + layers"
    after = publishing or builder.position(reader) > builder.position(producer.name)
    return f"{base} + layer + 1" if after else f"{base} + layer"
