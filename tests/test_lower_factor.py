"""Prologues as an operand times a scale of the row: which have that form, and what the reference makes of it."""

from __future__ import annotations

import pytest
import torch

from megadsl.expr import parse, to_text
from megadsl.ir.graph import Fused, Linear, Part, ValueRef, WeightRef
from megadsl.lower.factor import factored
from megadsl.reference import meaning
from megadsl.source import UNKNOWN

N = 24


def linear(text: str, values: str = "x", vectors: str = "") -> Linear:
    """A linear with that prologue over gathered ``values`` and ``vectors``, one letter each."""
    refs = [(v, ValueRef(v, 0, N)) for v in values] + [(v, WeightRef(v, (N,), False)) for v in vectors]
    part = Part("p", WeightRef("p", (8, N), False), 8)
    return Linear("op", Fused(parse(text, UNKNOWN, [name for name, _ in refs]), tuple(refs)), N, (part,), None, "op", None, None, UNKNOWN)


@pytest.mark.parametrize(
    ("text", "vectors", "operand", "scale"),
    [
        ("x * rsqrt(mean(x * x) + 1e-05) * w", "w", "x * w", "rsqrt(mean(x * x) + 1e-05)"),
        ("w * (x / sqrt(mean(square(x))))", "w", "w * x", "1 / sqrt(mean(square(x)))"),
        ("-x / (max(abs(x)) + 1)", "", "x", "-1 / (max(abs(x)) + 1)"),
        ("2 * exp(x) / w / sum(exp(x))", "w", "exp(x) / w", "2 / sum(exp(x))"),
        ("(x + w) * sum(x) * max(x)", "w", "x + w", "sum(x) * max(x)"),
    ],
)
def test_factors(text: str, vectors: str, operand: str, scale: str) -> None:
    op = linear(text, vectors=vectors)
    found = factored(op)
    assert found is not None
    assert (to_text(found.operand), to_text(found.scale)) == (operand, scale)
    generator = torch.Generator().manual_seed(3)
    args = {name: torch.rand(3, N, generator=generator) + 0.5 for name, _ in op.prologue.args}
    whole, parts = (
        (meaning.evaluate(e, args, (3, N)) for e in (op.prologue.expr, found.operand)),
        meaning.evaluate(found.scale, args, (3, N)),
    )
    exact, first = whole
    assert torch.allclose(first * parts, exact, rtol=1e-5)
    assert bool((parts == parts[:, :1]).all())


@pytest.mark.parametrize(
    ("text", "values", "vectors"),
    [
        ("x * w", "x", "w"),  # no reduction: nothing to take out
        ("x - mean(x)", "x", ""),  # a sum of both kinds
        ("exp(x - max(x)) / sum(x)", "x", ""),  # a factor of both kinds
        ("(x + y) * rsqrt(mean((x + y) * (x + y)))", "xy", ""),  # two values arrive one after the other
        ("w * mean(x)", "x", "w"),  # the operand does not read what is gathered
        ("x * mean(x * w)", "x", "w"),  # a reduction over a vector as well
        ("x * sum(x / max(x))", "x", ""),  # a reduction that waits for another
    ],
)
def test_what_has_no_such_form(text: str, values: str, vectors: str) -> None:
    assert factored(linear(text, values, vectors)) is None
