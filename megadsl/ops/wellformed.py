"""Is a spec well formed: every tensor made before it is read, shapes as the families say, nothing left over."""

from __future__ import annotations

from megadsl.diagnostics import Collector, declare
from megadsl.ir.spec import Node, Spec, Tensor
from megadsl.ops.base import shape_text
from megadsl.ops.registry import outline
from megadsl.types import Lifetime

UNUSED_TENSOR = declare(
    "MK130",
    "{tensor!r}, computed by {node!r}, is never used",
    "use it in something that leads to the returned tensors, or delete the line",
)
UNUSED_WEIGHT = declare("MK131", "weight {tensor!r} is declared and never used", "use it or delete the declaration")
UNUSED_STATE = declare("MK132", "cache {tensor!r} is declared and never read", "append to it and pass it to mk.attention, or delete it")
UNDEFINED = declare("MK133", "{node!r} reads {tensor!r} before it has a value", "move the producer in front, or pass another tensor")
CYCLE = declare(
    "MK134", "cycle: {path}", "break the cycle; a value that goes from one layer to the next is a variable assigned before mk.layers"
)
SHAPE_CHANGED = declare(
    "MK135", "{tensor!r} is recorded with shape {got}, but {node!r} gives {want}", "build specs with @mk.kernel, which derives shapes"
)
CARRIED_SHAPE = declare(
    "MK136",
    "loop variable {variable!r} enters with shape {before} and leaves with shape {after}",
    "a variable that goes from layer to layer keeps its shape; give the result another name if it is not meant to",
)


def _consumers(spec: Spec) -> dict[str, list[Node]]:
    found: dict[str, list[Node]] = {}
    for node in spec.nodes:
        for name in node.inputs:
            found.setdefault(name, []).append(node)
    return found


def _path(spec: Spec, start: Node, goal: Node) -> list[str] | None:
    """Names of nodes from ``start`` to ``goal`` along reads, None when there is no way."""
    consumers = _consumers(spec)
    stack = [(start, [start.name])]
    seen = {start.name}
    while stack:
        node, path = stack.pop()
        if node is goal:
            return path
        for name in node.outputs:
            for reader in consumers.get(name, []):
                if reader.name not in seen:
                    seen.add(reader.name)
                    stack.append((reader, [*path, reader.name]))
    return None


def _entry_names(spec: Spec) -> set[str]:
    """Tensors that need no producer: weights, inputs, caches and what a loop brings into its body."""
    produced = {name for node in spec.nodes for name in node.outputs}
    free = {n for n, t in spec.tensors.items() if t.lifetime in (Lifetime.WEIGHT, Lifetime.INPUT, Lifetime.STATE)} - produced
    return free | {c.body_in for loop in spec.loops for c in loop.carried}


def check_order(spec: Spec, found: Collector) -> None:
    """Every input is produced by an earlier node: MK133 undefined, MK134 cyclic."""
    producer = {name: node for node in spec.nodes for name in node.outputs}
    ready = _entry_names(spec)
    first = {loop.name: next((n for n in spec.nodes if n.loop == loop.name), None) for loop in spec.loops}
    initial = {node.name: [c.initial for c in loop.carried] for loop in spec.loops if (node := first[loop.name]) is not None}
    for node in spec.nodes:
        for name in (*node.inputs, *initial.get(node.name, [])):
            if name in ready:
                continue
            later = producer.get(name)
            path = None if later is None else _path(spec, node, later)
            if path is None:
                found.add(UNDEFINED, node.span, node=node.name, tensor=name)
            else:
                found.add(CYCLE, node.span, path=" -> ".join([*path, node.name]))
        ready.update(node.outputs)


def check_shapes(spec: Spec, found: Collector) -> None:
    """Every node's inputs fit, every output is recorded with the shape its family gives, carried variables keep theirs."""
    for node in spec.nodes:
        if any(name not in spec.tensors for name in node.inputs):
            continue
        before = len(found.found)
        outlines = outline(node, tuple(spec.tensors[name] for name in node.inputs), found)
        if len(found.found) > before:
            continue
        for name, want in zip(node.outputs, outlines, strict=True):
            got = spec.tensors[name].shape
            if got != want.shape:
                found.add(SHAPE_CHANGED, node.span, tensor=name, node=node.name, got=shape_text(got), want=shape_text(want.shape))
    for loop in spec.loops:
        for c in loop.carried:
            enter, leave = spec.tensors[c.initial].shape, spec.tensors[c.body_out].shape
            if enter != leave:
                found.add(
                    CARRIED_SHAPE,
                    spec.tensors[c.body_out].span,
                    variable=c.variable,
                    before=shape_text(enter),
                    after=shape_text(leave),
                )


def live_tensors(spec: Spec) -> set[str]:
    """Tensors that the outputs depend on; a carried variable brings its initial value and its last write along."""
    producer = {name: node for node in spec.nodes for name in node.outputs}
    carried = {c.body_in: c for loop in spec.loops for c in loop.carried}
    live: set[str] = set()
    stack = list(spec.outputs)
    while stack:
        name = stack.pop()
        if name in live:
            continue
        live.add(name)
        if name in carried:
            stack += [carried[name].initial, carried[name].body_out]
        if name in producer:
            stack += producer[name].inputs
    return live


def check_used(spec: Spec, found: Collector) -> None:
    """MK130 to MK132 for what does not lead to an output. Of a dead chain only the end is reported: mending it mends all."""
    live = live_tensors(spec)
    producer = {name: node for node in spec.nodes for name in node.outputs}
    read = _consumers(spec).keys() | {c.initial for loop in spec.loops for c in loop.carried}
    dead = [t for name, t in spec.tensors.items() if name not in live]
    for t in dead:
        if t.name not in read:
            _report_unused(t, producer.get(t.name), found)


def _report_unused(t: Tensor, node: Node | None, found: Collector) -> None:
    if t.lifetime is Lifetime.WEIGHT:
        found.add(UNUSED_WEIGHT, t.span, tensor=t.name)
    elif t.lifetime is Lifetime.STATE:
        found.add(UNUSED_STATE, t.span, tensor=t.name)
    else:
        found.add(UNUSED_TENSOR, t.span, tensor=t.name, node=node.name if node else "the host")


def check(spec: Spec, found: Collector) -> None:
    """All checks of a finished spec."""
    check_order(spec, found)
    check_shapes(spec, found)
    check_used(spec, found)
