"""embed: one table row per token id."""

from __future__ import annotations

from megadsl.diagnostics import Collector, declare
from megadsl.ir import graph
from megadsl.ir.spec import Node, Tensor
from megadsl.ops.base import Cost, Family, Outline, shape_text
from megadsl.types import DType

EMBED_TABLE = declare(
    "MK110",
    "embed: the table {table!r} has shape {shape}, but a table is [vocabulary, features]",
    "declare it with two dimensions: mk.weight({table!r}, (vocab_size, hidden_size))",
)
EMBED_IDS = declare(
    "MK111",
    "embed: {tensor!r} is {dtype} of shape {shape}, but token ids are i32 of shape [tokens]",
    "pass mk.input_ids(tokens) as the second argument",
)


def _outline(node: Node, inputs: tuple[Tensor, ...], found: Collector) -> tuple[Outline, ...]:
    ids, table = inputs
    if ids.dtype is not DType.I32 or len(ids.shape) != 1:
        found.add(EMBED_IDS, node.span, tensor=ids.name, dtype=ids.dtype.value, shape=shape_text(ids.shape))
    if len(table.shape) != 2:
        found.add(EMBED_TABLE, node.span, table=table.name, shape=shape_text(table.shape))
    return (Outline((ids.shape[0], table.shape[-1])),)


EMBED = Family("embed", _outline)


def cost(op: graph.Embed, tokens: int) -> Cost:
    """Only the rows that are looked up are read."""
    row = op.table.shape[1] * DType.BF16.bytes
    return Cost(weight_bytes=tokens * row, exchange_bytes=tokens * row)
