"""Graph: fused ops between materialised values. Produced by lower/, consumed by lower/ and reference/.

A *value* is an activation that blocks exchange: bf16, (tokens, features). It is rounded to bf16 exactly once, when it is
materialised; everything inside a fused expression stays fp32. reference/ rounds at the same points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from megadsl.ir.custom import CustomCall
from megadsl.ir.expr import Expr, Reduce, arg_names, reductions
from megadsl.ir.formats import PANEL_COLUMNS, PLAIN
from megadsl.source import Span
from megadsl.types import PerLayer, at_layer, round_up


@dataclass(frozen=True)
class ValueRef:
    """Features [begin, begin + features) of a value."""

    value: str
    begin: int
    features: int


@dataclass(frozen=True)
class WeightRef:
    """A weight as the checkpoint names it; ``{layer}`` in the name when it exists once per layer."""

    name: str
    shape: tuple[int, ...]
    per_layer: bool
    format: str = PLAIN  # as a linear multiplies it: a key of ir.formats.FORMATS


@dataclass(frozen=True)
class Fused:
    """An expression over named operands: values (elementwise over features) and vector weights of the same length."""

    expr: Expr
    args: tuple[tuple[str, ValueRef | WeightRef], ...]


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies of a rotation are stretched for contexts longer than those a model was first trained on.

    ``kind`` "linear": all divided by ``factor``. "llama3": those with fewer than ``low`` turns in ``positions`` positions are, those
    with more than ``high`` stay, and between them goes over from one to the other, linearly in the number of turns. "yarn": the same,
    but linearly in the number of the pair, counted from whole pairs where ``whole``; what is rotated is multiplied by ``amplitude``.
    """

    kind: str
    factor: float
    low: float = 1.0
    high: float = 4.0
    positions: int = 8192
    amplitude: float = 1.0
    whole: bool = True

    def stretched(self, theta: float, pairs: int) -> Iterator[float]:
        """What becomes of the frequencies theta ** (-i / pairs), in radians per position."""
        for i in range(pairs):
            frequency: float = theta ** (-i / pairs)
            kept = self._kept(frequency, i, theta, pairs)
            yield (1 - kept) * frequency / self.factor + kept * frequency

    def _kept(self, frequency: float, pair: int, theta: float, pairs: int) -> float:
        """Which part of it stays as it is."""
        if self.kind == "linear":
            return 0.0
        if self.kind == "llama3":
            turns = self.positions * frequency / math.tau
            return min(max((turns - self.low) / (self.high - self.low), 0.0), 1.0)
        # the pairs, as real numbers, that turn so often
        first, last = (pairs * math.log(self.positions / (turns * math.tau)) / math.log(theta) for turns in (self.high, self.low))
        if self.whole:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        return 1.0 - min(max((pair - first) / (last - first or 0.001), 0.0), 1.0)


@dataclass(frozen=True)
class LongRope(RopeScaling):
    """ "longrope": each pair's frequency is divided by a number of its own, in texts of up to ``positions`` positions by another than in
    longer ones. ``divisors`` are the first, ``beyond`` the second; once it is known how long texts can get, there is no ``beyond``."""

    divisors: tuple[float, ...] = ()
    beyond: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("divisors", "beyond"):  # a manifest that was a file has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def within(self, rows: int) -> LongRope:
        """That of texts which may have up to ``rows`` positions."""
        return replace(self, divisors=self.beyond if self.beyond and rows > self.positions else self.divisors, beyond=())

    def stretched(self, theta: float, pairs: int) -> Iterator[float]:
        assert not self.beyond, "which of the two follows from the rows of the cache"
        return (theta ** (-i / pairs) / divisor for i, divisor in zip(range(pairs), self.divisors, strict=True))


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of heads of ``head_dim`` features, of which the first R = ``rotary_dim`` are rotated; ``style`` is "half" (pairs
    i, i + R/2) or "interleaved" (pairs 2i, 2i + 1). Angles are position * frequencies[i]. ``theta`` and ``scaling`` may differ from layer
    to layer: ``tables`` are the rotations there are."""

    head_dim: int
    theta: float | PerLayer[float]
    style: str
    scaling: RopeScaling | PerLayer[RopeScaling | None] | None = None
    rotary_dim: int = 0  # 0 for all: __post_init__ puts head_dim there

    def __post_init__(self) -> None:
        object.__setattr__(self, "rotary_dim", self.rotary_dim or self.head_dim)

    @property
    def paired(self) -> int:
        """So many of a head's first features are packed pair by pair, rather than in their own order."""
        return self.rotary_dim if self.style == "half" else 0

    def at(self, layer: int) -> Rope:
        """The rotation of one layer."""
        return replace(self, theta=at_layer(self.theta, layer), scaling=at_layer(self.scaling, layer))

    @property
    def tables(self) -> tuple[Rope, ...]:
        """The rotations of all layers, each once."""
        return tuple(dict.fromkeys(self.at(layer) for layer in range(self.layers)))

    @property
    def layers(self) -> int:
        """So many layers have a rotation of their own; 1 where all have the same."""
        return max((len(v.values) for v in (self.theta, self.scaling) if isinstance(v, PerLayer)), default=1)

    def within(self, rows: int) -> Rope:
        """This rotation where texts may have up to ``rows`` positions."""

        def of(scaling: RopeScaling | None) -> RopeScaling | None:
            return scaling.within(rows) if isinstance(scaling, LongRope) else scaling

        each = PerLayer(tuple(map(of, self.scaling.values))) if isinstance(self.scaling, PerLayer) else of(self.scaling)
        return replace(self, scaling=each)

    @property
    def frequencies(self) -> tuple[float, ...]:
        """Radians per position of each of the R / 2 pairs: theta ** (-2 i / R), scaled where there is one. Of one layer's rotation."""
        theta, scaling = self.theta, self.scaling
        assert not isinstance(theta, PerLayer) and not isinstance(scaling, PerLayer), "ask one of the tables"
        if scaling is not None:
            return tuple(scaling.stretched(theta, self.rotary_dim // 2))
        return tuple(theta ** (-2.0 * i / self.rotary_dim) for i in range(self.rotary_dim // 2))

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by. Of one layer's rotation."""
        scaling = self.scaling
        assert not isinstance(scaling, PerLayer), "ask one of the tables"
        return 1.0 if scaling is None else scaling.amplitude


@dataclass(frozen=True)
class Part:
    """Rows of a linear that come from one named weight of shape (rows, columns); ``bias`` (rows,) is added to their products first.
    With ``late`` whoever reads them rotates them."""

    name: str
    weight: WeightRef
    rows: int
    rope: Rope | None = None
    bias: WeightRef | None = None
    late: bool = False

    @property
    def turned(self) -> Rope | None:
        """The rotation of the rows as they are materialised."""
        return None if self.late else self.rope


@dataclass(frozen=True)
class Embed:
    """value[t, :] = table[token_ids[t], :], or an expression over an argument x of that."""

    name: str
    table: WeightRef
    out: str
    loop: str | None
    span: Span
    expr: Expr | None = None


@dataclass(frozen=True)
class Factored:
    """A prologue's expression as ``operand * scale``, over the prologue's arguments: ``operand`` differs from feature to
    feature, ``scale`` is the same for all features of a row."""

    operand: Expr
    scale: Expr


@dataclass(frozen=True)
class Linear:
    """out = epilogue(parts @ prologue(inputs)).

    prologue: operands all have the matrix's column count; its result is rounded to bf16 (the mma operand). With ``factored``
    only the operand factor is, and the row's scale multiplies the fp32 products: out = epilogue(scale * (parts @ operand)).
    parts: matrices stacked by rows; all of them have a bias or none has. Without an epilogue the out value is the parts one after the
    other (each rotated if it has a rope that is not late), rounded to bf16. With one, ``epilogue.args`` may name parts (all of equal
    rows) and values of that many features; the expression's fp32 result is rounded once. With ``sink`` the raw fp32 products are
    the logits, or an epilogue over them alone, not rounded: "logits" stores them, "argmax" also writes the smallest index of the largest
    logit per token.
    """

    name: str
    prologue: Fused
    columns: int
    parts: tuple[Part, ...]
    epilogue: Fused | None
    out: str | None
    sink: str | None
    loop: str | None
    span: Span
    factored: Factored | None = None

    @property
    def rows(self) -> int:
        return sum(p.rows for p in self.parts)

    @property
    def biased(self) -> bool:
        return self.parts[0].bias is not None

    @property
    def format(self) -> str:
        """Of the weights, a key of ir.formats.FORMATS: all parts have one."""
        return self.parts[0].weight.format

    @property
    def out_features(self) -> int:
        return self.parts[0].rows if self.epilogue is not None else self.rows


@dataclass(frozen=True)
class Attention:
    """out[t, h] = softmax(scale * q[t, h] . k) @ v over all cached rows and those new rows j with ancestors[t] bit j.

    Appends this step's k and v to ``cache`` at rows kv_len + t. Query head h reads KV head h // (heads / kv_heads).
    Probabilities are rounded to bf16 for the second product, the sum of the row is taken in fp32 before rounding.

    ``q_map`` and ``k_map``: what is made of each head of q and of k first, an expression over its head_dim features and vectors of as
    many elements, whose reductions run over the head. Where there is one, q and k come unrotated: both are rotated by
    ``rope`` behind their maps, in fp32, and rounded to bf16 once.

    With ``window`` a token sees the newest so many of these rows, itself included; each layer may have its own. With ``softcap`` a score
    s becomes softcap * tanh(s / softcap), where s is scaled already.
    """

    name: str
    q: ValueRef
    k: ValueRef
    v: ValueRef
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None
    cache: str
    out: str
    loop: str | None
    span: Span
    q_map: Fused | None = None
    k_map: Fused | None = None
    window: int | PerLayer[int | None] | None = None
    softcap: float | None = None

    @property
    def cache_dim(self) -> int:
        """Features that a head takes room for in a cache and among the queries: whole panels of 32."""
        return round_up(self.head_dim, PANEL_COLUMNS)

    @property
    def maps(self) -> tuple[tuple[str, Fused], ...]:
        """The maps over heads there are, by what they are of."""
        return tuple((which, fused) for which, fused in (("q", self.q_map), ("k", self.k_map)) if fused is not None)


@dataclass(frozen=True)
class Custom:
    """out = what the user's role function makes of ``inputs``, whole rows of values, and of ``weights``, each by the name of its argument.
    Every block has all rows of the inputs and computes the features that it owns."""

    name: str
    call: CustomCall
    inputs: tuple[tuple[str, ValueRef], ...]
    weights: tuple[tuple[str, WeightRef], ...]
    out: str
    loop: str | None
    span: Span


@dataclass(frozen=True)
class RowMap:
    """out = fused(values, vectors): a value that is made of others without a matrix, rounded to bf16 once.

    Its reductions run over whole rows of one value, ``reduced``, which every block gathers; of the other operands, and of that value
    outside of reductions, a block reads the features that it owns. What is added to a residual behind a norm is such a map:
    ``x + y * rsqrt(mean(y * y) + eps) * w``.
    """

    name: str
    fused: Fused
    features: int
    out: str
    loop: str | None
    span: Span

    @property
    def reductions(self) -> tuple[Reduce, ...]:
        return tuple(reductions(self.fused.expr))

    @property
    def reduced(self) -> tuple[str, ValueRef]:
        """The argument that reductions are over, and the features it stands for."""
        over = arg_names(self.reductions[0].operand)
        return next((name, ref) for name, ref in self.fused.args if name in over and isinstance(ref, ValueRef))


Op: TypeAlias = Embed | Linear | Attention | Custom | RowMap


@dataclass(frozen=True)
class Value:
    """A materialised activation. A loop-carried value has two producers: ``initial`` (before the loop) and ``producer``."""

    name: str
    features: int
    producer: str
    initial: str | None
    span: Span


@dataclass(frozen=True)
class Graph:
    """Ops in program order. ``layers`` is the trip count of the one layer loop (0 when the spec has none)."""

    name: str
    tokens: int
    layers: int
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    vocab: int
    span: Span

    def op(self, name: str) -> Op:
        return next(o for o in self.ops if o.name == name)

    def value(self, name: str) -> Value:
        return next(v for v in self.values if v.name == name)


def kept_values(op: Linear | RowMap) -> list[tuple[str, ValueRef]]:
    """Values of which a block reads the features that it owns of the op's: those that an epilogue combines with the op's own rows
    (operands that name a part are the op's products), or all that a map of rows reads."""
    if isinstance(op, RowMap):
        return [(name, ref) for name, ref in op.fused.args if isinstance(ref, ValueRef)]
    fused: Fused | None = op.epilogue
    parts = {p.name for p in op.parts}
    return [] if fused is None else [(name, ref) for name, ref in fused.args if isinstance(ref, ValueRef) and ref.value not in parts]
