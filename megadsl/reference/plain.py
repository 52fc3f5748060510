"""A decode step as a torch user writes it for speed: what the benchmark compares the megakernel with.

bf16 throughout, one matrix per linear, torch's own fused operators where it has them, static inputs and KV caches, no host
work between the operators: so it can be captured in a CUDA graph, and torch.compile sees it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from megadsl.ir.expr import Arg, Binary, Const, Expr, Reduce, Unary
from megadsl.ir.graph import Attention, Custom, Embed, Fused, Graph, Linear, Op, Part, Rope, RowMap, ValueRef, WeightRef
from megadsl.reference import custom, meaning
from megadsl.reference.model import in_format, layers_of, program, weight_key
from megadsl.types import at_layer

Values = dict[str, Tensor]
Term = Callable[[Values], Tensor]
Action = Callable[[Values], None]
Step = Callable[[], tuple[Tensor, Tensor | None]]

# Ways to write grouped-query attention. Which is fastest depends on shapes and torch's kernels, so the benchmark tries all.
ATTENTION_FORMS = ("gqa", "grouped", "matmul")


class PlainModel:
    """The graph on static tensors, for steps of exactly ``count`` new tokens that see a chain of ancestors: as many of each of
    ``sequences``, which all have as many cached rows.

    ``weights`` as for GraphModel, rounded to bf16. ``ids`` are int64 (count,), by sequence, ``positions`` int64 (count / sequences,);
    ``caches`` maps (cache, layer) to keys and values, each bf16 (sequences, kv_heads, max_kv, head_dim). Raises ValueError for weights
    that do not fit.
    """

    def __init__(
        self, graph: Graph, weights: Mapping[str, Tensor], max_kv: int, count: int, device: str = "cpu", sequences: int = 1
    ) -> None:
        self.graph, self.max_kv, self.count, self.sequences = graph, max_kv, count, sequences
        self._device = torch.device(device)
        self.ids = torch.zeros(count, dtype=torch.int64, device=self._device)
        self.positions = torch.arange(count // sequences, device=self._device)
        self._weights = {key: w.to(torch.bfloat16) for key, w in in_format(graph, weights, self._device)}
        self._stacked: dict[tuple[str, int], Tensor] = {}
        self._tables: dict[Rope, tuple[Tensor, Tensor]] = {}
        self.caches = {
            (op.cache, layer): tuple(
                torch.zeros(sequences, op.kv_heads, max_kv, op.head_dim, dtype=torch.bfloat16, device=self._device) for _ in range(2)
            )
            for op in graph.ops
            if isinstance(op, Attention)
            for layer in layers_of(op, graph)
        }

    def set_inputs(self, ids: Sequence[int], kv_len: int) -> None:
        """The ``count`` ids of the next steps, which append rows kv_len, kv_len + 1, ... to the caches."""
        self.ids.copy_(torch.tensor(list(ids)))
        self.positions.copy_(torch.arange(kv_len, kv_len + self.count // self.sequences))

    def step(self, rows: int, form: str) -> Step:
        """A function that runs one step when ``rows`` cache rows are in use after it; ``form`` is one of ATTENTION_FORMS.

        It returns bf16 logits (count, vocab) and int64 (count,) greedy ids (None where the graph chooses no token), or the
        last value of a graph without a sink. Shapes are fixed: the caches are cut to ``rows``, and no unused row is read.
        """
        builder = _Builder(self, rows, form)
        actions = [builder.action(op, layer) for op, layer in program(self.graph)]
        tables = {_table_name(rope): table for rope, table in self._tables.items()}
        sequences, positions, chooses = (
            self.sequences,
            self.positions,
            any(isinstance(op, Linear) and op.sink == "argmax" for op in self.graph.ops),
        )

        def step() -> tuple[Tensor, Tensor | None]:
            values: Values = {}
            for name, (cos, sin) in tables.items():  # once a step, for all layers
                at = positions if sequences == 1 else positions.repeat(sequences)
                values[name + "cos"], values[name + "sin"] = cos[at], sin[at]
            for action in actions:
                action(values)
            result = values["result"]
            return result, result.argmax(-1) if chooses else None

        return step

    def weight(self, ref: WeightRef, layer: int) -> Tensor:
        return self._weights[weight_key(ref, layer)]

    def stacked(self, op: Linear, layer: int) -> Tensor:
        """The parts of a linear as one matrix."""
        if len(op.parts) == 1:
            return self.weight(op.parts[0].weight, layer)
        key = (op.name, layer)
        if key not in self._stacked:
            self._stacked[key] = torch.cat([self.weight(part.weight, layer) for part in op.parts])
        return self._stacked[key]

    def bias(self, op: Linear, layer: int) -> Tensor | None:
        """The biases of a linear's parts as one vector."""
        found = [self.weight(part.bias, layer) for part in op.parts if part.bias is not None]
        return torch.cat(found) if found else None

    def rope(self, rope: Rope) -> str:
        """The name of a rotation's table: cos and signed sin of every position, fp32 (max_kv, head_dim)."""
        if rope not in self._tables:
            cos, sin = meaning.rope_table(torch.arange(self.max_kv, device=self._device), rope.frequencies, rope.amplitude)
            if rope.style == "half":
                self._tables[rope] = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
            else:
                self._tables[rope] = torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)
            rest = (0, rope.head_dim - rope.rotary_dim)
            self._tables[rope] = functional.pad(self._tables[rope][0], rest, value=1.0), functional.pad(self._tables[rope][1], rest)
        return _table_name(rope)


def _table_name(rope: Rope) -> str:
    return f"rope {rope.head_dim} {rope.theta} {rope.style} {rope.scaling} {rope.rotary_dim} "


class _Builder:
    """Turns ops into closures over tensors and numbers, so that nothing of the graph is left when the step runs."""

    def __init__(self, model: PlainModel, rows: int, form: str) -> None:
        self._model, self._rows, self._form = model, rows, form
        self._segments: dict[str, list[tuple[int, int]]] = {}  # of each value: (begin, features), a tensor each

    def action(self, op: Op, layer: int) -> Action:
        match op:
            case Embed():
                return self._embed(op, layer)
            case RowMap():
                return self._row_map(op, layer)
            case Linear():
                return self._linear(op, layer)
            case Attention():
                return self._attention(op, layer)
            case Custom():
                return self._custom(op, layer)

    def _define(self, name: str, segments: Sequence[tuple[int, int]]) -> list[str]:
        self._segments[name] = list(segments)
        return [f"{name} {begin}" for begin, _ in segments]

    def _operand(self, ref: ValueRef | WeightRef, layer: int) -> Term:
        if isinstance(ref, WeightRef):
            weight = self._model.weight(ref, layer)
            return lambda values: weight
        begin, end = ref.begin, ref.begin + ref.features
        pieces = [
            _cut(f"{ref.value} {at}", max(begin, at) - at, min(end, at + size) - at, size)
            for at, size in self._segments[ref.value]
            if at < end and begin < at + size
        ]
        if len(pieces) == 1:
            return pieces[0]
        return lambda values: torch.cat([piece(values) for piece in pieces], dim=1)

    def _fused(self, fused: Fused, features: int, layer: int, parts: Mapping[str, Term]) -> Term:
        args = {
            name: parts[ref.value] if isinstance(ref, ValueRef) and ref.value in parts else self._operand(ref, layer)
            for name, ref in fused.args
        }
        return plain_term(fused.expr, args, (self._model.count, features))

    def _embed(self, op: Embed, layer: int) -> Action:
        table, ids = self._model.weight(op.table, layer), self._model.ids
        (name,) = self._define(op.out, [(0, table.shape[1])])

        looked: Term = lambda values: functional.embedding(ids, table)  # noqa: E731
        term = looked if op.expr is None else plain_term(op.expr, {"x": looked}, (self._model.count, table.shape[1]))

        def run(values: Values) -> None:
            values[name] = values["result"] = term(values)

        return run

    def _row_map(self, op: RowMap, layer: int) -> Action:
        term = self._fused(op.fused, op.features, layer, {})
        (name,) = self._define(op.out, [(0, op.features)])

        def run(values: Values) -> None:
            values[name] = values["result"] = term(values)

        return run

    def _linear(self, op: Linear, layer: int) -> Action:
        x, weight, bias = self._fused(op.prologue, op.columns, layer, {}), self._model.stacked(op, layer), self._model.bias(op, layer)
        pieces = _pieces(op)
        bounds = [sum(size for _, size, _ in pieces[:i]) for i in range(len(pieces))]
        turns = [_rotation(self._model.rope(rope.at(layer)), rope) if rope is not None else None for _, _, rope in pieces]
        sizes, turned, last = [size for _, size, _ in pieces], any(turns), op is self._model.graph.ops[-1]
        names = [name for name, _, _ in pieces]
        if op.epilogue is None:
            names = self._define(op.out or "result", list(zip(bounds, sizes, strict=True)))
        result = None
        if op.epilogue is not None:
            result = self._fused(op.epilogue, op.out_features, layer, {name: _get(f"part {name}") for name in names})
        own = [f"part {name}" for name in names] if result is not None else names
        (out,) = self._define(op.out, [(0, op.out_features)]) if result is not None and op.out is not None else (None,)

        def run(values: Values) -> None:
            product = functional.linear(x(values), weight, bias)
            for name, piece, turn in zip(own, product.split(sizes, -1), turns, strict=True):
                values[name] = piece if turn is None else turn(piece, values)
            if result is not None:
                whole = result(values)
            else:
                whole = torch.cat([values[name] for name in own], -1) if last and turned else product
            if out is not None:
                values[out] = whole
            values["result"] = whole

        return run

    def _heads(self, op: Attention, which: str, ref: ValueRef, layer: int) -> Term:
        """q or k of an attention: rows of a linear, through their map over heads and rotated where they come without either."""
        term, fused = self._operand(ref, layer), dict(op.maps).get(which)
        if not op.maps:
            return term
        if fused is not None:
            shape = (self._model.count * (ref.features // op.head_dim), op.head_dim)
            args = {name: self._operand(at, layer) if isinstance(at, WeightRef) else _reshaped(term, shape) for name, at in fused.args}
            term = _reshaped(plain_term(fused.expr, args, shape), (self._model.count, ref.features))
        return term if op.rope is None else _turned(term, _rotation(self._model.rope(op.rope.at(layer)), op.rope))

    def _attention(self, op: Attention, layer: int) -> Action:
        q, k, v = self._heads(op, "q", op.q, layer), self._heads(op, "k", op.k, layer), self._operand(op.v, layer)
        keys, values_ = self._model.caches[op.cache, layer]
        positions, rows, dim = self._model.positions, self._rows, op.head_dim
        sequences, count = self._model.sequences, self._model.count // self._model.sequences
        attend = _attend(self._form, op, at_layer(op.window, layer), count, rows, positions.device)
        (name,) = self._define(op.out, [(0, op.heads * dim)])

        def heads(x: Tensor) -> Any:
            return x.view(sequences, count, -1, dim).transpose(1, 2)

        def run(values: Values) -> None:
            keys.index_copy_(2, positions, heads(k(values)))
            values_.index_copy_(2, positions, heads(v(values)))
            out = attend(heads(q(values)), keys[:, :, :rows], values_[:, :, :rows])
            values[name] = values["result"] = out.transpose(1, 2).reshape(sequences * count, -1)

        return run

    def _custom(self, op: Custom, layer: int) -> Action:
        terms = [self._operand(ref, layer) for ref in custom.operands(op)]
        (name,) = self._define(op.out, [(0, op.call.features)])

        def run(values: Values) -> None:
            values[name] = values["result"] = custom.meaning(op, [term(values) for term in terms]).bfloat16()

        return run


def _pieces(op: Linear) -> list[tuple[str, int, Rope | None]]:
    """(name, rows, rotation) of the pieces that a linear's product is cut into.

    An epilogue reads the parts; else neighbours that are rotated alike stay together: q and k are turned by one kernel.
    """

    def rotation(part: Part) -> Rope | None:
        return part.turned

    if op.epilogue is not None:
        return [(part.name, part.rows, part.turned) for part in op.parts]
    return [("", sum(part.rows for part in parts), rope) for rope, parts in ((r, list(p)) for r, p in groupby(op.parts, rotation))]


def _reshaped(term: Term, shape: tuple[int, int]) -> Term:
    return lambda values: term(values).reshape(shape)


def _turned(term: Term, turn: Callable[[Tensor, Values], Tensor]) -> Term:
    return lambda values: turn(term(values), values)


def _get(name: str) -> Term:
    return lambda values: values[name]


def _cut(name: str, begin: int, end: int, size: int) -> Term:
    if (begin, end) == (0, size):
        return _get(name)
    return lambda values: values[name][:, begin:end]


def _rotation(table: str, rope: Rope) -> Callable[[Tensor, Values], Tensor]:
    dim, rotary, style = rope.head_dim, rope.rotary_dim, rope.style
    cos, sin = table + "cos", table + "sin"

    def rotate(x: Tensor, values: Values) -> Tensor:
        heads = x.unflatten(-1, (-1, dim))
        if style == "half":
            other = heads[..., :rotary].roll(rotary // 2, -1)
            other = other if rotary == dim else torch.cat((other, heads[..., rotary:]), -1)
        else:
            other = heads.unflatten(-1, (dim // 2, 2)).flip(-1).flatten(-2)
        turned: Tensor = (heads * values[cos][:, None] + other * values[sin][:, None]).bfloat16()
        return turned.flatten(1)

    return rotate


def _attend(
    form: str, op: Attention, window: int | None, count: int, rows: int, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention of q (sequences, heads, count, D) over k and v (sequences, kv_heads, rows, D), in a layer of that window."""
    scale, kv_heads, group = op.scale, op.kv_heads, op.heads // op.kv_heads
    hides = window is not None and window < rows  # the form takes no mask: then it is as "grouped"
    if form == "gqa" and not hides and op.softcap is None:
        bias = causal_lower_right(count, rows) if count > 1 else None
        return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=group > 1)
    # the query heads of a KV head become its query rows
    seen = meaning.visible_rows(rows - count, [(2 << t) - 1 for t in range(count)], device)
    seen = seen if window is None else meaning.windowed(seen, window)
    mask = None if bool(seen.all()) else seen.repeat(group, 1)

    def by_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    def by_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)).float() * scale
        if op.softcap is not None:
            scores = op.softcap * (scores / op.softcap).tanh()
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(-1).bfloat16() @ v

    inner = by_matmul if form == "matmul" or op.softcap is not None else by_sdpa

    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out = inner(q.reshape(len(q), kv_heads, group * count, -1), k, v)
        return out.reshape(len(q), kv_heads * group, count, -1)

    return grouped


def plain_term(e: Expr, args: Mapping[str, Term], shape: tuple[int, int]) -> Term:
    """An expression over rows as torch operators, bf16 of ``shape`` (tokens, features); norms as torch's own, other reductions in fp32."""
    norm = _rms_norm(e)
    if norm is None:
        term = _term(e, args, shape)
        return lambda values: term(values).bfloat16().expand(shape)
    x, weight, eps = args[norm[0]], args[norm[1]], norm[2]

    def normalise(values: Values) -> Tensor:
        out: Tensor = functional.rms_norm(x(values), shape[1:], weight(values), eps)
        return out

    return normalise


def _term(e: Expr, args: Mapping[str, Term], shape: tuple[int, int]) -> Term:
    match e:
        case Const(constant):
            scalar = torch.tensor(constant)  # of no dimension: takes the other operand's dtype and device
            return lambda values: scalar
        case Arg(name):
            return args[name]
        case Reduce(op, a):
            inner, reduce_ = _term(a, {name: _wide(term) for name, term in args.items()}, shape), meaning.REDUCE[op]
            return lambda values: reduce_(inner(values).expand(shape))
        case Unary(op, a):
            inner, unary = _term(a, args, shape), meaning.UNARY[op]
            return lambda values: unary(inner(values))
        case Binary(op, a, b):
            left, right, binary = _term(a, args, shape), _term(b, args, shape), meaning.BINARY[op]
            return lambda values: binary(left(values), right(values))


def _wide(term: Term) -> Term:
    return lambda values: term(values).float()


def _rms_norm(e: Expr) -> tuple[str, str, float] | None:
    """The names of input and weight, and eps, of ``x * rsqrt(mean(x * x) + eps) * weight``; None for all else."""
    match e:
        case Binary(
            "mul",
            Binary("mul", Arg(x), Unary("rsqrt", Binary("add", Reduce("mean", Binary("mul", Arg(a), Arg(b))), Const(eps)))),
            Arg(weight),
        ) if x == a == b:
            return x, weight, eps
    return None
