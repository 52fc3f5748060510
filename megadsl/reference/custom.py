"""Custom ops in torch: the function that the user gave as the op's meaning, held to what its declaration says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megadsl.diagnostics import declare, error
from megadsl.ir.graph import Custom, ValueRef, WeightRef

OTHER_SHAPE = declare(
    "MK281",
    "custom op {name!r}: its torch function gives {found}, the declaration says {wanted}",
    "let the function return what features= declares, a floating-point tensor (tokens, features) for each output",
)


def operands(op: Custom) -> Sequence[ValueRef | WeightRef]:
    """What the function's arguments stand for, in their order."""
    refs: Mapping[str, ValueRef | WeightRef] = dict((*op.inputs, *op.weights))
    return [refs[arg] for arg in op.call.args]


def meaning(op: Custom, tensors: Sequence[Tensor]) -> Tensor:
    """All outputs side by side, fp32 (tokens, features), of ``tensors`` in the order of the function's arguments, which it gets in fp32.

    Raises MK281 for results of another number, shape or kind than declared.
    """
    tokens = next(len(t) for t, ref in zip(tensors, operands(op), strict=True) if isinstance(ref, ValueRef))
    result = op.call.meaning(*(t.float() for t in tensors), **op.call.values)
    found = tuple(result) if isinstance(result, tuple | list) else (result,)
    wanted = [(tokens, features) for features in op.call.parts]
    fits = all(isinstance(t, Tensor) and t.is_floating_point() for t in found) and [tuple(t.shape) for t in found] == wanted
    if not fits:
        shown = ", ".join(f"{tuple(t.shape)} of {t.dtype}" if isinstance(t, Tensor) else f"a {type(t).__name__}" for t in found)
        raise error(OTHER_SHAPE, op.span, name=op.name, found=shown, wanted=", ".join(map(str, wanted)))
    return torch.cat([t.float() for t in found], dim=1)
