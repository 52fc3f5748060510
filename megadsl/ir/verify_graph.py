"""Legality of a Graph: what every pass after fusion may rely on. A breach is a bug of ours, never of the user."""

from __future__ import annotations

from collections.abc import Iterator

from megadsl.ir.expr import arg_names, reductions, varies
from megadsl.ir.graph import Attention, Custom, Embed, Factored, Fused, Graph, Linear, Op, RowMap, ValueRef


class InternalError(AssertionError):
    """An IR breaks its own rules; the text lists every breach."""


def verify_graph(graph: Graph) -> None:
    """Raise InternalError unless the graph is legal: names, producers, order, shapes, one sink, one contiguous loop."""
    breaches = [*_names(graph), *_loop(graph), *_values(graph), *_order(graph)]
    for op in graph.ops:
        breaches += [f"{op.name}: {text}" for text in _op(op, graph)]
    if breaches:
        raise InternalError(f"graph {graph.name!r} is illegal:\n  " + "\n  ".join(breaches))


def reads(op: Op) -> tuple[ValueRef, ...]:
    """All values that an op reads from the exchange; parts that an epilogue names are not among them."""
    match op:
        case Embed():
            return ()
        case Attention():
            return (op.q, op.k, op.v)
        case Custom():
            return tuple(ref for _, ref in op.inputs)
        case RowMap():
            return tuple(r for _, r in op.fused.args if isinstance(r, ValueRef))
        case Linear():
            own = {p.name for p in op.parts}
            refs = [*op.prologue.args, *(op.epilogue.args if op.epilogue else ())]
            return tuple(r for _, r in refs if isinstance(r, ValueRef) and r.value not in own)


def _names(graph: Graph) -> Iterator[str]:
    for kind, names in (("op", [o.name for o in graph.ops]), ("value", [v.name for v in graph.values])):
        for name in sorted({n for n in names if names.count(n) > 1}):
            yield f"{kind} name {name!r} is used twice"


def _loop(graph: Graph) -> Iterator[str]:
    inside = [op.loop is not None for op in graph.ops]
    borders = sum(a != b for a, b in zip([False, *inside], [*inside, False], strict=True))
    if borders > 2:
        yield "the loop's ops do not stand together"
    if any(inside) != (graph.layers > 0):
        yield f"layers is {graph.layers}, ops in the loop: {sum(inside)}"
    sinks = [op.name for op in graph.ops if isinstance(op, Linear) and op.sink]
    if len(sinks) > 1:
        yield f"more than one sink: {sinks}"


def _values(graph: Graph) -> Iterator[str]:
    ops = {op.name: op for op in graph.ops}
    read = {ref.value for op in graph.ops for ref in reads(op)}
    for v in graph.values:
        producers = [v.producer] + ([v.initial] if v.initial else [])
        writers = [op.name for op in graph.ops if op.out == v.name]
        if sorted(producers) != sorted(writers):
            yield f"value {v.name!r} lists producers {producers}, written by {writers}"
        if v.name not in read:
            yield f"value {v.name!r} is never read"
        if v.initial and v.initial in ops and v.producer in ops and (ops[v.initial].loop or not ops[v.producer].loop):
            yield f"value {v.name!r} is carried, but {v.initial!r} and {v.producer!r} do not stand before and in the loop"


def _order(graph: Graph) -> Iterator[str]:
    """Each read after a write; carried values are written before the loop, all others by an op in front."""
    written: set[str] = set()
    for op in graph.ops:
        for ref in reads(op):
            if ref.value not in written:
                yield f"{op.name} reads {ref.value!r} before anything has written it"
        if op.out is not None:
            written.add(op.out)


def _op(op: Op, graph: Graph) -> Iterator[str]:
    features = {v.name: v.features for v in graph.values}
    yield from _reads(op, features)
    out = features.get(op.out) if op.out is not None else None
    if op.out is not None and out is None:
        yield f"writes unknown value {op.out!r}"
    match op:
        case Embed():
            yield from _embed(op, out)
        case RowMap():
            yield from _row_map(op, out)
        case Linear():
            yield from _linear(op, out)
        case Attention():
            yield from _attention(op, out)
        case Custom():
            yield from _custom(op, out)


def _custom(op: Custom, out: int | None) -> Iterator[str]:
    if out is not None and out != op.call.features:
        yield f"gives {op.call.features} features into a value of {out}"
    if sorted(name for name, _ in (*op.inputs, *op.weights)) != sorted(op.call.args):
        yield "binds other names than its function takes"


def _reads(op: Op, features: dict[str, int]) -> Iterator[str]:
    for ref in reads(op):
        if ref.value not in features:
            yield f"reads unknown value {ref.value!r}"
        elif ref.begin < 0 or ref.begin + ref.features > features[ref.value]:
            yield f"reads features [{ref.begin}, {ref.begin + ref.features}) of {ref.value!r}, which has {features[ref.value]}"


def _embed(op: Embed, out: int | None) -> Iterator[str]:
    if out is not None and out != op.table.shape[1]:
        yield f"gives {op.table.shape[1]} features into a value of {out}"
    if op.expr is not None and (arg_names(op.expr) != ("x",) or reductions(op.expr)):
        yield "maps its rows by something else than an elementwise expression over x"


def _row_map(op: RowMap, out: int | None) -> Iterator[str]:
    if out is not None and out != op.features:
        yield f"gives {op.features} features into a value of {out}"
    if not op.reductions:
        yield "is no map of whole rows"
    yield from _fused("map", op.fused, op.features)


def _linear(op: Linear, out: int | None) -> Iterator[str]:
    if (op.out is None) == (op.sink is None):
        yield "has to have either an out value or a sink"
    if op.sink not in (None, "logits", "argmax"):
        yield f"has the unknown sink {op.sink!r}"
    if out is not None and out != op.out_features:
        yield f"gives {op.out_features} features into a value of {out}"
    yield from _parts(op)
    yield from _fused("prologue", op.prologue, op.columns)
    if op.factored is not None:
        yield from _factored(op.factored, {name for name, _ in op.prologue.args})
    if op.epilogue is not None:
        yield from _epilogue(op, op.epilogue)


def _parts(op: Linear) -> Iterator[str]:
    parts = [p.name for p in op.parts]
    if len(set(parts)) < len(parts):
        yield f"has parts of the same name: {parts}"
    for part in op.parts:
        if part.weight.shape != (part.rows, op.columns):
            yield f"part {part.name!r} has weight shape {part.weight.shape}, not {(part.rows, op.columns)}"
        if part.rope and part.rows % part.rope.head_dim:
            yield f"part {part.name!r} is rotated but holds no whole heads"
        if part.late and part.rope is None:
            yield f"part {part.name!r} is rotated late, but has no rotation"
    yield from _biases(op)


def _biases(op: Linear) -> Iterator[str]:
    for part in op.parts:
        if part.bias is not None and part.bias.shape != (part.rows,):
            yield f"part {part.name!r} has bias shape {part.bias.shape}, not {(part.rows,)}"
    if any((part.bias is None) == op.biased for part in op.parts):
        yield "has a bias for some parts only"


def _factored(factored: Factored, args: set[str]) -> Iterator[str]:
    if reductions(factored.operand) or varies(factored.scale):
        yield "is factored, but not into a factor without reductions and one that is the same along a row"
    if not {*arg_names(factored.operand), *arg_names(factored.scale)} <= args:
        yield "is factored into expressions of other arguments than its prologue's"


def _epilogue(op: Linear, epilogue: Fused) -> Iterator[str]:
    if any(p.rope for p in op.parts):
        yield "has an epilogue beside a rope"
    if op.sink is not None and len(epilogue.args) > 1:
        yield "has an epilogue over more than its logits beside a sink"
    if len({p.rows for p in op.parts}) > 1:
        yield "has an epilogue over parts of different rows"
    if reductions(epilogue.expr):
        yield "reduces in its epilogue"
    yield from _fused("epilogue", epilogue, op.parts[0].rows)
    named = {ref.value for _, ref in epilogue.args if isinstance(ref, ValueRef)}
    missing = [p.name for p in op.parts if p.name not in named]
    if missing:
        yield f"epilogue does not use parts {missing}"
    if any(not isinstance(ref, ValueRef) for _, ref in epilogue.args):
        yield "epilogue reads a weight"


def _fused(what: str, fused: Fused, features: int) -> Iterator[str]:
    names = [name for name, _ in fused.args]
    if sorted(names) != sorted(arg_names(fused.expr)):
        yield f"{what} binds {names}, its expression reads {list(arg_names(fused.expr))}"
    for name, ref in fused.args:
        length = ref.features if isinstance(ref, ValueRef) else ref.shape[0]
        if length != features or (not isinstance(ref, ValueRef) and len(ref.shape) != 1):
            yield f"{what} operand {name!r} does not have {features} features"


def _attention(op: Attention, out: int | None) -> Iterator[str]:
    q, kv = op.heads * op.head_dim, op.kv_heads * op.head_dim
    for name, ref, want in (("q", op.q, q), ("k", op.k, kv), ("v", op.v, kv)):
        if ref.features != want:
            yield f"{name} has {ref.features} features, not {want}"
    if op.heads % op.kv_heads:
        yield f"{op.heads} heads over {op.kv_heads} KV heads"
    for which, fused in op.maps:
        yield from _head_map(which, fused, op.q if which == "q" else op.k, op.head_dim)
    if out is not None and out != q:
        yield f"gives {q} features into a value of {out}"


def _head_map(which: str, fused: Fused, rows: ValueRef, head_dim: int) -> Iterator[str]:
    if sorted(name for name, _ in fused.args) != sorted(arg_names(fused.expr)):
        yield f"map of {which} binds other names than its expression reads"
    if [ref for _, ref in fused.args if isinstance(ref, ValueRef)] != [rows]:
        yield f"map of {which} reads other values than {which}"
    if any(ref.shape != (head_dim,) for _, ref in fused.args if not isinstance(ref, ValueRef)):
        yield f"map of {which} reads a vector that is not one head long"
