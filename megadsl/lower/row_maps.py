"""The phase of a map of rows: every block gathers the value that is reduced, and makes the features that it owns (rows.h)."""

from __future__ import annotations

from collections.abc import Iterator

from megadsl.ir.graph import RowMap, kept_values
from megadsl.ir.plan import Instr, Region, Verb
from megadsl.lower.builder import Builder
from megadsl.lower.exchanges import is_local
from megadsl.lower.finish import finishers
from megadsl.lower.handoffs import end_meetings, gather, keep, publish
from megadsl.lower.operands import vectors
from megadsl.lower.packing import vector_name
from megadsl.lower.publish import results_of
from megadsl.types import Level


def row_map(builder: Builder, op: RowMap, role: str) -> Iterator[Instr]:
    """What the consumers do. Reductions run over what arrives in registers; where a warp finishes, it makes the block's own features."""
    for index, (name, ref) in enumerate(kept_values(op)):
        if not is_local(op, ref, builder.graph, builder.schedule):
            yield gather(builder, op, role, "gather_kept", ref, "kept", arg=name, index=index, own=op.out)
    name, ref = op.reduced
    whole = ref.begin == 0 and ref.features == builder.graph.value(ref.value).features
    inner = gather(builder, op, role, "gather", ref, "scalars", arg=name, whole=whole, **builder.polls(ref, whole))
    apart = ("gathered",) if builder.exchange(ref.value).wire == "Tagged" else ()  # last elements are added behind all others
    input_ = ("input",) if finishers(builder.schedule) else ()
    reads = tuple(Region("weights", vector_name(op, arg), Level.GPU) for arg, _ in vectors(op))
    syncs, args = (*input_, *apart, "partials", *end_meetings(builder, op)), {"map": op}
    yield Instr(Verb.COMPUTE, "row_map", op.name, op.span, None, reads, results_of(builder, op), "1", (inner,), syncs, args)
    yield publish(builder, op, role, op.out)
    yield from keep(builder, op, op.out)
