"""What today's kernels can run of a graph; anything else is refused here, with the user's line."""

from __future__ import annotations

from megadsl.diagnostics import Collector, collecting, declare
from megadsl.dsl.overrides import Overrides
from megadsl.expr import to_text
from megadsl.ir.expr import arg_names, reductions
from megadsl.ir.graph import Attention, Embed, Graph, Linear, Op, RowMap, ValueRef
from megadsl.ir.schedule import Schedule
from megadsl.ir.verify_graph import reads
from megadsl.lower.operands import prologue_values, vectors
from megadsl.lower.packing import OFFSET_UNIT
from megadsl.lower.shape import CHUNK_ROWS, kv_bytes, kv_strides
from megadsl.lower.tiling import GROUP_ROWS
from megadsl.types import ceil_div

OPERANDS = declare(
    "MK171",
    "{op!r} reads {count} activations through one expression; a prologue gathers at most 2",
    "let two of them be rows of one linear, mk.linear(x, w_a, w_b), whose epilogue combines them with values from before it",
)
PARTS = declare(
    "MK172",
    "the expression after {op!r} combines {count} matrices row by row; at most 2 can be folded",
    "combine two of them, pass the result through another mk.linear, and combine that one's output with the third",
)
SPREAD = declare("MK173", "queries, keys and values of {op!r} come from different linears", "compute them in one linear of several weights")
ROPE_DIMS = declare(
    "MK174", "rotary heads of {count} different kinds in one kernel", "use one head_dim, theta, scaling and style for all attention ops"
)
UNALIGNED = declare(
    "MK159",
    "{op!r} reads {value!r} from feature {begin} on, which is no multiple of 8",
    "give every weight of that linear a multiple of 8 rows, or compute the parts in linears of their own",
)
CARRIED = declare(
    "MK175", "the loop-carried value {value!r} begins as the result of {op!r}, which is no embedding", "start the loop from mk.embed(...)"
)
EMBEDS = declare(
    "MK225", "{op!r} is an embedding, but not the first op of the kernel", "embed the tokens once, first, and use that tensor again"
)
TOO_FAR = declare("MK212", "{what} take {need} bytes, a kernel reaches {most}", "{how}")
ROW_MAP = declare(
    "MK258",
    "{op!r} is a value by itself, and one of its reductions, {reduction}, {what}",
    "reduce over one value alone; compute what is inside in a linear, or let an expression that only linears read reduce it",
)
OUTER = declare("MK176", "{op!r} is an attention outside mk.layers", "put it inside the layer loop")


ARENA_BYTES = OFFSET_UNIT << 32  # the device counts an arena in 32 bits of 16-byte units
RUN_BYTES = 1 << 32  # and what a block streams of it at a stretch in bytes


def check_arenas(graph: Graph, schedule: Schedule, weights: int, overrides: Overrides | None) -> None:
    """MK212 for each arena that offsets would not reach the end of; ``weights`` are bytes."""
    asked = overrides or Overrides(schedule.arch, ())
    cached = kv_bytes(graph, schedule)
    with collecting() as found:
        if weights > ARENA_BYTES:
            found.add(TOO_FAR, graph.span, what="the packed weights", need=weights, most=ARENA_BYTES, how="use fewer or narrower layers")
        if cached > ARENA_BYTES:
            where, most = asked.said(graph.span, "max_kv"), schedule.max_kv * ARENA_BYTES // cached
            how = f"use a max_kv of at most {most}"
            if schedule.page_rows:
                how = f"use at most {schedule.pool_pages * ARENA_BYTES // cached} KV pages"
            found.add(TOO_FAR, where, what="the caches", need=cached, most=ARENA_BYTES, how=how)
        for op in graph.ops:
            if isinstance(op, Attention) and not schedule.page_rows:  # pages are copied one by one
                head, splits = kv_strides(op, schedule)[0], schedule.op(op.name).splits
                longest = ceil_div(head, splits) + CHUNK_ROWS * op.cache_dim * 4
                if longest >= RUN_BYTES:
                    where, what = asked.said(asked.said(op.span, "max_kv"), "splits", op.name), f"the rows of a split of {op.name!r}"
                    how = f"use .split(kv={head // RUN_BYTES + 2}), or a smaller max_kv"
                    found.add(TOO_FAR, where, what=what, need=longest, most=RUN_BYTES - 1, how=how)


def check_graph(graph: Graph) -> None:
    """Every finding at once."""
    with collecting() as found:
        for op in graph.ops:
            _check_op(op, found)
        for op in graph.ops[1:]:  # what an embedding stages overwrites what the op before it still publishes
            if isinstance(op, Embed):
                found.add(EMBEDS, op.span, op=op.name)
        for value in graph.values:
            if value.initial is not None and not isinstance(graph.op(value.initial), Embed):
                found.add(CARRIED, value.span, value=value.name, op=value.initial)
        kinds = {op.rope for op in graph.ops if isinstance(op, Attention) and op.rope is not None}
        if len(kinds) > 1:
            found.add(ROPE_DIMS, graph.span, count=len(kinds))


def _check_op(op: Op, found: Collector) -> None:
    if isinstance(op, Linear):
        _check_linear(op, found)
    elif isinstance(op, RowMap):
        _check_map(op, found)
    elif isinstance(op, Attention):
        if len({op.q.value, op.k.value, op.v.value}) > 1:
            found.add(SPREAD, op.span, op=op.name)
        if op.loop is None:
            found.add(OUTER, op.span, op=op.name)
    for ref in reads(op):
        if ref.begin % GROUP_ROWS:
            found.add(UNALIGNED, op.span, op=op.name, value=ref.value, begin=ref.begin)


def _check_map(op: RowMap, found: Collector) -> None:
    for reduce in op.reductions:
        what = _wrong(op, set(arg_names(reduce.operand)), bool(reductions(reduce.operand)))
        if what:
            found.add(ROW_MAP, op.span, op=op.name, reduction=to_text(reduce), what=what)
            return


def _wrong(op: RowMap, names: set[str], nested: bool) -> str:
    """What is wrong with a reduction over ``names``; "" where nothing is."""
    if nested:
        return "contains another one"
    if not names <= {name for name, ref in op.fused.args if isinstance(ref, ValueRef)}:
        return "reads a vector"
    if len(names) > 1:
        return "is over several values"
    return "" if names == {op.reduced[0]} else f"is over another value than {op.reduced[0]!r}"


def _check_linear(op: Linear, found: Collector) -> None:
    if len(prologue_values(op)) > 2:
        found.add(OPERANDS, op.span, op=op.name, count=len(prologue_values(op)))
    if op.epilogue is not None and len(op.parts) > 2:
        found.add(PARTS, op.span, op=op.name, count=len(op.parts))
    assert all(ref.shape[0] == op.columns for _, ref in vectors(op))
