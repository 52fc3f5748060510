"""Cost of a graph: what must be read, written and computed, and the time that HBM alone takes for it."""

from __future__ import annotations

from megadsl.ir.graph import Attention, Custom, Embed, Graph, Linear, Op, RowMap
from megadsl.machine import Machine
from megadsl.ops import attention, custom, embed, linear, map
from megadsl.ops.attention import kv_row_bytes
from megadsl.ops.base import Cost


def cost(op: Op, tokens: int, kv_len: int, layer: int = 0) -> Cost:
    """Cost of one run of ``op``, that of ``layer``, with ``tokens`` new tokens on top of ``kv_len`` cached rows."""
    match op:
        case Embed():
            return embed.cost(op, tokens)
        case RowMap():
            return map.cost(op, tokens)
        case Linear():
            return linear.cost(op, tokens)
        case Attention():
            return attention.cost(op, tokens, kv_len, layer)
        case Custom():
            return custom.cost(op, tokens)


def runs(graph: Graph, op: Op) -> int:
    """How often one launch runs ``op``: once per layer inside the loop, else once."""
    return graph.layers if op.loop else 1


def total_cost(graph: Graph, tokens: int, kv_len: int) -> Cost:
    """Cost of one launch."""
    return sum((cost(op, tokens, kv_len, layer) for op in graph.ops for layer in range(runs(graph, op))), Cost())


def floor_seconds(graph: Graph, machine: Machine, kv_len: int) -> float:
    """Least time of one launch in seconds: all weights and KV rows once through HBM at the machine's measured bandwidth."""
    return total_cost(graph, graph.tokens, kv_len).hbm_bytes / machine.bandwidth


def kv_bytes_per_token(graph: Graph) -> int:
    """Bytes that one cached token takes over all layers."""
    return sum(kv_row_bytes(op) * runs(graph, op) for op in graph.ops if isinstance(op, Attention))
