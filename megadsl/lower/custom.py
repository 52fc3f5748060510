"""A custom op: what a block does around the user's role function (templates/include/megadsl/custom.h), and the room that it takes.

Each block gathers the inputs' rows, all of them, into shared memory; its warps take the weights out of the ring, meet, and run the
function, which stages the features that the block owns; behind a barrier all of them publish. So the op is proved as ours are: the
function itself touches what it is given, between two barriers. What it does beyond that, the race detector sees.
"""

from __future__ import annotations

from collections.abc import Iterator

from megadsl.ir.graph import Custom, Embed, Op, RowMap
from megadsl.ir.plan import Instr, Region, Verb
from megadsl.lower.builder import Builder
from megadsl.lower.finish import finishers
from megadsl.lower.handoffs import gather, keep, publish
from megadsl.lower.operands import input_area, scratch_area, vectors
from megadsl.lower.packing import vector_name
from megadsl.lower.publish import staged
from megadsl.types import Level


def loads(op: Op) -> bool:
    """Whether some loader streams anything for the op."""
    return not isinstance(op, Embed | Custom | RowMap) or (isinstance(op, Custom) and bool(op.weights))


def custom_phase(builder: Builder, op: Custom, role: str) -> Iterator[Instr]:
    """The consumers' instructions."""
    if builder.gated(op):
        yield Instr(Verb.SIGNAL, "open_gate", op.name, op.span, writes=(Region("smem", f"gates.{op.name}", Level.BLOCK),))
    body = tuple(_operands(builder, op, role))
    areas = [input_area(op, arg) for arg, _ in op.inputs] + ([scratch_area(op)] if op.call.scratch else [])
    rows = tuple(Region("smem", area, Level.BLOCK) for area in areas)
    ring = Region("ring", builder.schedule.op(op.name).loader, Level.BLOCK)
    syncs = (*(("input",) if finishers(builder.schedule) else ()), "gathered", "computed")
    reads = (*rows[: len(op.inputs)], *((ring,) if op.weights else ()))
    writes, args = (*rows[len(op.inputs) :], staged()), {"custom": op, "ring": ring.name}
    yield Instr(Verb.COMPUTE, "custom", op.name, op.span, body[0].site, reads, writes, body=body, syncs=syncs, args=args)
    yield publish(builder, op, role, op.out)
    yield from keep(builder, op, op.out)


def _operands(builder: Builder, op: Custom, role: str) -> Iterator[Instr]:
    """The rows, then the weights; those have come through the ring long before."""
    for arg, ref in op.inputs:
        whole = ref.begin == 0 and ref.features == builder.graph.value(ref.value).features
        yield gather(builder, op, role, "gather", ref, input_area(op, arg), arg=arg, whole=whole, **builder.polls(ref, whole))
    ring = builder.schedule.op(op.name).loader
    for index, (arg, _) in enumerate(vectors(op)):
        site, reads = builder.site_of(role, op, arg), (Region("ring", ring, Level.BLOCK),)
        args = {"arg": arg, "record": vector_name(op, arg), "ahead": index, "ring": ring}
        yield Instr(Verb.WAIT, "wait_vector", op.name, op.span, site, reads, args=args)
    for _ in vectors(op):
        yield Instr(Verb.SIGNAL, "release_vector", op.name, op.span, args={"ring": ring})
