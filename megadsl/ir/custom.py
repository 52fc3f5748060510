"""A custom op as it is called: what the user's header and the user's Python say of it. Produced by dsl/, carried by spec and graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Param: TypeAlias = bool | int | float


@dataclass(frozen=True)
class Header:
    """A user's header: its name, for messages, and its text, which becomes a part of kernel.cu."""

    name: str
    text: str = field(repr=False)


@dataclass(frozen=True)
class CustomCall:
    """One call of a custom op. ``function`` is the header's role function, ``args`` name its tensors in order, ``params`` are compiled in.
    ``parts``: features of each output, one after the other in one value; ``scratch``: bytes of shared memory; ``flops``: of a token.

    ``meaning(*tensors, **params)`` is the op in torch: fp32 (tokens, features) and weights of their shapes to fp32 (tokens, features),
    or to a tuple of them where there are several outputs.
    """

    function: str
    header: Header
    args: tuple[str, ...]
    params: tuple[tuple[str, Param], ...]
    parts: tuple[int, ...]
    scratch: int
    flops: int
    meaning: Callable[..., Any] = field(compare=False, repr=False)

    def __str__(self) -> str:
        params = "".join(f", {name}={value}" for name, value in self.params)
        return f"{self.header.name}:{self.function}({', '.join(self.args)}{params})"

    def __getstate__(self) -> dict[str, Any]:
        """What goes to another process: the meaning stays where the user's file was loaded."""
        return {**vars(self), "meaning": _left_behind}

    @property
    def values(self) -> Mapping[str, Param]:
        return dict(self.params)

    @property
    def features(self) -> int:
        """Of all outputs together."""
        return sum(self.parts)


def _left_behind(*_: object, **__: object) -> Any:
    raise AssertionError("a custom op's torch function does not travel between processes: compile the model where it is wanted")
