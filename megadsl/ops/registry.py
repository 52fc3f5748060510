"""All op families by name."""

from __future__ import annotations

from megadsl.diagnostics import Collector, declare
from megadsl.ir.spec import Node, Tensor
from megadsl.ops.argmax import ARGMAX
from megadsl.ops.attention import ATTENTION, KV_APPEND
from megadsl.ops.base import Family, Outline
from megadsl.ops.custom import CUSTOM
from megadsl.ops.embed import EMBED
from megadsl.ops.heads import HEAD_MAP
from megadsl.ops.linear import LINEAR
from megadsl.ops.map import MAP
from megadsl.ops.rope import ROPE

OP_UNKNOWN = declare("MK125", "no op is called {op!r}", "the ops are: {known}")

FAMILIES: dict[str, Family] = {f.name: f for f in (EMBED, LINEAR, MAP, ROPE, HEAD_MAP, KV_APPEND, ATTENTION, ARGMAX, CUSTOM)}


def outline(node: Node, inputs: tuple[Tensor, ...], found: Collector) -> tuple[Outline, ...]:
    """Outlines of a node's outputs; what is wrong with its inputs goes to ``found``, an unknown op gives MK125."""
    family = FAMILIES.get(node.op)
    if family is None:
        found.add(OP_UNKNOWN, node.span, op=node.op, known=", ".join(FAMILIES))
        return ()
    return family.outline(node, inputs, found)
