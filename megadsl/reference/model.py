"""Runs a Graph in torch: the oracle (fp32) and the kernel's own rounding points (bf16)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from megadsl.ir.expr import Expr
from megadsl.ir.formats import PLAIN
from megadsl.ir.graph import Attention, Custom, Embed, Fused, Graph, Linear, Op, Part, Rope, RowMap, ValueRef, WeightRef
from megadsl.reference import custom, meaning
from megadsl.reference.formats import dequantised
from megadsl.types import at_layer

Observer = Callable[[str, int, Tensor], None]


class Arithmetic(Protocol):
    """The dtype that values are kept in between ops, and the ops whose rounding differs from policy to policy."""

    @property
    def dtype(self) -> torch.dtype:
        """Storage of weights, values and caches."""

    @property
    def as_scheduled(self) -> bool:
        """Whether factored prologues round where the kernel does, rather than where the spec's expression says."""

    def store(self, x: Tensor) -> Tensor:
        """A result as its readers see it: a materialised value, or the operand of a matrix product."""

    def evaluate(self, e: Expr, args: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        """An expression, see meaning.evaluate."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """A matrix product, see meaning.linear."""

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
        """A rotation, see meaning.rope."""

    def attention(self, q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float, softcap: float | None) -> Tensor:
        """Attention, see meaning.attention."""


class Fp32Arithmetic:
    """fp32 throughout. With ``rounded``, rounds to bf16 where ir.graph says the kernel does: materialised values, the
    operands of matrix products, attention's probabilities before their product."""

    dtype = torch.float32
    as_scheduled = True

    def __init__(self, rounded: bool) -> None:
        self._rounding = meaning.round_bf16 if rounded else None

    def store(self, x: Tensor) -> Tensor:
        return x if self._rounding is None else self._rounding(x)

    def evaluate(self, e: Expr, args: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        return meaning.evaluate(e, args, shape)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return meaning.linear(x, weight)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
        return meaning.rope(x, cos, sin, style)

    def attention(self, q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float, softcap: float | None) -> Tensor:
        return meaning.attention(q, keys, values, visible, scale, self._rounding, softcap)


class GraphModel:
    """A graph with weights and KV caches, run step by step under one arithmetic.

    ``weights`` maps checkpoint names, layer number filled in ("model.layers.3.mlp.up_proj.weight"), to tensors of the
    graph's shapes, of any float dtype; surplus ones are ignored. ``max_kv`` rows fit each cache. Raises ValueError that lists every weight
    that is missing or of another shape.

    ``kv_len`` is the number of rows in use; setting it to a smaller number forgets the later ones. ``caches`` maps
    (cache, layer) to keys and values, each (kv_heads, max_kv, head_dim). ``observe``, when set, is called with the name,
    the layer (0 outside the loop) and the content of every value as it is materialised.
    """

    def __init__(self, graph: Graph, weights: Mapping[str, Tensor], max_kv: int, arithmetic: Arithmetic, device: str = "cpu") -> None:
        self.graph = graph
        self.max_kv = max_kv
        self.kv_len = 0
        self.observe: Observer | None = None
        self._arithmetic = arithmetic
        self._device = torch.device(device)
        self._weights = {key: arithmetic.store(w.to(arithmetic.dtype)) for key, w in in_format(graph, weights, self._device)}
        self.caches = self._empty()

    def _empty(self) -> dict[tuple[str, int], tuple[Tensor, ...]]:
        shape = {op.cache: (op.kv_heads, self.max_kv, op.head_dim) for op in self.graph.ops if isinstance(op, Attention)}
        return {
            (op.cache, layer): tuple(torch.zeros(shape[op.cache], dtype=self._arithmetic.dtype, device=self._device) for _ in range(2))
            for op in self.graph.ops
            if isinstance(op, Attention)
            for layer in layers_of(op, self.graph)
        }

    def another(self) -> GraphModel:
        """One more sequence: the same weights, with empty caches of its own. A step of a batch means a step of each by itself."""
        found = copy(self)
        found.kv_len, found.caches = 0, found._empty()
        return found

    def step(
        self,
        token_ids: Sequence[int] | Tensor,
        positions: Sequence[int] | Tensor | None = None,
        ancestors: Sequence[int] | None = None,
        n: int | None = None,
    ) -> Tensor:
        """Logits, fp32 (n, vocab), of the first ``n`` of ``token_ids`` (default: all); appends their rows, kv_len += n.

        Of a graph without a sink: its last value, fp32 (n, features).
        ``positions`` default to kv_len, kv_len + 1, ...; ``ancestors`` to a chain (bit j of entry t: token t sees new
        token j; its own bit must be set). ``n`` is not bound by the graph's tokens: a whole prompt is one step. Raises
        ValueError when the caches are full, a token id is outside the vocabulary, or an own bit is missing.
        """
        count = len(token_ids) if n is None else n
        with torch.no_grad():
            run = _Step(
                self._integers(token_ids)[:count],
                self._integers(range(self.kv_len, self.kv_len + count) if positions is None else positions)[:count],
                meaning.visible_rows(self.kv_len, self._masks(ancestors, count), self._device),
            )
            self._check(run.token_ids, count)
            for op, layer in program(self.graph):
                self._run(op, layer, run)
        self.kv_len += count
        return run.result

    def _integers(self, numbers: Sequence[int] | Tensor) -> Tensor:
        return torch.as_tensor(numbers if isinstance(numbers, Tensor) else list(numbers), dtype=torch.int64, device=self._device)

    def _masks(self, ancestors: Sequence[int] | None, count: int) -> list[int]:
        if ancestors is None:
            return [(2 << t) - 1 for t in range(count)]
        masks = list(ancestors[:count])
        blind = [t for t, mask in enumerate(masks) if not mask >> t & 1]
        if blind or len(masks) < count:
            raise ValueError(f"ancestors need one mask per token with the token's own bit set; wrong for tokens {blind or len(masks)}")
        return masks

    def _check(self, token_ids: Tensor, count: int) -> None:
        if self.kv_len + count > self.max_kv:
            raise ValueError(f"KV cache full: {self.kv_len} rows in use, {count} new, room for {self.max_kv}")
        outside = token_ids[(token_ids < 0) | (token_ids >= self.graph.vocab)]
        if outside.numel():
            raise ValueError(f"token ids outside the vocabulary of {self.graph.vocab}: {outside.tolist()}")

    def _run(self, op: Op, layer: int, run: _Step) -> None:
        match op:
            case Embed():
                rows = meaning.embed(self._weight(op.table, layer), run.token_ids)
                self._put(
                    op.out,
                    layer,
                    rows if op.expr is None else self._arithmetic.evaluate(op.expr, {"x": rows}, (len(rows), rows.shape[1])),
                    run,
                )
            case RowMap():
                self._put(op.out, layer, self._fused(op.fused, op.features, layer, run, {}), run)
            case Linear():
                self._linear(op, layer, run)
            case Attention():
                self._attention(op, layer, run)
            case Custom():
                tensors = [self._operand(ref, layer, run) for ref in custom.operands(op)]
                self._put(op.out, layer, custom.meaning(op, tensors), run)

    def _put(self, name: str, layer: int, result: Tensor, run: _Step) -> None:
        run.values[name] = self._arithmetic.store(result)
        run.result = run.values[name].float()
        if self.observe is not None:
            self.observe(name, layer, run.values[name])

    def _weight(self, ref: WeightRef, layer: int) -> Tensor:
        return self._weights[weight_key(ref, layer)]

    def _operand(self, ref: ValueRef | WeightRef, layer: int, run: _Step) -> Tensor:
        if isinstance(ref, WeightRef):
            return self._weight(ref, layer)
        return run.values[ref.value][:, ref.begin : ref.begin + ref.features]

    def _fused(self, fused: Fused, features: int, layer: int, run: _Step, parts: Mapping[str, Tensor]) -> Tensor:
        def operand(ref: ValueRef | WeightRef) -> Tensor:
            if isinstance(ref, WeightRef) or ref.value not in parts:
                return self._operand(ref, layer, run)
            return parts[ref.value][:, ref.begin : ref.begin + ref.features]

        args = {name: operand(ref) for name, ref in fused.args}
        return self._arithmetic.evaluate(fused.expr, args, (len(run.token_ids), features))

    def _linear(self, op: Linear, layer: int, run: _Step) -> None:
        prologue, scale = op.prologue, None
        if op.factored is not None and self._arithmetic.as_scheduled:
            scale = self._fused(replace(prologue, expr=op.factored.scale), op.columns, layer, run, {})[:, :1]
            prologue = replace(prologue, expr=op.factored.operand)
        x = self._arithmetic.store(self._fused(prologue, op.columns, layer, run, {}))
        parts = {part.name: self._part(part, x, scale, layer, run) for part in op.parts}
        if op.epilogue is not None:
            result = self._fused(op.epilogue, op.out_features, layer, run, parts)
        else:
            result = torch.cat(list(parts.values()), dim=1)
        if op.out is not None:
            self._put(op.out, layer, result, run)
        if op.sink is not None:
            run.result = result.float()  # raw: the logits are not rounded

    def _part(self, part: Part, x: Tensor, scale: Tensor | None, layer: int, run: _Step) -> Tensor:
        product = self._arithmetic.linear(x, self._weight(part.weight, layer))
        if scale is not None:
            product = scale * product
        if part.bias is not None:
            product = product + self._weight(part.bias, layer)
        if part.turned is None:
            return product
        return self._rotated(product.view(len(product), -1, part.turned.head_dim), part.turned, layer, run).flatten(1)

    def _rotated(self, heads: Tensor, rope: Rope, layer: int, run: _Step) -> Tensor:
        cos, sin = run.angles(rope.at(layer))
        return self._arithmetic.rope(heads, cos, sin, rope.style)

    def _mapped(self, op: Attention, which: str, heads: Tensor, layer: int, run: _Step) -> Tensor:
        """q or k (n, heads, D) as attention takes it: through its map over heads and rotated, where it comes without either."""
        if not op.maps:
            return heads
        fused = dict(op.maps).get(which)
        if fused is not None:
            rows = heads.flatten(0, 1)
            args = {name: self._weight(ref, layer) if isinstance(ref, WeightRef) else rows for name, ref in fused.args}
            heads = self._arithmetic.evaluate(fused.expr, args, (len(rows), op.head_dim)).view(heads.shape)
        return self._arithmetic.store(heads if op.rope is None else self._rotated(heads, op.rope, layer, run))

    def _attention(self, op: Attention, layer: int, run: _Step) -> None:
        def heads(ref: ValueRef) -> Tensor:
            return run.values[ref.value][:, ref.begin : ref.begin + ref.features].view(len(run.token_ids), -1, op.head_dim)

        keys, values = self.caches[op.cache, layer]
        meaning.append(keys, self._mapped(op, "k", heads(op.k), layer, run), self.kv_len)
        meaning.append(values, heads(op.v), self.kv_len)
        rows = run.visible.shape[1]
        q = self._mapped(op, "q", heads(op.q), layer, run)
        window = at_layer(op.window, layer)
        visible = run.visible if window is None else meaning.windowed(run.visible, window)
        out = self._arithmetic.attention(q, keys[:, :rows], values[:, :rows], visible, op.scale, op.softcap)
        self._put(op.out, layer, out.flatten(1), run)


class ReferenceModel(GraphModel):
    """The graph in fp32 arithmetic.

    ``mode`` "fp32" rounds nothing, not even weights: the oracle, given weights that are bf16 or rounded to it. ``mode``
    "bf16" rounds weights, and then exactly where ir.graph says that the kernel does. See GraphModel for the other
    arguments and errors.
    """

    def __init__(self, graph: Graph, weights: Mapping[str, Tensor], max_kv: int, mode: str, device: str = "cpu") -> None:
        if mode not in ("bf16", "fp32"):
            raise ValueError(f"mode is 'bf16' or 'fp32', not {mode!r}")
        if torch.device(device).type == "cuda" and torch.get_float32_matmul_precision() != "highest":
            raise ValueError("fp32 products would run in TF32: call torch.set_float32_matmul_precision('highest') first")
        super().__init__(graph, weights, max_kv, Fp32Arithmetic(rounded=mode == "bf16"), device)


class _Step:
    """What one step's ops share: inputs, the values so far, the newest result (at the end: the logits)."""

    def __init__(self, token_ids: Tensor, positions: Tensor, visible: Tensor) -> None:
        self.token_ids = token_ids
        self.visible = visible
        self.values: dict[str, Tensor] = {}
        self.result = torch.empty(0)
        self._positions = positions
        self._angles: dict[Rope, tuple[Tensor, Tensor]] = {}

    def angles(self, rope: Rope) -> tuple[Tensor, Tensor]:
        if rope not in self._angles:
            self._angles[rope] = meaning.rope_table(self._positions, rope.frequencies, rope.amplitude)
        return self._angles[rope]


def layers_of(op: Op, graph: Graph) -> range:
    return range(graph.layers if op.loop is not None else 1)


def program(graph: Graph) -> list[tuple[Op, int]]:
    """Every op with its layer, in the order of execution: the loop's ops, which stand together, once per layer."""
    before = [op for op in graph.ops if op.loop is None]
    body = [op for op in graph.ops if op.loop is not None]
    if not body:
        return [(op, 0) for op in before]
    begin = graph.ops.index(body[0])
    looped = [(op, layer) for layer in range(graph.layers) for op in body]
    return [(op, 0) for op in before[:begin]] + looped + [(op, 0) for op in before[begin:]]


def checkpoint_name(ref: WeightRef, layer: int) -> str:
    return ref.name.replace("{layer}", str(layer))


def weight_key(ref: WeightRef, layer: int) -> str:
    """Tells a weight from the same one in another format: an output head may be tied to a table of embeddings that stays bf16."""
    name = checkpoint_name(ref, layer)
    return name if ref.format == PLAIN else f"{name} as {ref.format}"


def _weight_refs(op: Op) -> list[WeightRef]:
    match op:
        case Embed():
            return [op.table]
        case RowMap():
            return [ref for _, ref in op.fused.args if isinstance(ref, WeightRef)]
        case Linear():
            fused = [op.prologue, *([op.epilogue] if op.epilogue is not None else [])]
            vectors = [ref for f in fused for _, ref in f.args if isinstance(ref, WeightRef)]
            return [*vectors, *(part.weight for part in op.parts), *(part.bias for part in op.parts if part.bias is not None)]
        case Attention():
            return [ref for _, fused in op.maps for _, ref in fused.args if isinstance(ref, WeightRef)]
        case Custom():
            return [ref for _, ref in op.weights]


def in_format(graph: Graph, weights: Mapping[str, Tensor], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """All weights that the graph reads, each once, by :func:`weight_key`: as given, or what their format makes of them, in fp32."""
    refs = {weight_key(ref, layer): (ref, layer) for op in graph.ops for ref in _weight_refs(op) for layer in layers_of(op, graph)}
    shapes = {checkpoint_name(ref, layer): ref.shape for ref, layer in refs.values()}
    problems = [f"{name} is missing" for name in shapes if name not in weights]
    problems += [
        f"{name} has shape {tuple(weights[name].shape)}, not {shape}"
        for name, shape in shapes.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    if problems:
        raise ValueError("weights do not fit the graph: " + "; ".join(problems))
    for key, (ref, layer) in refs.items():
        yield key, dequantised(ref.format, weights[checkpoint_name(ref, layer)].to(device))
