"""Which ops poll their input straight into registers (templates/include/megadsl/direct.h, wide.h, heads.h).

A gather into shared memory costs a store, a barrier and a load between the last vector and the first product. Where a lane's part
of the columns is a few vectors, it can poll them itself. With more than a few tokens, activations are most of what the products would load
from shared memory, and take the ring's room there: then registers hold as many columns at a time as they have room for.
"""

from __future__ import annotations

from dataclasses import replace

from megadsl.diagnostics import Collector, collecting, declare
from megadsl.dsl.overrides import Overrides
from megadsl.ir.expr import Arg
from megadsl.ir.graph import Attention, Custom, Graph, Linear, Op
from megadsl.ir.schedule import REGISTERS, SHARED, Schedule, Sentinel
from megadsl.lower.exchanges import sharing
from megadsl.lower.gathers import FEW_TOKENS, wide_registers
from megadsl.lower.memory import chunk_pieces
from megadsl.lower.operands import prologue_values, takes_chunks
from megadsl.lower.tiling import PANEL, tiling
from megadsl.types import ceil_div

NOT_DIRECT = declare("MK244", "{op!r} cannot gather its input into registers: {why}", "{how}")

MOST_ROWS, MOST_DIM = 8, 128  # of an attention's queries: the N of an mma; and what registers hold of a head
MOST_PARTS = 8  # vectors that a lane polls at once, four registers each
DEFAULT_PARTS = 6  # more, and the gather's fixed cost is no longer what counts
MOST_REGISTERS = 128  # of a lane, for the input of more than a few tokens: beside it lie sums and weights


def choose_gathers(graph: Graph, schedule: Schedule, overrides: Overrides | None = None) -> Schedule:
    """``schedule`` with a way of gathering for every op. MK244, at the line of ``overrides``, for what no block can do."""
    asked = overrides or Overrides(schedule.arch, ())
    chosen = []
    with collecting() as found:
        for how in schedule.ops:
            op, gather = graph.op(how.op), how.gather
            if gather is None:
                gather = SHARED if why_shared(op, graph, schedule) or not _is_small(op, graph, schedule) else REGISTERS
            elif gather == REGISTERS:
                _check(graph, schedule, how.op, asked, found)
            chosen.append(replace(how, gather=gather))
    return replace(schedule, ops=tuple(chosen))


def _is_small(op: Op, graph: Graph, schedule: Schedule) -> bool:
    """Whether what a gather takes apart from its bytes counts: of an attention, in a loop of such linears. Of more than a few tokens, what
    products load counts."""
    if graph.tokens > FEW_TOKENS:
        return True
    if isinstance(op, Attention) and op.maps:
        return True  # maps of heads in shared memory cost two more barriers
    linears = [op] if isinstance(op, Linear) else [o for o in graph.ops if isinstance(o, Linear) and o.loop == op.loop]
    return all(lane_parts(o, schedule) <= DEFAULT_PARTS for o in linears)


def lane_parts(op: Linear, schedule: Schedule) -> int:
    """Vectors of the input that a lane holds."""
    tiles = tiling(op)
    return tiles.pieces * ceil_div(tiles.tile_columns // PANEL, schedule.consumer.warps)


def why_shared(op: Op, graph: Graph, schedule: Schedule) -> tuple[str, str] | None:
    """Why an op must gather into shared memory, and what would mend it; None where it need not."""
    match op:
        case Linear():
            return _why_linear(op, graph, schedule)
        case Attention():
            return _why_attention(op, graph, schedule)
        case Custom():
            return "its function reads rows in shared memory", 'use .gather("shared")'
        case _:
            return "it gathers nothing", "use it for linears and attention"


def not_dense(name: str, graph: Graph, schedule: Schedule) -> tuple[str, str] | None:
    """Why a value's units do not lie in the order of its features, and what would mend it; None where they do."""
    value = graph.value(name)
    share = sharing(graph.op(value.producer), value.features, schedule)
    if share.groups < share.blocks or not isinstance(schedule.edge(name).sync, Sentinel):
        return f"{name!r} is not dense", f"use mk.Sentinel() for it and at most {share.groups} blocks"
    return None


def _why_attention(op: Attention, graph: Graph, schedule: Schedule) -> tuple[str, str] | None:
    rows = op.heads // op.kv_heads
    if graph.tokens > 1 or rows > MOST_ROWS or op.head_dim > MOST_DIM:
        shape = f"{graph.tokens} tokens, {rows} heads of {op.head_dim} on a KV head"
        return shape, f"use it for 1 token and at most {MOST_ROWS} heads of at most {MOST_DIM}"
    if len({op.q.value, op.k.value, op.v.value}) > 1:
        return "queries, keys and values are several values", "let one linear give all of them"
    return not_dense(op.q.value, graph, schedule)


def _why_linear(op: Linear, graph: Graph, schedule: Schedule) -> tuple[str, str] | None:
    values = prologue_values(op)
    plain = isinstance(op.prologue.expr, Arg) and op.prologue.expr.name == values[0][0]
    if len(values) != 1 or not (plain or op.factored is not None):
        return "its prologue is neither one value nor factored", 'use .gather("shared")'
    if graph.tokens > FEW_TOKENS:
        return not_dense(values[0][1].value, graph, schedule) or _why_wide(op, graph, schedule)
    if schedule.op(op.name).ways > 1 or chunk_pieces(op, graph, schedule) != tiling(op).pieces:
        return "it takes its columns in parts", "use .columns(ways=1) and no chunks"
    if found := not_dense(values[0][1].value, graph, schedule):
        return found
    if lane_parts(op, schedule) > MOST_PARTS:
        return f"a lane would poll {lane_parts(op, schedule)} vectors", f"use it for at most {MOST_PARTS}, or more consumer warps"
    return None


def _why_wide(op: Linear, graph: Graph, schedule: Schedule) -> tuple[str, str] | None:
    how = replace(schedule, ops=tuple(replace(o, gather=REGISTERS) if o.op == op.name else o for o in schedule.ops))
    pieces, each = chunk_pieces(op, graph, how), wide_registers(op, how, graph.tokens)
    if pieces * each > MOST_REGISTERS:
        most = MOST_REGISTERS // each
        mend = f"use chunks of at most {most} tiles" if most and takes_chunks(op, how) else "use fewer tokens, or more consumer warps"
        return f"a lane would hold its input of {graph.tokens} tokens in {pieces * each} registers", mend
    return None


def _check(graph: Graph, schedule: Schedule, name: str, asked: Overrides, found: Collector) -> None:
    op = graph.op(name)
    why = why_shared(op, graph, schedule)
    if why is not None:
        found.add(NOT_DIRECT, asked.said(op.span, "gather", name), op=name, why=why[0], how=why[1])
