"""Formats of weights that a compilation asks for, over those that a spec declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeAlias

from megadsl.diagnostics import collecting
from megadsl.ir.formats import FORMAT_OP, FORMAT_UNKNOWN, FORMATS
from megadsl.ir.spec import Node, Spec

Formats: TypeAlias = "str | Mapping[str, str] | None"


def with_formats(spec: Spec, formats: Formats) -> Spec:
    """``spec`` with the weights of its linears in the formats asked for.

    "nvfp4": all linears of the layers; "nvfp4, lm_head=fp8": also that one; "o_proj=int8": that one alone; a mapping says the same, with ""
    for all linears of the layers. MK288 for a format and MK289 for a linear that there is not, all at once.
    """
    asked = dict(formats) if isinstance(formats, Mapping) else _parsed(formats or "")
    if not asked:
        return spec
    linears = {node.name: node for node in spec.nodes if node.op == "linear"}
    with collecting() as found:
        for op, name in asked.items():
            if name not in FORMATS:
                found.add(FORMAT_UNKNOWN, spec.span, what=f"formats {_shown(asked)!r}", name=name, known=", ".join(FORMATS))
            if op and op not in linears:
                found.add(FORMAT_OP, spec.span, asked=_shown(asked), op=op, known=", ".join(linears))
    return replace(spec, nodes=tuple(_formatted(node, asked) for node in spec.nodes))


def _parsed(text: str) -> dict[str, str]:
    items = [item.strip() for item in text.split(",") if item.strip()]
    pairs = (item.split("=", 1) if "=" in item else ("", item) for item in items)
    return {op.strip(): name.strip() for op, name in pairs}


def _shown(asked: Mapping[str, str]) -> str:
    return ", ".join(f"{op}={name}" if op else name for op, name in asked.items())


def _formatted(node: Node, asked: Mapping[str, str]) -> Node:
    name = asked.get(node.name, asked.get("") if node.loop else None)
    if node.op != "linear" or name is None:
        return node
    return replace(node, attrs=MappingProxyType({**node.attrs, "format": name}))
