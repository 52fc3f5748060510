"""Spec: exactly what the user wrote. Produced by dsl/, consumed by lower/ (spec -> graph)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megadsl.source import Span
from megadsl.types import Drawn, DType, Lifetime


@dataclass(frozen=True)
class Tensor:
    """A named tensor.

    Activations have shape (tokens, features); weights (rows, columns) or (length,); a KV cache
    (kv_heads, head_dim). A weight inside ``mk.layers`` has ``per_layer`` and a name with ``{layer}`` in it
    (``model.layers.{layer}.mlp.down_proj.weight``). ``random`` is mean and standard deviation of a weight's elements where
    they are drawn, for want of a checkpoint.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    lifetime: Lifetime
    span: Span
    per_layer: bool = False
    random: Drawn | None = None


@dataclass(frozen=True)
class Node:
    """One op as written. ``op`` is a key of the ops registry: embed, linear, map, head_map, rope, kv_append,
    attention, argmax, custom.

    ``inputs`` and ``outputs`` are tensor names; ``loop`` is the loop's name or None.
    """

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    span: Span
    loop: str | None = None
    attrs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Carried:
    """A loop-carried variable: enters as ``initial``, is read in the body as ``body_in``, leaves as ``body_out``.

    ``body_in`` is a tensor of its own (lifetime activation) that no node produces.
    """

    variable: str
    initial: str
    body_in: str
    body_out: str


@dataclass(frozen=True)
class Loop:
    """``for layer in mk.layers(count)``: the body is every node whose ``loop`` is ``name``."""

    name: str
    count: int
    carried: tuple[Carried, ...]
    span: Span


@dataclass(frozen=True)
class Spec:
    """One traced kernel. ``tokens`` is the most new tokens one launch takes (1 to 16).

    ``outputs`` names the tensors returned by the user's function. ``config`` holds what the models/ function was
    given, for the manifest.
    """

    name: str
    tokens: int
    tensors: Mapping[str, Tensor]
    nodes: tuple[Node, ...]
    loops: tuple[Loop, ...]
    outputs: tuple[str, ...]
    span: Span
    config: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
