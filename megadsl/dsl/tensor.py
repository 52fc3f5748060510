"""What a user's function holds while it is traced: tensors, caches and the layer of a loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

from megadsl.diagnostics import Collector, MegadslError, declare
from megadsl.expr.fold import fp32
from megadsl.expr.parser import NOT_FINITE
from megadsl.ir.expr import Arg, Binary, Const, Expr, Unary
from megadsl.ir.spec import Tensor as SpecTensor
from megadsl.source import Span, caller_span
from megadsl.types import Drawn, DType

APPENDED_TWICE = declare(
    "MK106", "cache {cache!r} is appended to twice in one step", "append once per step; declare a second cache for a second attention"
)
OPERAND = declare("MK139", "{op}: the other operand is {value}", "use a tensor of the same features or a number")
UNDEFINED = declare("MK221", "tensors of a kernel have no {what}", "{how}")
CACHE_OUTSIDE = declare(
    "MK143",
    "cache {cache!r} is declared {declared} mk.layers and appended to {used} it",
    "inside the loop use layer.kv_cache(...), outside it mk.kv_cache(...)",
)
LAYER_CLOSED = declare("MK107", "the layer of a loop is used outside the loop's body", "move the line into the body of mk.layers")

Scalar = int | float

_PRODUCT = "write mk.linear(x, w), with w of shape (out_features, in_features)"
_EXPRESSION = 'write an expression, such as mk.map("x ** 2", x=x) or mk.map("max(x, 0)", x=x)'
_PARTS = "take the parts from a linear of several weights: a, b = mk.linear(x, w_a, w_b)"
_EQUALITY = "compare handles with `is`, or decide by fields of the configuration: what a tensor holds is known on the GPU only"
_VALUE = "decide by fields of the configuration: what a tensor holds is known on the GPU only"


def shown(value: object) -> str:
    """``str 'x'``: a value that is not what was asked for, as messages show it."""
    return "None" if value is None else f"{type(value).__name__} {value!r}"


class Recorder(Protocol):
    """What the handles below need of the tracer."""

    found: Collector

    @property
    def in_loop(self) -> bool: ...

    def fail(self, code: str, span: Span, **fields: object) -> MegadslError: ...

    def node(
        self, op: str, name: str, inputs: Sequence[object], outputs: Sequence[str], span: Span, attrs: Mapping[str, Any] = ...
    ) -> tuple[Tensor, ...]: ...

    def map(self, name: str, expr: Expr, operands: Mapping[str, Tensor], span: Span) -> Tensor: ...

    def weight(
        self, name: str, shape: int | tuple[int, ...], dtype: str | DType, *, per_layer: bool, span: Span, random: Drawn | None = ...
    ) -> Tensor: ...

    def kv_cache(self, name: str, kv_heads: int, head_dim: int, *, per_layer: bool, span: Span) -> KVCache: ...


class Tensor:
    """A tensor of the kernel being traced. ``+ - * /`` with tensors of the same features and with numbers make maps.

    ``shape`` is (tokens, features) for activations, (rows, columns) or (length,) for weights; ``dtype`` is the element type.
    """

    def __init__(self, tracer: Recorder, spec: SpecTensor) -> None:
        self.tracer = tracer
        self.spec = spec

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> DType:
        return self.spec.dtype

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, shape={list(self.shape)}, dtype={self.dtype.value})"

    def __add__(self, other: Tensor | Scalar) -> Tensor:
        return self._binary("add", other)

    def __radd__(self, other: Scalar) -> Tensor:
        return self._binary("add", other, swap=True)

    def __sub__(self, other: Tensor | Scalar) -> Tensor:
        return self._binary("sub", other)

    def __rsub__(self, other: Scalar) -> Tensor:
        return self._binary("sub", other, swap=True)

    def __mul__(self, other: Tensor | Scalar) -> Tensor:
        return self._binary("mul", other)

    def __rmul__(self, other: Scalar) -> Tensor:
        return self._binary("mul", other, swap=True)

    def __truediv__(self, other: Tensor | Scalar) -> Tensor:
        return self._binary("div", other)

    def __rtruediv__(self, other: Scalar) -> Tensor:
        return self._binary("div", other, swap=True)

    def __neg__(self) -> Tensor:
        return self.tracer.map("neg", Unary("neg", Arg("a")), {"a": self}, caller_span())

    def __matmul__(self, other: object) -> NoReturn:
        self._refuse("@", _PRODUCT)

    def __pow__(self, other: object) -> NoReturn:
        self._refuse("**", _EXPRESSION)

    def __lt__(self, other: object) -> NoReturn:
        self._refuse("comparison", _EXPRESSION)

    __gt__ = __le__ = __ge__ = __lt__

    def __eq__(self, other: object) -> NoReturn:
        self._refuse("equality", _EQUALITY)

    __ne__ = __eq__
    __hash__ = object.__hash__  # Python looks up by identity first: a tensor may be a key

    def __getitem__(self, index: object) -> NoReturn:
        self._refuse("elements", _PARTS)

    def __iter__(self) -> NoReturn:
        self._refuse("elements", _PARTS)

    def __bool__(self) -> NoReturn:
        self._refuse("value while they are traced", _VALUE)

    __len__ = __float__ = __int__ = __bool__

    def _refuse(self, what: str, how: str) -> NoReturn:
        raise self.tracer.fail(UNDEFINED, caller_span(), what=what, how=how)

    def _binary(self, op: str, other: Tensor | Scalar, swap: bool = False) -> Tensor:
        if isinstance(other, bool) or not isinstance(other, Tensor | int | float):
            raise self.tracer.fail(OPERAND, caller_span(), op=op, value=shown(other))
        if isinstance(other, Tensor):
            same = other is self
            right: Expr = Arg("a") if same else Arg("b")
            operands = {"a": self} if same else {"a": self, "b": other}
        else:
            right, operands = self._constant(other), {"a": self}
        left: Expr = Arg("a")
        if swap:
            left, right = right, left
        return self.tracer.map(op, Binary(op, left, right), operands, caller_span())

    def _constant(self, value: Scalar) -> Const:
        try:
            return Const(fp32(float(value)))
        except ArithmeticError:
            raise self.tracer.fail(NOT_FINITE, caller_span(), text=f"{value:g}") from None


class KVCache:
    """A cache of k and v rows, bf16, ``kv_heads`` heads of ``head_dim`` features; one per layer inside mk.layers."""

    def __init__(self, tracer: Recorder, spec: SpecTensor) -> None:
        self.tracer = tracer
        self.declared = Tensor(tracer, spec)
        self.appended: Tensor | None = None

    @property
    def name(self) -> str:
        return self.declared.name

    def append(self, k: Tensor, v: Tensor) -> KVCache:
        """Append this step's rows: k, v of shape (tokens, kv_heads * head_dim). Returns the cache.

        MK106 on a second append, MK121 when the features do not fit, MK143 for a cache from the other side of mk.layers.
        """
        span = caller_span()
        if self.declared.spec.per_layer != self.tracer.in_loop:
            declared, used = ("inside", "outside") if self.declared.spec.per_layer else ("outside", "inside")
            self.tracer.found.add(CACHE_OUTSIDE, span, cache=self.name, declared=declared, used=used)
        if self.appended is not None:
            self.tracer.found.add(APPENDED_TWICE, span, cache=self.name)
            return self
        (self.appended,) = self.tracer.node("kv_append", "kv_append", (k, v, self.declared), [f"{self.name}.new"], span)
        return self


class Layer:
    """The current layer inside ``for layer in mk.layers(n)``: the source of what exists once per layer."""

    def __init__(self, tracer: Recorder, prefix: str) -> None:
        self._tracer = tracer
        self._prefix = prefix
        self._open = True

    def close(self) -> None:
        self._open = False

    def weight(self, name: str, shape: int | tuple[int, ...], dtype: str | DType = DType.BF16, *, random: Drawn | None = None) -> Tensor:
        """The weight ``<prefix>.<layer>.<name>.weight`` of the checkpoint, bf16, of shape (rows, columns) or (length,).

        ``random``: mean and standard deviation of its elements where there is no checkpoint, as of mk.weight. MK101 unknown dtype,
        MK103 declared before with another shape, MK104 a dimension that is no positive integer, MK222 no number.
        """
        self._check_open()
        name = f"{self._prefix}.{{layer}}.{name}"
        return self._tracer.weight(name, shape, dtype, per_layer=True, span=caller_span(), random=random)

    def kv_cache(self, kv_heads: int, head_dim: int, name: str = "kv") -> KVCache:
        """This layer's KV cache. MK104 when a dimension is no positive integer."""
        self._check_open()
        return self._tracer.kv_cache(name, kv_heads, head_dim, per_layer=True, span=caller_span())

    def _check_open(self) -> None:
        if not self._open:
            raise self._tracer.fail(LAYER_CLOSED, caller_span())
