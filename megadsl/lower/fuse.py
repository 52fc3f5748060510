"""Pass ``fuse``: spec -> graph. Maps dissolve into the prologues and epilogues of linears, ropes and appends into their ops."""

from __future__ import annotations

import re
from dataclasses import replace

from megadsl.diagnostics import Collector, declare
from megadsl.dsl.naming import stem, unique
from megadsl.ir.custom import CustomCall
from megadsl.ir.expr import Arg, Expr, arg_names, substitute
from megadsl.ir.formats import PLAIN
from megadsl.ir.graph import Attention, Custom, Embed, Fused, Graph, Linear, Op, Part, Rope, RowMap, Value, ValueRef, WeightRef
from megadsl.ir.spec import Carried, Node, Spec, Tensor
from megadsl.ir.verify_graph import verify_graph
from megadsl.lower.compose import Composition, Stacked, compose
from megadsl.types import Lifetime

MAP_INTO_ATTENTION = declare(
    "MK190",
    "attention {name!r}: {which} is computed by {source}, but it has to be rows of a linear",
    "feed attention from mk.linear, rotated by mk.rope or not, or from a custom op",
)
ROPE_INPUT = declare(
    "MK191", "rope: {tensor!r} is computed by {source}, but rope rotates rows of a linear", "rotate what mk.linear returns"
)
ROPE_READER = declare(
    "MK192",
    "{node!r} reads {tensor!r}, which is rotated",
    "rotated tensors go to attention (q) and to the cache (k) only; use the unrotated one",
)
ROPE_SHARED = declare(
    "MK193", "{tensor!r} is rotated and read unrotated as well", "use the rotated tensor only, or a second linear for the other use"
)
ROPE_MISMATCH = declare(
    "MK194",
    "attention {name!r}: q is {q}, k is {k}, v is {v}",
    "rotate q and k alike, with one mk.rope of the cache's head_dim, and leave v as it is",
)
NOT_OUTPUT = declare(
    "MK195",
    "{tensor!r} is returned, but it is {what}",
    "return the output of one mk.linear of one weight, outside the loop, or mk.argmax of it",
)
NOT_CARRIED = declare(
    "MK196",
    "loop variable {variable!r} {when} the loop as {what}, which is not materialised",
    "make it the output of mk.embed, mk.linear or mk.attention, an elementwise expression of a linear's output and values before it, or"
    " one with reductions over a value",
)
STALE_READ = declare(
    "MK197",
    "{op!r} reads the value that {variable!r} had before {producer!r} wrote it",
    "compute this before {producer!r} in the loop body",
)
LAYER_WEIGHT = declare(
    "MK198", "{op!r}, outside the loop, needs {weight!r}, which exists once per layer", "use the value inside the loop body"
)
MIXED_WEIGHTS = declare(
    "MK189",
    "linear {op!r} stacks weights of one layer and weights of all layers: {weights}",
    "give it weights of one kind, or use one mk.linear for each kind",
)
HEADS_INPUT = declare(
    "MK229",
    "{node!r}, a map over heads, reads {tensor!r}, which is computed by {source}; it maps rows of a linear",
    "map what mk.linear returns, in one expression, and rotate behind the map",
)
HEADS_READER = declare(
    "MK230",
    "{node!r} reads {tensor!r}, which is mapped head by head",
    "tensors mapped over heads go to mk.rope, to attention (q) and to the cache (k) only; drop head_dim= for rows of all features",
)
HEADS_SHARED = declare(
    "MK231",
    "{tensor!r} is mapped head by head and read unmapped as well",
    "use the mapped tensor only, or a second linear for the other use",
)
HEADS_DIFFER = declare(
    "MK232",
    "attention {name!r}: {which} is mapped over heads of {found} features, the cache has heads of {head_dim}",
    "use the cache's head_dim={head_dim} in the map",
)
NOT_A_VALUE = declare(
    "MK278",
    "custom op {name!r}: argument {arg!r} is {tensor!r}, an expression ({node}); blocks have whole values alone",
    "write the expression into the op's function, or pass what mk.linear, mk.attention, mk.embed or a custom op returns",
)
CACHE_SHARED = declare("MK199", "cache {cache!r} is read by {count} attentions", "declare one cache for each attention")


def fuse(spec: Spec) -> Graph:
    """The graph of a well-formed spec.

    embed, linear and attention become ops; each writes one value. Raises MegadslError with all of MK189 to MK199 and MK229 to
    MK232 that apply when the spec says something that fused ops cannot express. The result has passed verify_graph.
    """
    fuser = _Fuser(spec)
    graph = fuser.graph()
    verify_graph(graph)
    return graph


class _Fuser:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.found = Collector()
        self.made: Composition = compose(spec)
        self.producer = {name: node for node in spec.nodes for name in node.outputs}
        self.position = {node.name: i for i, node in enumerate(spec.nodes)}
        self.carried = [c for loop in spec.loops for c in loop.carried]
        self.maps = self._head_maps()
        self.ropes = self._ropes()
        self.late = self._late()
        self.sinks = self._sinks()
        self.map_names = self._map_names()
        self.values = self._value_names()

    def graph(self) -> Graph:
        ops = [op for node in self.spec.nodes if (op := self._op(node)) is not None]
        self._check_caches()
        self.found.raise_if_any()
        sink = next(op for op in ops if isinstance(op, Linear) and op.sink)
        layers = self.spec.loops[0].count if self.spec.loops else 0
        return Graph(self.spec.name, self.spec.tokens, layers, tuple(ops), tuple(self._values(ops)), sink.rows, self.spec.span)

    # What stands for what

    def _head_maps(self) -> dict[str, Node]:
        """The map over heads that gives each such tensor; the rows it maps lose their unmapped form."""
        found: dict[str, Node] = {}
        for node in (n for n in self.spec.nodes if n.op == "head_map"):
            found[node.outputs[0]] = node
            for source in (name for name in node.inputs if self.spec.tensors[name].lifetime is Lifetime.ACTIVATION):
                if self._rows(source) is None:
                    self.found.add(HEADS_INPUT, node.span, node=node.name, tensor=source, source=self._source(source))
                elif sum(n.inputs.count(source) for n in self.spec.nodes) > 1:
                    self.found.add(HEADS_SHARED, node.span, tensor=source)
        return found

    def _late(self) -> set[str]:
        """Rows that their attention rotates: those of q and k, where one of the two is mapped over heads before."""
        found: set[str] = set()
        for node in (n for n in self.spec.nodes if n.op == "attention"):
            both = [node.inputs[0], self.producer[node.inputs[1]].inputs[0]]
            if any(self._unrotated(tensor) in self.maps for tensor in both):
                found |= {self._base(tensor) for tensor in both}
        return found

    def _ropes(self) -> dict[str, Rope]:
        """Rotation of each rotated tensor; the rows it rotates lose their unrotated form."""
        found: dict[str, Rope] = {}
        for node in self.spec.nodes:
            if node.op != "rope":
                continue
            attrs = node.attrs
            rope = Rope(attrs["head_dim"], attrs["theta"], attrs["style"], attrs.get("scaling"), attrs.get("rotary_dim", 0))
            for source, out in zip(node.inputs, node.outputs, strict=True):
                found[out] = rope
                if self._rows(self._base(source)) is None:
                    self.found.add(ROPE_INPUT, node.span, tensor=source, source=self._source(source))
                elif sum(n.inputs.count(source) for n in self.spec.nodes) > 1:
                    self.found.add(ROPE_SHARED, node.span, tensor=source)
        return found

    def _rows(self, tensor: str) -> Stacked | None:
        """The linear that ``tensor`` is plain rows of."""
        atom = self.made.atom(tensor)
        stack = self.made.stack_of(atom) if atom else None
        return stack if stack and stack.epilogue is None else None

    def _logits(self, tensor: str) -> Stacked | None:
        """The linear that ``tensor`` is rows of, or an expression over one of its rows alone."""
        atom = self.made.atom(tensor)
        stack = self.made.stack_of(atom) if atom else None
        plain = stack is None or stack.epilogue is None or arg_names(stack.epilogue) == stack.node.outputs[:1] == stack.node.outputs
        return stack if plain else None

    def _source(self, tensor: str) -> str:
        node = self.producer.get(tensor)
        return f"{node.op} {node.name!r} ({node.span.short})" if node else f"the loop variable {tensor!r}"

    def _unrotated(self, tensor: str) -> str:
        node = self.producer.get(tensor)
        return node.inputs[node.outputs.index(tensor)] if node and node.op == "rope" else tensor

    def _base(self, tensor: str) -> str:
        """The rows that ``tensor`` is a rotation of, a map over heads, or both."""
        tensor = self._unrotated(tensor)
        if tensor not in self.maps:
            return tensor
        return next(name for name in self.maps[tensor].inputs if self.spec.tensors[name].lifetime is Lifetime.ACTIVATION)

    def _sinks(self) -> dict[str, str]:
        """Sink of each linear that gives the kernel's outputs."""
        found: dict[str, str] = {}
        for tensor in self.spec.outputs:
            node = self.producer.get(tensor)
            is_argmax = node is not None and node.op == "argmax"
            logits = node.inputs[0] if node is not None and is_argmax else tensor
            rows = self._logits(logits)
            problem = self._sink_problem(logits, rows, found)
            if problem:
                self.found.add(NOT_OUTPUT, node.span if node else self.spec.span, tensor=tensor, what=problem)
            elif rows is not None and found.get(rows.node.name) != "argmax":
                found[rows.node.name] = "argmax" if is_argmax else "logits"
        return found

    def _sink_problem(self, logits: str, rows: Stacked | None, found: dict[str, str]) -> str | None:
        if rows is None:
            return f"not plain logits: {self._source(logits)} computes them"
        if len(rows.node.outputs) > 1:
            return f"one of several outputs of linear {rows.node.name!r}"
        if rows.node.loop:
            return "computed inside the layer loop"
        if found and rows.node.name not in found:
            return f"beside the logits of {next(iter(found))!r}"
        others = [n.name for n in self.spec.nodes if logits in n.inputs and n.op != "argmax"]
        return f"read by {others[0]!r} as well" if others else None

    def _map_names(self) -> dict[str, str]:
        """The op's name of each map that is materialised by itself: after its first vector, as a norm is."""
        found, taken = {}, {n.name for n in self.spec.nodes if n.op in ("embed", "linear", "attention", "custom")}
        for node in (n for n in self.spec.nodes if n.name in self.made.maps):
            weights = [a for a in arg_names(self.made.maps[node.name]) if self.spec.tensors[a].lifetime is Lifetime.WEIGHT]
            found[node.name] = unique(stem(weights[0]) if weights else node.name, taken)
            taken.add(found[node.name])
        return found

    def _value_names(self) -> dict[str, str]:
        """Name of the value that each op writes: the loop variable's for both its producers, else the op's own."""
        names: dict[str, str] = {}
        taken = {n.name for n in self.spec.nodes}
        self.entering = {c.body_in: c.variable for c in self.carried}
        for c in self.carried:
            initial, producer = self._whole(c, c.initial, "enters"), self._whole(c, c.body_out, "leaves")
            if initial is None or producer is None:
                continue
            variable = unique(c.variable, taken)
            for node, when in ((initial, "enters"), (producer, "leaves")):
                if node.name in names:
                    self._not_carried(c, when, f"the same tensor as another loop variable, {names[node.name]!r}")
                names[node.name] = variable
            taken.add(variable)
            self.entering[c.body_in] = variable
        for node in self.spec.nodes:
            if node.op in ("embed", "linear", "attention", "custom") or node.name in self.map_names:
                names.setdefault(node.name, self.map_names.get(node.name, node.name))
        return names

    def _whole(self, c: Carried, tensor: str, when: str) -> Node | None:
        """The op whose whole value ``tensor`` is; a finding when there is none on the right side of the loop."""
        atom = self.made.atom(tensor)
        node = self.made.owner.get(atom) if atom else None
        if node is None or node.op in ("rope", "head_map"):
            self._not_carried(c, when, "an unchanged variable" if atom and node is None else self._source(tensor))
            return None
        if (node.loop is not None) != (when == "leaves"):
            self._not_carried(c, when, f"{tensor!r}, which is computed on the other side of the loop's begin")
            return None
        if len(node.outputs) > 1 and atom in node.outputs:
            self._not_carried(c, when, f"one of several outputs of {node.op} {node.name!r}")
            return None
        return node

    def _not_carried(self, c: Carried, when: str, what: str) -> None:
        self.found.add(NOT_CARRIED, self.spec.tensors[c.body_out].span, variable=c.variable, when=when, what=what)

    # Ops

    def _op(self, node: Node) -> Op | None:
        match node.op:
            case "embed":
                table = self.spec.tensors[node.inputs[1]]
                return Embed(node.name, _weight(table), self.values[node.name], node.loop, node.span, self.made.looked.get(node.name))
            case "linear":
                return self._linear(node)
            case "attention":
                return self._attention(node)
            case "custom":
                return self._custom(node)
            case "map" if node.name in self.map_names:
                fused = self._fused(self.made.maps[node.name], node, {})
                features = self.spec.tensors[node.outputs[0]].shape[1]
                return RowMap(self.map_names[node.name], fused, features, self.values[node.name], node.loop, node.span)
            case _:
                return None

    def _linear(self, node: Node) -> Linear:
        stack = self.made.stacks[node.name]
        x, *rest = (self.spec.tensors[name] for name in node.inputs)
        weights, biases = rest[: len(node.outputs)], rest[len(node.outputs) :]
        if len({w.per_layer for w in rest}) > 1:
            self.found.add(MIXED_WEIGHTS, node.span, op=node.name, weights=", ".join(w.name for w in rest))
        rotated = {self._base(name): rope for name, rope in self.ropes.items()}
        # an epilogue names its parts and other ops' values alike
        taken = set(self.values.values()) - {node.name}
        parts = []
        for i, (w, out) in enumerate(zip(weights, node.outputs, strict=True)):
            name = unique(stem(w.name), taken)
            taken.add(name)
            rope, bias = rotated.get(out), _weight(biases[i]) if biases else None
            weight = replace(_weight(w), format=node.attrs.get("format", PLAIN))
            parts.append(Part(name, weight, w.shape[0], rope, bias, rope is not None and out in self.late))
        sink = self.sinks.get(node.name)
        return Linear(
            name=node.name,
            prologue=self._prologue(node, x),
            columns=weights[0].shape[1],
            parts=tuple(parts),
            epilogue=None if stack.epilogue is None else self._epilogue(node, stack, parts),
            out=None if sink else self.values[node.name],
            sink=sink,
            loop=node.loop,
            span=node.span,
        )

    def _prologue(self, node: Node, x: Tensor) -> Fused:
        expr = self.made.exprs[x.name]
        if isinstance(expr, Arg):
            return Fused(Arg("x"), (("x", self._operand(expr.name, node)),))
        return self._fused(expr, node, {})

    def _epilogue(self, node: Node, stack: Stacked, parts: list[Part]) -> Fused:
        rows = {out: (p.name, ValueRef(p.name, 0, p.rows)) for out, p in zip(node.outputs, parts, strict=True)}
        assert stack.epilogue is not None
        return self._fused(stack.epilogue, node, rows)

    def _fused(self, expr: Expr, node: Node, own: dict[str, tuple[str, ValueRef]]) -> Fused:
        names = {name for name, _ in own.values()}
        bound: dict[str, tuple[str, ValueRef | WeightRef]] = {}
        for atom in arg_names(expr):
            if atom in own:
                bound[atom] = own[atom]
                continue
            ref = self._operand(atom, node)
            name = unique(self._readable(atom, ref), names)
            names.add(name)
            bound[atom] = (name, ref)
        renamed = substitute(expr, {atom: Arg(name) for atom, (name, _) in bound.items()})
        return Fused(renamed, tuple(bound.values()))

    def _readable(self, atom: str, ref: ValueRef | WeightRef) -> str:
        if isinstance(ref, WeightRef):
            return stem(ref.name)
        owner = self.made.owner.get(atom)
        whole = owner is None or len(owner.outputs) == 1 or atom not in owner.outputs
        return re.sub(r"\W", "_", ref.value if whole else atom)

    def _operand(self, atom: str, reader: Node) -> ValueRef | WeightRef:
        """What an op reads for ``atom``; findings for reads that come too late or from the wrong place."""
        t = self.spec.tensors[atom]
        if t.lifetime is Lifetime.WEIGHT:
            if t.per_layer and reader.loop is None:
                self.found.add(LAYER_WEIGHT, reader.span, op=reader.name, weight=atom)
            return _weight(t)
        if atom in self.ropes:
            self.found.add(ROPE_READER, reader.span, node=reader.name, tensor=atom)
            atom = self._base(atom)
        elif atom in self.maps:
            self.found.add(HEADS_READER, reader.span, node=reader.name, tensor=atom)
            atom = self._base(atom)
        self._check_fresh(atom, reader)
        return self._value_ref(atom)

    def _check_fresh(self, atom: str, reader: Node) -> None:
        """A loop variable is one value: what it held before cannot be read once the body has written it."""
        for c in self.carried:
            producer = self.made.owner.get(self.made.atom(c.body_out) or "")
            if producer is None:
                continue
            late = reader.loop is None or self.position[reader.name] > self.position[producer.name]
            after_begin = self.position[reader.name] >= min(self.position[n.name] for n in self.spec.nodes if n.loop)
            if (atom == c.body_in and late) or (atom == self.made.atom(c.initial) and after_begin):
                self.found.add(STALE_READ, reader.span, op=reader.name, variable=c.variable, producer=producer.name)

    def _value_ref(self, atom: str) -> ValueRef:
        features = self.spec.tensors[atom].shape[1]
        if atom in self.entering:
            return ValueRef(self.entering[atom], 0, features)
        owner = self.made.owner[atom]
        rows = owner.outputs[: owner.outputs.index(atom)] if atom in owner.outputs else ()
        return ValueRef(self.values[owner.name], sum(self.spec.tensors[o].shape[1] for o in rows), features)

    def _attention(self, node: Node) -> Attention | None:
        append = self.producer[node.inputs[1]]
        rows = dict(zip(("q", "k", "v"), (node.inputs[0], *append.inputs), strict=False))
        before = len(self.found.found)
        for which, tensor in rows.items():
            rows_of = self._unrotated(tensor) if which == "v" else self._base(tensor)
            if self._rows(rows_of) is None and not self._is_custom(rows_of):
                self.found.add(MAP_INTO_ATTENTION, node.span, name=node.name, which=which, source=self._source(tensor))
        kv_heads, head_dim = self.spec.tensors[node.inputs[1]].shape
        ropes = {which: self.ropes.get(tensor) for which, tensor in rows.items()}
        rope = ropes["q"]
        if rope != ropes["k"] or ropes["v"] is not None or (rope is not None and rope.head_dim != head_dim):
            self.found.add(ROPE_MISMATCH, node.span, name=node.name, **{which: _rope_text(r) for which, r in ropes.items()})
        maps = {which: self.maps.get(self._unrotated(rows[which])) for which in ("q", "k")}
        for which, mapped in maps.items():
            if mapped is not None and mapped.attrs["head_dim"] != head_dim:
                dims = {"found": mapped.attrs["head_dim"], "head_dim": head_dim}
                self.found.add(HEADS_DIFFER, node.span, name=node.name, which=which, **dims)
        if len(self.found.found) > before:
            return None
        q, k, v = (self._value_ref(self._base(tensor)) for tensor in rows.values())
        return Attention(
            name=node.name,
            q=q,
            k=k,
            v=v,
            heads=node.attrs["heads"],
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=node.attrs["scale"],
            rope=rope,
            cache=append.inputs[2],
            out=self.values[node.name],
            loop=node.loop,
            span=node.span,
            q_map=self._head_map(maps["q"]),
            k_map=self._head_map(maps["k"]),
            window=node.attrs.get("window"),
            softcap=node.attrs.get("softcap"),
        )

    def _is_custom(self, tensor: str) -> bool:
        """Whether ``tensor`` is what a custom op gives."""
        node = self.made.owner.get(tensor)
        return node is not None and node.op == "custom"

    def _custom(self, node: Node) -> Custom:
        """Its arguments by what they are; a finding for each that is an expression."""
        call: CustomCall = node.attrs["call"]
        values: list[tuple[str, ValueRef]] = []
        weights: list[tuple[str, WeightRef]] = []
        for arg, tensor in zip(call.args, node.inputs, strict=True):
            expr = self.made.exprs[tensor]
            if not isinstance(expr, Arg):
                self.found.add(NOT_A_VALUE, node.span, name=node.name, arg=arg, tensor=tensor, node=self._source(tensor))
                continue
            ref = self._operand(expr.name, node)
            if isinstance(ref, WeightRef):
                weights.append((arg, ref))
            else:
                values.append((arg, ref))
        return Custom(node.name, call, tuple(values), tuple(weights), self.values[node.name], node.loop, node.span)

    def _head_map(self, node: Node | None) -> Fused | None:
        if node is None:
            return None
        by: dict[str, Expr] = {arg: Arg(tensor) for arg, tensor in zip(node.attrs["args"], node.inputs, strict=True)}
        return self._fused(substitute(node.attrs["expr"], by), node, {})

    def _check_caches(self) -> None:
        for append in self.spec.nodes:
            if append.op == "kv_append":
                readers = [n for n in self.spec.nodes if n.op == "attention" and n.inputs[1] in append.outputs]
                if len(readers) > 1:
                    self.found.add(CACHE_SHARED, readers[1].span, cache=append.inputs[2], count=len(readers))

    def _values(self, ops: list[Op]) -> list[Value]:
        found: dict[str, Value] = {}
        for op in ops:
            if op.out is None:
                continue
            features = self._features(op)
            first = found.get(op.out)
            initial = first.producer if first else None
            found[op.out] = Value(op.out, features, op.name, initial, first.span if first else op.span)
        return list(found.values())

    def _features(self, op: Op) -> int:
        match op:
            case Embed():
                return op.table.shape[1]
            case Linear():
                return op.out_features
            case Attention():
                return op.heads * op.head_dim
            case Custom():
                return op.call.features
            case RowMap():
                return op.features


def _weight(t: Tensor) -> WeightRef:
    return WeightRef(t.name, t.shape, t.per_layer)


def _rope_text(rope: Rope | None) -> str:
    if rope is None:
        return "not rotated"
    thetas = " or ".join(dict.fromkeys(f"{one.theta:g}" for one in rope.tables))
    return f"rotated by {rope.head_dim}, theta {thetas}, {rope.style}" + (", scaled" if rope.scaling else "")
