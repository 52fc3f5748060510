"""mk.layers: the body is traced once; what goes from layer to layer is found in the caller's local variables."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import FrameType

from megadsl.diagnostics import declare
from megadsl.dsl.naming import unique
from megadsl.dsl.tensor import Layer, Tensor
from megadsl.dsl.tracer import OpenLoop, Tracer
from megadsl.ir.spec import Carried, Loop
from megadsl.ir.spec import Tensor as SpecTensor
from megadsl.ops.base import shape_text
from megadsl.ops.wellformed import CARRIED_SHAPE
from megadsl.source import Span
from megadsl.types import Lifetime

ONE_LOOP = declare(
    "MK145",
    "mk.layers {how}, but a kernel has one layer loop",
    "put all layers in one loop; a step with several kinds of layers is not supported yet",
)
EMPTY_LOOP = declare(
    "MK146", "the body of mk.layers records no op", "iterate with `for layer in mk.layers(n):` and compute inside the body"
)
CARRIED_TYPE = declare(
    "MK147",
    "loop variable {variable!r} is a tensor before the loop and {after} after its body",
    "leave the variable a tensor; give the other result another name",
)
CARRIED_ALIAS = declare(
    "MK148",
    "{first!r} and {second!r} are the same tensor when the loop begins, the body reads it and changes only {first!r}",
    "drop {second!r}: the body is traced once, so reads of the two names cannot be told apart",
)


def _tensors(frame: FrameType) -> dict[str, Tensor]:
    """Activations held by the frame's variables; those in tuples, lists and dicts as ``name[key]``."""
    found: dict[str, Tensor] = {}

    def add(name: str, value: object) -> None:
        if isinstance(value, Tensor) and value.spec.lifetime is Lifetime.ACTIVATION:
            found[name] = value
        elif isinstance(value, tuple | list):
            for i, item in enumerate(value):
                add(f"{name}[{i}]", item)
        elif isinstance(value, dict):
            for key, item in value.items():
                add(f"{name}[{key!r}]", item)

    for name, value in frame.f_locals.items():
        add(name, value)
    return found


class Layers:
    """The iterator of mk.layers: yields one Layer, then closes the loop."""

    def __init__(self, tracer: Tracer, count: int, prefix: str, span: Span) -> None:
        self._tracer = tracer
        self._prefix = prefix
        self._loop = Loop("layers", count, (), span)
        self._before: dict[str, Tensor] = {}
        self._layer: Layer | None = None

    def __iter__(self) -> Iterator[Layer]:
        return self

    def __next__(self) -> Layer:
        frame = sys._getframe(1)
        if self._layer is not None:
            self._layer.close()
            self._close(frame)
            raise StopIteration
        self._begin()
        self._before = _tensors(frame)
        self._layer = Layer(self._tracer, self._prefix)
        return self._layer

    def _begin(self) -> None:
        tracer = self._tracer
        if tracer.open is not None or tracer.loops:
            how = "is nested in another mk.layers" if tracer.open else "is used a second time"
            raise tracer.fail(ONE_LOOP, self._loop.span, how=how)
        tracer.open = OpenLoop(self._loop, len(tracer.nodes))

    def _close(self, frame: FrameType) -> None:
        tracer = self._tracer
        assert tracer.open is not None, "a loop that was begun is open until here"
        first = tracer.open.first_node
        tracer.open = None
        body = tracer.nodes[first:]
        if not body:
            raise tracer.fail(EMPTY_LOOP, self._loop.span)
        after: dict[str, object] = {**frame.f_locals, **_tensors(frame)}
        changed = self._changed({name for node in body for name in node.inputs}, after)
        self._check_aliases(changed, after)
        self._carry(changed, after, first)

    def _changed(self, read: set[str], after: Mapping[str, object]) -> dict[str, Tensor]:
        """Variables that are rebound in the body after their tensor was read there, with the tensor they had before."""
        while True:
            changed = {v: t for v, t in self._before.items() if t.name in read and v in after and after[v] is not t}
            # what a carried variable is set to is read as well: x, y = y, f(x) carries y
            more = {new.name for v in changed if isinstance(new := after[v], Tensor)}
            if more <= read:
                return changed
            read = read | more

    def _check_aliases(self, changed: Mapping[str, Tensor], after: Mapping[str, object]) -> None:
        for variable, tensor in changed.items():
            for other, same in self._before.items():
                if other != variable and same.name == tensor.name and after.get(other) is not after[variable]:
                    self._tracer.found.add(CARRIED_ALIAS, self._loop.span, first=variable, second=other)
                    return

    def _carry(self, changed: Mapping[str, Tensor], after: Mapping[str, object], first: int) -> None:
        """Record the carried variables and let the body read each one's own tensor instead of its initial value."""
        tracer = self._tracer
        carried: dict[str, tuple[str, Tensor]] = {}
        body_in: dict[str, str] = {}
        for variable, old in changed.items():
            new = after[variable]
            if old.name in carried:
                continue
            if not isinstance(new, Tensor):
                tracer.found.add(CARRIED_TYPE, self._loop.span, variable=variable, after=f"a {type(new).__name__}")
                continue
            if new.shape != old.shape:
                tracer.found.add(CARRIED_SHAPE, new.spec.span, variable=variable, before=shape_text(old.shape), after=shape_text(new.shape))
            name = unique(f"{variable}.in", tracer.tensors)
            tracer.declare(SpecTensor(name, old.shape, old.dtype, Lifetime.ACTIVATION, self._loop.span))
            carried[old.name] = (variable, new)
            body_in[old.name] = name
            tracer.overwritten[old.name] = variable
        for i in range(first, len(tracer.nodes)):
            node = tracer.nodes[i]
            tracer.nodes[i] = replace(node, inputs=tuple(body_in.get(name, name) for name in node.inputs))
        records = tuple(
            Carried(variable, initial, body_in[initial], body_in.get(new.name, new.name)) for initial, (variable, new) in carried.items()
        )
        tracer.loops.append(replace(self._loop, carried=records))
