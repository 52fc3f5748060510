"""The recorder behind mk.*: collects tensors, nodes and the loop of the kernel being traced."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

from megadsl.diagnostics import Collector, MegadslError, declare, diagnose, error
from megadsl.dsl.naming import unique
from megadsl.dsl.tensor import KVCache, Tensor, shown
from megadsl.ir.expr import Expr
from megadsl.ir.spec import Loop, Node
from megadsl.ir.spec import Tensor as SpecTensor
from megadsl.ops import outline
from megadsl.ops.base import shape_text
from megadsl.source import Span, caller_span
from megadsl.types import Drawn, DType, Lifetime, PerLayer

T = TypeVar("T")

NO_KERNEL = declare(
    "MK100", "mk.{what} is called outside a kernel", "call it inside a function decorated with @mk.kernel, during .trace(...)"
)
DTYPE_UNKNOWN = declare(
    "MK101", "{what}: unknown dtype {dtype!r}", 'weights are dtype="bf16"; other checkpoint types are converted on loading'
)
WEIGHT_TWICE = declare(
    "MK103",
    "weight {name!r} is declared with {what} {now}, but before with {before} at {where}",
    "give both the same {what}, or one of them another name",
)
DIMENSION = declare("MK104", "{what}: dimension {value!r} is not a positive integer", "shapes are positive integers (use // for divisions)")
NOT_A_TENSOR = declare(
    "MK105",
    "{what}: expected a tensor, got {value}",
    "pass one tensor, as mk.embed and mk.linear return it; a linear of several weights returns one for each",
)
NOT_A_NUMBER = declare("MK222", "{what} = {value!r} is not a number {range}", "give a plain number {range}")
NOT_TEXT = declare("MK223", "{what} is {value}, not a string", "give a string, such as {example}")
OTHER_TRACE = declare(
    "MK108", "{what}: tensor {tensor!r} belongs to another kernel", "build all tensors inside the function that is being traced"
)
NAME_TWICE = declare("MK109", "two ops are called {name!r}", "give each op its own name=; schedules refer to ops by name")
STALE_INITIAL = declare(
    "MK142",
    "{node} reads the value that {variable!r} had before the loop, which the loop has overwritten",
    "read {variable!r} itself (its value after the last layer), or do this before the loop",
)
LAYER_WEIGHT = declare(
    "MK144",
    "{node} reads {weight!r}, which exists once per layer, outside the loop",
    "declare the weight with mk.weight, or move the op inside",
)

PER_LAYER = declare(
    "MK256",
    "{what} is given for {count} layers, but {where}",
    "give mk.per_layer one value for each layer, inside mk.layers, or the one value that all layers have",
)


@dataclass
class OpenLoop:
    """The loop whose body is being recorded, and the index of its first node."""

    loop: Loop
    first_node: int


class Tracer:
    """Records one kernel. Mistakes that leave a plausible shape are collected; the others raise with all before them."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.tensors: dict[str, SpecTensor] = {}
        self.nodes: list[Node] = []
        self.loops: list[Loop] = []
        self.open: OpenLoop | None = None
        self.overwritten: dict[str, str] = {}  # tensor that entered a closed loop -> its variable
        self.found = Collector()

    @property
    def in_loop(self) -> bool:
        return self.open is not None

    def fail(self, code: str, span: Span, **fields: object) -> MegadslError:
        """The error to raise when tracing cannot go on; it carries what was found before."""
        return MegadslError([*self.found.found, diagnose(code, span, "", **fields)])

    def declare(self, spec: SpecTensor) -> Tensor:
        self.tensors[spec.name] = spec
        return Tensor(self, spec)

    def dimensions(self, what: str, shape: object, span: Span) -> tuple[int, ...]:
        """``shape`` as a tuple; MK104 for what is no positive integer (which then counts as the nearest one, or 1)."""
        dims = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
        return tuple(self._dimension(what, d, span) for d in dims)

    def _dimension(self, what: str, value: object, span: Span) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        self.found.add(DIMENSION, span, what=what, value=value)
        return max(1, int(value)) if isinstance(value, float) and math.isfinite(value) else 1

    def number(self, what: str, value: object, span: Span, *, least: float | None = None, above: float | None = None) -> float:
        """``value`` as a float; MK222 when it is no finite number of at least ``least`` and above ``above`` (then 1.0)."""
        ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if ok and (least is None or value >= least) and (above is None or value > above):  # type: ignore[operator]
            return float(value)  # type: ignore[arg-type]
        wanted = f"of at least {least:g}" if least is not None else f"above {above:g}" if above is not None else "that is finite"
        self.found.add(NOT_A_NUMBER, span, what=what, value=value, range=wanted)
        return 1.0

    def each_layer(self, what: str, value: object, span: Span, of: Callable[[Any], T]) -> T | PerLayer[T]:
        """``of`` the value, or of each layer's where mk.per_layer gives them; MK256 when these are not as many as there are layers."""
        if not isinstance(value, PerLayer):
            return of(value)
        layers = 0 if self.open is None else self.open.loop.count
        if len(value.values) != layers:
            where = f"the loop has {layers}" if layers else "the op stands outside the layer loop"
            raise self.fail(PER_LAYER, span, what=what, count=len(value.values), where=where)
        return PerLayer(tuple(of(v) for v in value.values)).alike()

    def text(self, what: str, value: object, example: str, span: Span) -> str:
        """``value``; MK223 when it is no string."""
        if not isinstance(value, str):
            raise self.fail(NOT_TEXT, span, what=what, value=shown(value), example=example)
        return value

    def weight(
        self, name: str, shape: int | tuple[int, ...], dtype: str | DType, *, per_layer: bool, span: Span, random: Drawn | None = None
    ) -> Tensor:
        self.text("the name of a weight", name, '"q_proj"', span)
        full = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
        dims = self.dimensions(f"weight {full!r}", shape, span)
        if dtype not in (DType.BF16, DType.BF16.value):
            self.found.add(DTYPE_UNKNOWN, span, what=f"weight {full!r}", dtype=dtype.value if isinstance(dtype, DType) else dtype)
        drawn = None if random is None else self._drawn(f"weight {full!r}: random", random, span)
        before = self.tensors.get(full)
        if before is None:
            return self.declare(SpecTensor(full, dims, DType.BF16, Lifetime.WEIGHT, span, per_layer, drawn))
        if before.shape != dims:
            what, now, then = "shape", shape_text(dims), shape_text(before.shape)
        elif random is not None and before.random != drawn:
            what, now, then = "random", str(drawn), str(before.random)
        else:
            return Tensor(self, before)
        self.found.add(WEIGHT_TWICE, span, name=full, what=what, now=now, before=then, where=before.span.short)
        return Tensor(self, before)

    def _drawn(self, what: str, value: object, span: Span) -> Drawn:
        """Mean and standard deviation; MK222 for what is no pair of numbers, or a deviation below zero."""
        mean, deviation = value if isinstance(value, tuple | list) and len(value) == 2 else (value, 0)
        return self.number(f"{what}, mean", mean, span), self.number(f"{what}, deviation", deviation, span, least=0)

    def kv_cache(self, name: str, kv_heads: int, head_dim: int, *, per_layer: bool, span: Span) -> KVCache:
        self.text("the name of a cache", name, '"kv"', span)
        dims = self.dimensions(f"KV cache {name!r}", (kv_heads, head_dim), span)
        spec = SpecTensor(unique(name, self.tensors), dims, DType.BF16, Lifetime.STATE, span, per_layer)
        return KVCache(self, self.declare(spec).spec)

    def node(
        self,
        op: str,
        name: str,
        inputs: Sequence[object],
        outputs: Sequence[str],
        span: Span,
        attrs: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[Tensor, ...]:
        """Record an op. ``name`` and ``outputs`` are made unique; shapes come from the op's family."""
        tensors = [self._operand(name, value, span) for value in inputs]
        op_name = unique(name, {n.name for n in self.nodes})
        loop = self.open.loop.name if self.open else None
        node = Node(op, op_name, tuple(t.name for t in tensors), (), span, loop, MappingProxyType(dict(attrs)))
        results = []
        for output, out in zip(outputs, outline(node, tuple(t.spec for t in tensors), self.found), strict=True):
            per_layer = out.lifetime is Lifetime.STATE and self.in_loop
            results.append(self.declare(SpecTensor(unique(output, self.tensors), out.shape, out.dtype, out.lifetime, span, per_layer)))
        self.nodes.append(replace(node, outputs=tuple(t.name for t in results)))
        return tuple(results)

    def map(self, name: str, expr: Expr, operands: Mapping[str, Tensor], span: Span) -> Tensor:
        """Record an expression; ``operands`` gives each argument of ``expr`` its tensor."""
        (out,) = self.node("map", name, tuple(operands.values()), [name], span, {"expr": expr, "args": tuple(operands)})
        return out

    def head_map(self, name: str, expr: Expr, operands: Mapping[str, Tensor], head_dim: object, span: Span) -> Tensor:
        """Record an expression over each head of ``head_dim`` features."""
        (dim,) = self.dimensions(f"head_dim of {name}", head_dim, span)
        attrs = {"expr": expr, "args": tuple(operands), "head_dim": dim}
        (out,) = self.node("head_map", name, tuple(operands.values()), [name], span, attrs)
        return out

    def require_new_name(self, name: str, span: Span) -> None:
        """MK109 when the user names an op as another one is named."""
        if any(n.name == name for n in self.nodes):
            self.found.add(NAME_TWICE, span, name=name)

    def _operand(self, what: str, value: object, span: Span) -> Tensor:
        if not isinstance(value, Tensor):
            raise self.fail(NOT_A_TENSOR, span, what=what, value=shown(value))
        if value.tracer is not self:
            raise self.fail(OTHER_TRACE, span, what=what, tensor=value.name)
        if value.name in self.overwritten:
            self.found.add(STALE_INITIAL, span, node=what, variable=self.overwritten[value.name])
        if value.spec.lifetime is Lifetime.WEIGHT and value.spec.per_layer and not self.in_loop:
            self.found.add(LAYER_WEIGHT, span, node=what, weight=value.name)
        return value


_CURRENT: ContextVar[Tracer | None] = ContextVar("megadsl_tracer", default=None)


def current(what: str) -> Tracer:
    """The tracer of the kernel being traced; MK100 when there is none."""
    tracer = _CURRENT.get()
    if tracer is None:
        raise error(NO_KERNEL, caller_span(), what=what)
    return tracer


@contextmanager
def tracing(tracer: Tracer) -> Iterator[None]:
    """Make ``tracer`` the current one."""
    token = _CURRENT.set(tracer)
    try:
        yield
    finally:
        _CURRENT.reset(token)
