"""Which maps become epilogues, and what every tensor is as an expression over materialised tensors.

An *atom* is a tensor that stands for itself in expressions: a table row, rows of a linear, attention's output, what enters a
loop body, a weight. Every map is an expression over atoms; a map that becomes an epilogue is an atom again, in place of the
linear's rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megadsl.ir.expr import Arg, Expr, arg_names, reductions, substitute
from megadsl.ir.spec import Node, Spec
from megadsl.types import Lifetime


@dataclass
class Stacked:
    """A linear while its epilogue grows. ``heads`` are the tensors it gives: its rows, later the map that took them over."""

    node: Node
    position: int
    heads: tuple[str, ...]
    epilogue: Expr | None = None


@dataclass
class Composition:
    """The result. ``exprs``: each activation over atoms; ``owner``: each atom's producing node (none for what enters a loop)."""

    spec: Spec
    exprs: dict[str, Expr] = field(default_factory=dict)
    owner: dict[str, Node] = field(default_factory=dict)
    stacks: dict[str, Stacked] = field(default_factory=dict)  # by the linear's node name
    maps: dict[str, Expr] = field(default_factory=dict)  # materialised by themselves, by their node's name
    looked: dict[str, Expr] = field(default_factory=dict)  # by the embedding's node name: what is made of its rows, over ``x``

    def atom(self, tensor: str) -> str | None:
        """The atom that ``tensor`` is, None when it is a proper expression."""
        e = self.exprs[tensor]
        return e.name if isinstance(e, Arg) else None

    def stack_of(self, atom: str) -> Stacked | None:
        """The linear that gives ``atom`` as one of its heads."""
        node = self.owner.get(atom)
        stack = self.stacks.get(node.name) if node else None
        return stack if stack and atom in stack.heads else None


def compose(spec: Spec) -> Composition:
    """Walk the nodes once, in order, and decide each map's place.

    A map becomes the epilogue of a linear when it is elementwise, takes all of the linear's rows, is the only one to do so, and
    reads nothing else but values that stand before the linear. With the rows of two linears it becomes neither's, unless a loop
    variable leaves the body as this map and therefore has to be materialised: then the later linear takes it. An elementwise map
    of an embedding's rows alone, which nothing else reads and which enters a loop, is the embedding's own. A map with reductions that has
    to be materialised is a value by itself, and so is one that such a map contains and others read as well.
    """
    result = Composition(spec)
    consumers: dict[str, list[Node]] = {}
    for node in spec.nodes:
        for name in node.inputs:
            consumers.setdefault(name, []).append(node)
    carried = [c for loop in spec.loops for c in loop.carried]
    pinned = set(spec.outputs) | {c.body_out for c in carried} | {c.initial for c in carried}
    for name, t in spec.tensors.items():
        if t.lifetime is Lifetime.WEIGHT or name in {c.body_in for c in carried}:
            result.exprs[name] = Arg(name)
    required = {c.body_out for c in carried}
    maker = _Maker(result, consumers, pinned, required, {c.initial for c in carried}, _several(spec, consumers, required))
    for position, node in enumerate(spec.nodes):
        maker.visit(node, position)
    return result


def _several(spec: Spec, consumers: Mapping[str, list[Node]], required: set[str]) -> set[str]:
    """Of ``required`` tensors and what maps make them of, those that others than these maps read as well."""
    producer = {name: node for node in spec.nodes if node.op == "map" for name in node.outputs}
    within = {name: producer[name] for name in required if name in producer}
    stack = list(within.values())
    while stack:
        for tensor in stack.pop().inputs:
            if tensor in producer and tensor not in within:
                within[tensor] = producer[tensor]
                stack.append(producer[tensor])
    inside = {node.name for node in within.values()}
    return {name for name in within if name in required or any(n.name not in inside for n in consumers.get(name, []))}


@dataclass
class _Maker:
    result: Composition
    consumers: Mapping[str, list[Node]]
    pinned: set[str]  # read by something that is no node
    required: set[str]  # must be materialised
    entering: set[str]  # a loop, as its variables
    several: set[str]  # values by themselves, where they have reductions
    position: dict[str, int] = field(default_factory=dict)

    def visit(self, node: Node, position: int) -> None:
        self.position[node.name] = position
        if node.op == "map":
            self._map(node)
            return
        if node.op == "linear":
            self.result.stacks[node.name] = Stacked(node, position, node.outputs)
        for name in node.outputs:
            self.result.exprs[name] = Arg(name)
            self.result.owner[name] = node

    def _map(self, node: Node) -> None:
        by = {arg: self.result.exprs[tensor] for arg, tensor in zip(node.attrs["args"], node.inputs, strict=True)}
        expr = substitute(node.attrs["expr"], by)
        (out,) = node.outputs
        table = self._table(node, expr)
        if table is not None:
            self.result.looked[table.name] = substitute(expr, {table.outputs[0]: Arg("x")})
            self.result.exprs[out] = Arg(out)
            self.result.owner[out] = table
            return
        stack = self._taker(node, expr)
        if stack is None:
            if out in self.several and reductions(expr):
                self.result.maps[node.name], self.result.owner[out] = expr, node
                expr = Arg(out)
            self.result.exprs[out] = expr
            return
        if stack.epilogue is not None:
            expr = substitute(expr, {stack.heads[0]: stack.epilogue})
        stack.epilogue = expr
        stack.heads = (out,)
        self.result.exprs[out] = Arg(out)
        self.result.owner[out] = stack.node

    def _table(self, node: Node, expr: Expr) -> Node | None:
        """The embedding of whose rows this map makes what enters the loop."""
        atoms = arg_names(expr)
        table = self.result.owner.get(atoms[0]) if len(atoms) == 1 else None
        if table is None or table.op != "embed" or table.outputs != atoms or reductions(expr) or node.outputs[0] not in self.entering:
            return None
        return table if self._only_in(atoms[0], self._tree(node), node) else None

    def _taker(self, node: Node, expr: Expr) -> Stacked | None:
        """The linear whose epilogue this map becomes."""
        atoms = arg_names(expr)
        tree = self._tree(node)
        stacks = {s.node.name: s for a in atoms if (s := self.result.stack_of(a)) is not None}
        free = [s for s in stacks.values() if s.node.loop == node.loop and self._all_only_in(s.heads, tree, node)]
        raw = [s for s in free if s.epilogue is None]
        if not free or (len(raw) > 1 and node.outputs[0] not in self.required):
            return None
        last = max(free, key=lambda s: s.position)
        return last if not reductions(expr) and all(self._is_value_before(a, last) for a in atoms if a not in last.heads) else None

    def _tree(self, node: Node) -> dict[str, Node]:
        """The map and the maps that are composed into it, by name."""
        tree = {node.name: node}
        stack = [node]
        while stack:
            for tensor in stack.pop().inputs:
                producer = next((n for n in self.result.spec.nodes if tensor in n.outputs), None)
                if producer is not None and producer.op == "map" and self.result.atom(tensor) != tensor and producer.name not in tree:
                    tree[producer.name] = producer
                    stack.append(producer)
        return tree

    def _all_only_in(self, heads: tuple[str, ...], tree: Mapping[str, Node], root: Node) -> bool:
        return all(self.consumers.get(h) and self._only_in(h, tree, root) for h in heads)

    def _only_in(self, tensor: str, tree: Mapping[str, Node], root: Node) -> bool:
        """Whether nothing but the root's expression needs ``tensor``."""
        readers = self.consumers.get(tensor, [])
        if tensor in self.pinned or any(r.name not in tree for r in readers):
            return False
        return all(r is root or self._only_in(r.outputs[0], tree, root) for r in readers)

    def _is_value_before(self, atom: str, stack: Stacked) -> bool:
        if self.result.spec.tensors[atom].lifetime is Lifetime.WEIGHT:
            return False
        owner = self.result.owner.get(atom)
        return owner is None or (owner.op not in ("rope", "head_map") and self.position[owner.name] < stack.position)
