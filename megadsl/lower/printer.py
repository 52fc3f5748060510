"""Specs and graphs as stable text: for plan.txt, goldens and reading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from megadsl.expr import to_text
from megadsl.ir.graph import Attention, Custom, Embed, Fused, Graph, Linear, Op, Rope, RopeScaling, RowMap, ValueRef, WeightRef
from megadsl.ir.spec import Node, Spec, Tensor
from megadsl.ops.base import shape_text
from megadsl.types import PerLayer, at_layer

INDENT = "  "


def print_spec(spec: Spec) -> str:
    """One line per weight, cache, node and loop variable, in program order; ends with a newline. File names without folders."""
    lines = [f"spec {spec.name} tokens={spec.tokens}  # {spec.span.short}"]
    produced = {name for node in spec.nodes for name in node.outputs} | {c.body_in for loop in spec.loops for c in loop.carried}
    lines += [f"{INDENT}{_tensor(t)}" for t in spec.tensors.values() if t.name not in produced]
    in_loop = False
    for node in spec.nodes:
        if node.loop and not in_loop:
            lines += _loop_header(spec)
        in_loop = node.loop is not None
        lines.append(f"{INDENT * (2 if in_loop else 1)}{_node(node, spec)}")
    lines.append(f"{INDENT}return {', '.join(spec.outputs)}")
    return "\n".join(lines) + "\n"


def _loop_header(spec: Spec) -> Iterator[str]:
    for loop in spec.loops:
        yield f"{INDENT}loop {loop.name} x {loop.count}  # {loop.span.short}"
        for c in loop.carried:
            yield f"{INDENT * 2}carry {c.variable}: {c.body_in} = {c.initial}, then {c.body_out}"


def _tensor(t: Tensor) -> str:
    layer = " per layer" if t.per_layer else ""
    return f"{t.lifetime.value} {t.name} {t.dtype.value}{shape_text(t.shape)}{layer}  # {t.span.short}"


def _node(node: Node, spec: Spec) -> str:
    outputs = ", ".join(f"{name}{shape_text(spec.tensors[name].shape)}" for name in node.outputs)
    attrs = {k: v for k, v in node.attrs.items() if k not in ("expr", "args")}
    words = "".join(f" {k}={v}" for k, v in sorted(attrs.items()))
    if "expr" in node.attrs:
        bound = ", ".join(f"{arg}={name}" for arg, name in zip(node.attrs["args"], node.inputs, strict=True))
        return f"{outputs} = {node.op} {node.name} {to_text(node.attrs['expr'])} where {bound}{words}  # {node.span.short}"
    return f"{outputs} = {node.op} {node.name}({', '.join(node.inputs)}){words}  # {node.span.short}"


def print_graph(graph: Graph) -> str:
    """Values, then ops in program order with their operands; ends with a newline. File names without folders."""
    lines = [f"graph {graph.name} tokens={graph.tokens} layers={graph.layers} vocab={graph.vocab}  # {graph.span.short}"]
    for v in graph.values:
        first = f"{v.initial}, then " if v.initial else ""
        lines.append(f"{INDENT}value {v.name} [{v.features}] from {first}{v.producer}")
    in_loop = False
    for op in graph.ops:
        if op.loop and not in_loop:
            lines.append(f"{INDENT}loop {op.loop} x {graph.layers}")
        in_loop = op.loop is not None
        depth = 2 if in_loop else 1
        head, *rest = _op(op)
        lines.append(f"{INDENT * depth}{head}  # {op.span.short}")
        lines += [f"{INDENT * (depth + 1)}{line}" for line in rest]
    return "\n".join(lines) + "\n"


def _op(op: Op) -> Iterator[str]:
    match op:
        case Embed():
            yield f"embed {op.name} -> {op.out}"
            yield f"table {_ref(op.table)}"
            yield from (f"rows {to_text(e)}" for e in (op.expr,) if e is not None)
        case RowMap():
            yield f"map of rows {op.name} -> {op.out}"
            yield f"rows {_fused(op.fused)}"
        case Linear():
            yield from _linear(op)
        case Attention():
            yield from _attention(op)
        case Custom():
            yield f"custom {op.name} {op.call} -> {op.out}"
            yield from (f"{name} = {_ref(ref)}" for name, ref in op.inputs)
            yield from (f"{name} = {_ref(weight)}" for name, weight in op.weights)


def _linear(op: Linear) -> Iterator[str]:
    yield f"linear {op.name} [{op.rows} x {op.columns}] -> {op.out or op.sink}"
    yield f"prologue {_fused(op.prologue)}"
    if op.factored is not None:
        yield f"operand {to_text(op.factored.operand)}, products times {to_text(op.factored.scale)}"
    for part in op.parts:
        bias, late = f" + {_ref(part.bias)}" if part.bias else "", " by its reader" if part.late else ""
        yield f"part {part.name} {_ref(part.weight)}{bias}{_rope(part.rope)}{late}"
    if op.epilogue is not None:
        yield f"epilogue {_fused(op.epilogue)}"


def _attention(op: Attention) -> Iterator[str]:
    yield f"attention {op.name} heads={op.heads} kv_heads={op.kv_heads} head_dim={op.head_dim} scale={op.scale:g} -> {op.out}"
    if op.window is not None:
        yield f"over a window of {_each(op.window)} rows"
    if op.softcap is not None:
        yield f"scores capped at {op.softcap:g}"
    yield f"q {_ref(op.q)}, k {_ref(op.k)}, v {_ref(op.v)}, cache {op.cache}{_rope(op.rope)}"
    yield from (f"each head of {which} {_fused(fused)}" for which, fused in op.maps)


def _fused(fused: Fused) -> str:
    bound = ", ".join(f"{name} = {_ref(ref)}" for name, ref in fused.args)
    return f"{to_text(fused.expr)} where {bound}"


def _ref(ref: ValueRef | WeightRef) -> str:
    if isinstance(ref, ValueRef):
        return f"{ref.value}[{ref.begin}:{ref.begin + ref.features}]"
    return f"{ref.name} {shape_text(ref.shape)}"


def _rope(rope: Rope | None) -> str:
    if rope is None:
        return ""
    part = f" rotary_dim={rope.rotary_dim}" if rope.rotary_dim != rope.head_dim else ""
    ways = [f"theta={one.theta:g}{_scaled(at_layer(one.scaling, 0))}" for one in rope.tables]
    of = f" by layer {runs([rope.tables.index(rope.at(i)) for i in range(rope.layers)])}" if len(ways) > 1 else ""
    return f" rope {rope.style} head_dim={rope.head_dim}{part} {' | '.join(ways)}{of}"


def _scaled(scaling: RopeScaling | None) -> str:
    return f" {scaling.kind} scaling by {scaling.factor:g}" if scaling else ""


def _each(value: object) -> str:
    """What all layers have, or what each has."""
    if not isinstance(value, PerLayer):
        return str(value)
    return f"{runs(['all' if v is None else v for v in value.values])} (layer by layer)"


def runs(values: Sequence[object]) -> str:
    """``5 x 512, all, 5 x 512``."""
    found = [(value, len(list(same))) for value, same in groupby(values)]
    return ", ".join(f"{count} x {value}" if count > 1 else str(value) for value, count in found)
